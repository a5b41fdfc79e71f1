"""Grad-CAM is the class activation map where that is defined, and is drawn where it is high."""

import numpy as np
import pytest
import torch
from bundles import COLOUR, make_bundle

from fullstride.nets import zoo
from fullstride.report.gather import HEAT, explained, grad_cam, heated


@pytest.mark.parametrize("name", ["resnet_rs_tiny", "timm/resnet10t"])
def test_grad_cam_of_a_linear_classifier_of_means_is_its_class_activation_map(name):
    """arXiv:1512.04150: the classifier's weights of the class over the channels of the last map."""
    torch.manual_seed(0)
    net = zoo.create(name, classes=3).eval()
    weights = torch.nn.init.uniform_(net.get_parameter(f"{net.classifier}.weight"), -0.5, 1)
    x, classes = torch.rand(2, 3, 96, 64), [2, 0]
    with torch.inference_mode():
        maps = net.features(x)[-1]
    cam = torch.einsum("nc,nchw->nhw", weights.detach()[classes], maps).clamp_min(0)
    expected = (cam / cam.amax((1, 2), keepdim=True)).nan_to_num()
    assert expected.max() == 1
    np.testing.assert_allclose(grad_cam(net, x, classes), expected, atol=1e-5)


def test_an_image_in_which_nothing_speaks_for_the_class_has_zeros():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 1, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    torch.nn.init.constant_(net[0].weight, 1.0)
    torch.nn.init.zeros_(net[0].bias)
    x = torch.stack([torch.ones(1, 4, 4), -torch.ones(1, 4, 4)])
    assert grad_cam(net, x, [0, 0]).tolist() == [[[1.0] * 4] * 4, [[0.0] * 4] * 4]


def test_a_picture_is_grey_where_the_map_is_zero_and_coloured_where_it_is_high():
    view = np.full((4, 8, 3), (30, 60, 90), np.uint8)
    left, right = heated(view, np.array([[0, 1]], np.float32))[:, [0, -1]].astype(int)[0]
    assert left.tolist() == [60, 60, 60]
    assert np.abs(right - HEAT).sum() < np.abs(left - HEAT).sum() / 4
    assert heated(view[:, :, :1], np.zeros((1, 2), np.float32)).tolist() == [[[30] * 3] * 8] * 4


def test_pictures_are_explained_in_batches_as_alone(monkeypatch):
    monkeypatch.setattr("fullstride.deploy.predict.most_in_batch", lambda pre: 2)
    bundle = make_bundle("genet_tiny", COLOUR)
    random = np.random.default_rng(0)
    views = [*random.integers(0, 256, (5, 40, 40, 3), dtype=np.uint8)]
    classes = [3, 1, 4, 1, 5]
    together = explained(bundle, views, classes)
    for view, number, picture in zip(views, classes, together, strict=True):
        (alone,) = explained(bundle, [view], [number])
        assert np.abs(alone.astype(int) - picture).max() <= 1
