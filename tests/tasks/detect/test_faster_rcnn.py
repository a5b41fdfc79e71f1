"""Is Faster R-CNN torchvision's? Losses and detections of both with the same weights."""

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign

from fullstride.tasks.detect import faster_rcnn
from fullstride.tasks.detect.faster_rcnn import FasterRcnnHead, levels_by_name

WIDTH, SIDE, CLASSES = 16, 128, 3
CHANNELS, STRIDES = (8, 12, 20, 24), (4, 8, 16, 32)


class SlowAnchors(AnchorGenerator):
    """One anchor after the other."""

    def forward(self, image_list, feature_maps) -> list[Tensor]:
        boxes = []
        for x, stride in zip(feature_maps, (8, 16, 32, 64, 128), strict=True):
            for row in range(x.shape[2]):
                for column in range(x.shape[3]):
                    for ratio in (0.5, 1, 2):
                        h, w = 8 * stride * ratio**0.5, 8 * stride / ratio**0.5
                        cx, cy = (column + 0.5) * stride, (row + 0.5) * stride
                        boxes.append([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2])
        return [torch.tensor(boxes)] * len(image_list.image_sizes)


class Levels(nn.Module):
    """A backbone that returns the pyramid of given maps."""

    out_channels = WIDTH

    def __init__(self, head: FasterRcnnHead, maps: list[Tensor]):
        super().__init__()
        self.head, self.maps = [head], maps

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return levels_by_name(self.head[0].pyramid(self.maps))


def theirs(head: FasterRcnnHead, maps: list[Tensor]) -> FasterRCNN:
    sizes, names = tuple((8 * s,) for s in (8, 16, 32, 64, 128)), [str(i) for i in range(5)]
    model = FasterRCNN(
        Levels(head, maps),
        None,
        min_size=SIDE,
        max_size=SIDE,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        rpn_anchor_generator=SlowAnchors(sizes, ((0.5, 1.0, 2.0),) * 5),
        rpn_head=RPNHead(WIDTH, 3),
        rpn_pre_nms_top_n_train=2000,
        rpn_pre_nms_top_n_test=1000,
        rpn_post_nms_top_n_train=1000,
        rpn_post_nms_top_n_test=1000,
        box_roi_pool=MultiScaleRoIAlign(names, 7, 2),
        box_head=FastRCNNConvFCHead((WIDTH, 7, 7), [WIDTH] * 2, [32]),
        box_predictor=FastRCNNPredictor(32, CLASSES + 1),
    )
    model.rpn.load_state_dict(head.rpn.state_dict())
    model.roi_heads.load_state_dict(head.roi.state_dict())
    return model


@pytest.fixture
def head() -> FasterRcnnHead:
    torch.manual_seed(0)
    head = FasterRcnnHead(CHANNELS, STRIDES, CLASSES, width=WIDTH, convs=2, hidden=32)
    # as after training: with fresh weights all boxes would be alike
    for part in (head.rpn.head, head.roi.box_predictor):
        for parameter in part.parameters():
            nn.init.normal_(parameter, std=0.15)
    return head


@pytest.fixture
def maps() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, channels, SIDE // stride, SIDE // stride, generator=generator)
        for channels, stride in zip(CHANNELS, STRIDES, strict=True)
    ]


def objects(boxes: list[list[float]], labels: list[int], difficult: list[bool]) -> dict:
    return {
        "boxes": torch.tensor(boxes).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.long),
        "difficult": torch.tensor(difficult, dtype=torch.bool),
        "scale": torch.tensor(1.0),
    }


TARGETS = [
    objects(
        [[10.0, 12, 60, 70], [50, 40, 120, 100], [0, 0, 30, 30]], [0, 2, 1], [False, False, True]
    ),
    objects([], [], []),
]


def test_losses_are_torchvisions_with_the_same_weights(head, maps, monkeypatch):
    # theirs is the smooth L1 loss with beta 1/9, which is a Huber loss divided by its delta
    monkeypatch.setattr(faster_rcnn, "HUBER_DELTA", 1 / 9)
    model = theirs(head, maps).train()
    images = list(torch.zeros(2, 3, SIDE, SIDE))
    clear = [
        {"boxes": TARGETS[0]["boxes"][:2], "labels": torch.tensor([1, 3])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)},
    ]
    for part in (model.rpn, head.rpn):  # samples are random; torchvision draws a size before
        part.register_forward_pre_hook(lambda *_: torch.manual_seed(3) and None)
    expected = model(images, clear)
    losses = head.train()(maps, TARGETS)
    assert losses["proposal_class"].item() == pytest.approx(expected["loss_objectness"].item())
    assert losses["proposal_box"].item() == pytest.approx(expected["loss_rpn_box_reg"].item())
    assert losses["class"].item() == pytest.approx(expected["loss_classifier"].item())
    assert 9 * losses["box"].item() == pytest.approx(expected["loss_box_reg"].item())
    assert losses["box"] > 0


def test_detections_are_torchvisions_with_the_same_weights(head, maps):
    model = theirs(head, maps).eval()
    with torch.inference_mode():
        expected = model(list(torch.zeros(2, 3, SIDE, SIDE)))
        detections = head.eval()(maps)
    assert detections.shape == (2, 100, 6)
    for rows, each in zip(detections, expected, strict=True):
        rows = rows[rows[:, 5] >= 0]
        assert len(rows) == len(each["boxes"]) > 10
        assert torch.allclose(rows[:, 4], each["scores"], atol=1e-5)
        # of equal scores the order is free
        labelled = torch.cat((each["boxes"], 1000.0 * (each["labels"] - 1)[:, None]), 1)
        distances = torch.cdist(
            rows[:, [0, 1, 2, 3, 5]] * torch.tensor([1, 1, 1, 1, 1e3]),
            labelled,
            compute_mode="donot_use_mm_for_euclid_dist",
        )
        assert distances.amin(0).max() < 1e-2
        assert distances.amin(1).max() < 1e-2


def test_what_int8_changes_is_measured_before_boxes_are_chosen(head, maps):
    """By the outputs of both parts for all and for given boxes, in training without targets."""
    expected = head.eval()(maps)
    levels = head.pyramid(maps)
    objectness, deltas = head.rpn.head(levels)
    head.training = True
    found = head(maps)
    assert [tuple(each.shape) for each in found[:2]] == [(2, 341, 3), (2, 341, 12)]
    assert torch.equal(found[0][:, :256], objectness[0].flatten(2).transpose(1, 2))
    assert torch.equal(found[1][:, 340:], deltas[4].flatten(2).transpose(1, 2))
    boxes = faster_rcnn.anchors(levels)[::2]  # of 1,023, as 1,000 are the most
    pooled = faster_rcnn.pooling()(levels_by_name(levels), [boxes, boxes], [(SIDE, SIDE)] * 2)
    logits, of_classes = head.roi.box_predictor(head.roi.box_head(pooled))
    assert torch.allclose(found[2], logits, atol=1e-5)
    assert torch.allclose(found[3], of_classes, atol=1e-5)
    assert torch.equal(head.eval()(maps), expected)


def test_every_parameter_learns_but_without_objects_that_of_their_boxes(head, maps):
    losses = head.train()(maps, TARGETS)
    sum(losses.values()).backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in head.parameters())
    losses = head(maps, [TARGETS[1]] * 2)
    assert all(each.isfinite() for each in losses.values())
    assert losses["box"] == 0


def test_an_image_of_one_object_is_learnt_in_a_few_steps(head, maps):
    target = [objects([[32.0, 32, 96, 96]], [1], [False])] * 2
    optimizer = torch.optim.SGD(head.train().parameters(), 0.02, momentum=0.9)
    for step in range(60):
        torch.manual_seed(step)
        optimizer.zero_grad()
        sum(head(maps, target).values()).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 5)
        optimizer.step()
    best = head.eval()(maps)[0, 0].tolist()
    assert best[5] == 1
    assert best[:4] == pytest.approx([32, 32, 96, 96], abs=8)
    assert best[4] > 0.5
