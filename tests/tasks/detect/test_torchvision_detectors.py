"""docs/tasks/detection.md: a network of the zoo is the backbone of a detector of torchvision."""

import pytest
import torch
from pages import code
from torchvision.models.detection.image_list import ImageList

PAGE = "docs/tasks/detection.md"
H, W = 64, 96


@pytest.fixture(scope="module")
def shown():
    """The names that the Python of the page binds."""
    torch.manual_seed(0)
    (block,) = code(PAGE)
    names = {}
    exec(compile(block, PAGE, "exec"), names)
    return names


def test_anchors_are_as_far_apart_as_the_strides_of_the_chosen_maps(shown):
    x = torch.rand(1, 3, H, W)
    maps = list(shown["detector"].backbone(x).values())
    (boxes,) = shown["anchors"](ImageList(x, [(H, W)]), maps)
    strides = [shown["net"].strides[i] for i in shown["out_indices"]]
    counts = [(H // s) * (W // s) * 3 for s in strides]
    for stride, level in zip(strides, boxes.split(counts), strict=True):
        centres = (level[:, :2] + level[:, 2:]).view(H // stride, W // stride, 3, 2) / 2
        across, down = torch.meshgrid(
            torch.arange(0, W, stride), torch.arange(0, H, stride), indexing="xy"
        )
        expected = torch.stack([across, down], dim=2)[:, :, None]
        assert torch.equal(centres, expected.expand_as(centres).float())


def test_the_losses_reach_the_network_and_detections_lie_in_the_picture(shown):
    detector, net = shown["detector"], shown["net"]
    x = torch.rand(3, H, W)
    target = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([3])}
    losses = detector.train()([x], [target])
    sum(losses.values()).backward()
    for part in (net.stem, *net.stages):  # gains begin at zero, so some gradients are zero
        assert any(parameter.grad.abs().sum() > 0 for parameter in part.parameters())
    assert all(parameter.grad is None for parameter in net.head.parameters())
    with torch.inference_mode():
        (detected,) = detector.eval()([x])
    assert len(detected["boxes"])
    assert (detected["boxes"] >= 0).all()
    assert (detected["boxes"] <= torch.tensor([W, H, W, H])).all()
