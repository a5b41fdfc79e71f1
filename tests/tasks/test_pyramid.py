"""The pyramid of dense tasks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullstride.tasks.dense import Pyramid

CHANNELS, STRIDES = (4, 6, 8, 10, 12), (2, 4, 8, 16, 32)


def maps(side: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, c, side // s, side // s) for c, s in zip(CHANNELS, STRIDES, strict=True)]


@pytest.mark.parametrize("norm", [None, nn.BatchNorm2d])
def test_the_pyramid_equals_its_definition(norm: type[nn.BatchNorm2d] | None) -> None:
    pyramid = Pyramid(CHANNELS, STRIDES, width=16, norm=norm).eval()
    c3, c4, c5 = maps(96)[2:]
    parts = pyramid.levels
    assert parts.extra_blocks is not None
    inner, outer = list(parts.inner_blocks), list(parts.layer_blocks)
    m5 = inner[2](c5)
    m4 = inner[1](c4) + F.interpolate(m5, scale_factor=2)
    m3 = inner[0](c3) + F.interpolate(m4, scale_factor=2)
    p3, p4, p5 = outer[0](m3), outer[1](m4), outer[2](m5)
    extra = dict(parts.extra_blocks.named_children())
    p6 = F.conv2d(p5, extra["p6"].weight, extra["p6"].bias, stride=2, padding=1)
    p7 = F.conv2d(p6.relu(), extra["p7"].weight, extra["p7"].bias, stride=2, padding=1)
    expected = [norm(each) for norm, each in zip(pyramid.norms, (p3, p4, p5, p6, p7), strict=True)]
    torch.testing.assert_close(pyramid(maps(96)), expected)
    assert [each.shape[-1] for each in expected] == [12, 6, 3, 2, 1]
    assert all(each.shape[1] == pyramid.out_channels for each in expected)


def test_a_network_without_a_map_of_stride_8_is_refused() -> None:
    with pytest.raises(ValueError, match="none of 8"):
        Pyramid((4, 8, 8), (4, 16, 32))
