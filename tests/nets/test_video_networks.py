"""Networks of clips agree with plain functions, published counts, and networks of images."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from networks import randomise

from fullstride.nets.blocks import DeepConvStem, DeepStem, PoolStem
from fullstride.nets.bundle import copy_weights
from fullstride.nets.families import SPECS
from fullstride.nets.families.video import video
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec


def small(spec: NetSpec, **changes) -> NetSpec:
    return replace(spec.scaled(width=1 / 8, depth=1 / 2), classes=5, **changes)


def base(spec: NetSpec) -> NetSpec:
    return replace(spec, stages=tuple(replace(s, depth=min(s.depth, 2)) for s in spec.stages))


RESNET, RESNET_RS = base(SPECS["resnet50"]), base(SPECS["resnet_rs_50"])
STYLE = SPECS["resnet3d_50"].style


def video_of(spec: NetSpec, *, stem=PoolStem, se_ratio: float = 0.0, **style: bool) -> NetSpec:
    return video(spec, stem=stem, se_ratio=se_ratio, style=replace(STYLE, **style))


# All pairs of the switches.
SWITCHES = (
    dict(stem=PoolStem, se_ratio=0.0, self_gate=False, average_shortcut=False),
    dict(stem=DeepStem, se_ratio=0.25, self_gate=True, average_shortcut=False),
    dict(stem=DeepStem, se_ratio=0.0, self_gate=False, average_shortcut=True),
    dict(stem=PoolStem, se_ratio=0.2, self_gate=True, average_shortcut=True),
    dict(stem=DeepConvStem, se_ratio=0.25, self_gate=False, average_shortcut=False),
    dict(stem=DeepConvStem, se_ratio=0.0, self_gate=True, average_shortcut=True),
)


class Plain:
    """The source's network by functions of PyTorch on a dict of weights: conv, norm, gates."""

    def __init__(self, state, spec: NetSpec, switches):
        self.state, self.spec, self.switches = state, spec, switches

    def conv_norm(self, x, name, stride=(1, 1, 1), relu=True):
        w = self.state[f"{name}.conv.weight"]
        x = F.conv3d(x, w, stride=stride, padding=tuple(k // 2 for k in w.shape[2:]))
        n = {
            k: self.state[f"{name}.norm.{k}"].view(-1, 1, 1, 1)
            for k in ("running_mean", "running_var", "weight", "bias")
        }
        x = (x - n["running_mean"]) / (n["running_var"] + 1e-5).sqrt() * n["weight"] + n["bias"]
        return x.clamp_min(0) if relu else x

    def linear(self, x, name):
        w, b = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return torch.einsum("oi,ni->no", w.flatten(1), x) + b

    def gated(self, y, x, name):
        return y * self.linear(x, name).sigmoid()[:, :, None, None, None]

    def block(self, x, name, stride, last):
        s = (1, stride, stride)
        y = self.conv_norm(x, f"{name}.branch.conv1")
        y = self.conv_norm(y, f"{name}.branch.conv2", s)
        y = self.conv_norm(y, f"{name}.branch.conv3", relu=False)
        if self.switches["self_gate"] and last:
            y = self.gated(y, y.mean((2, 3, 4)), f"{name}.branch.self_gate.expand")
        if self.switches["se_ratio"]:
            squeezed = self.linear(y.mean((2, 3, 4)), f"{name}.branch.se.reduce").clamp_min(0)
            y = self.gated(y, squeezed, f"{name}.branch.se.expand")
        if f"{name}.shortcut.project.conv.weight" in self.state:
            if self.switches["average_shortcut"] and stride > 1:
                n, c, t = x.shape[:3]
                x = F.avg_pool2d(
                    x.reshape(n * c * t, 1, *x.shape[3:]),
                    2,
                    2,
                    ceil_mode=True,
                    count_include_pad=False,
                )
                x, s = x.reshape(n, c, t, *x.shape[2:]), (1, 1, 1)
            x = self.conv_norm(x, f"{name}.shortcut.project", s, relu=False)
        return (x + y).clamp_min(0)

    def __call__(self, x):
        first = (self.spec.style.time_stride, 2, 2)
        if self.switches["stem"] is PoolStem:
            x = self.conv_norm(x, "stem.conv", first)
        else:
            x = self.conv_norm(x, "stem.conv1", first)
            x = self.conv_norm(self.conv_norm(x, "stem.conv2"), "stem.conv3")
        if self.switches["stem"] is DeepConvStem:
            x = self.conv_norm(x, "stem.pool", (1, 2, 2))
        else:
            frames = [F.max_pool2d(x[:, :, t], 3, 2, 1) for t in range(x.shape[2])]
            x = torch.stack(frames, 2)
        for i, stage in enumerate(self.spec.stages):
            for j in range(stage.depth):
                stride = stage.stride if j == 0 else 1
                x = self.block(x, f"stages.{i}.{j}", stride, j == stage.depth - 1)
        return x.mean((2, 3, 4)) @ self.state["head.fc.weight"].T + self.state["head.fc.bias"]


@pytest.mark.parametrize("switches", SWITCHES, ids=range(len(SWITCHES)))
def test_logits_are_those_of_plain_functions_with_the_same_weights(switches):
    generator = torch.Generator().manual_seed(0)
    image_net = RESNET if switches["stem"] is PoolStem else RESNET_RS
    spec = small(video_of(image_net, **switches))
    net = randomise(Network(spec), generator, 32, frames=8).double()
    plain = Plain(net.state_dict(), spec, switches)
    for size in ((8, 32, 32), (7, 33, 41), (1, 48, 32)):
        clips = torch.randn(2, 3, *size, generator=generator, dtype=torch.float64)
        with torch.inference_mode():
            expected, got = plain(clips), net(clips)
        assert 0.1 < expected.std() < 100
        assert (got - expected).abs().max() <= 1e-9 * expected.abs().max()


def test_parameters_are_those_that_the_source_has():
    def count(spec: NetSpec, *, classifier: bool = True) -> int:
        with torch.device("meta"):
            net = Network(spec)
        return sum(
            p.numel()
            for name, p in net.named_parameters()
            if classifier or not name.startswith("head.fc")
        )

    # official/projects/video_ssl: 31.7 M, and the arithmetic of the facts for 400 classes
    assert count(SPECS["resnet3d_50"], classifier=False) == 31_672_128
    rs = SPECS["resnet3d_rs_50"]
    assert round(count(rs) / 1e6, 2) == 48.13
    ungated = replace(rs, style=replace(rs.style, self_gate=False))
    assert round(count(ungated) / 1e6, 2) == 42.56


def clip_of(image, frames):
    return image[:, :, None].expand(-1, -1, frames, -1, -1)


@pytest.mark.parametrize("source", ["resnet", "resnet_rs"])
def test_a_still_clip_is_answered_as_its_image_by_weights_at_the_centre(source):
    generator = torch.Generator().manual_seed(1)
    spec = small(RESNET if source == "resnet" else RESNET_RS)
    images = randomise(Network(spec), generator, 32).double()
    how = dict(stem=DeepConvStem, se_ratio=0.25, average_shortcut=True)
    clips = video_of(spec, **(how if source == "resnet_rs" else {}))
    net = Network(replace(clips, classes=5)).double().eval()
    assert copy_weights(images, net) == []
    image = torch.randn(2, 3, 40, 32, generator=generator, dtype=torch.float64)
    with torch.inference_mode():
        expected, got = images(image), net(clip_of(image, 9))
    assert (got - expected).abs().max() <= 1e-9 * expected.abs().max()


def test_without_time_the_order_of_the_frames_changes_nothing():
    generator = torch.Generator().manual_seed(3)
    spec = SPECS["resnet3d_rs_tiny"]
    nets = [
        randomise(Network(each), generator, 32, frames=8).double()
        for each in (spec, import_module("video").without_time(spec))
    ]
    clip = torch.randn(1, 3, 8, 32, 32, generator=generator, dtype=torch.float64)
    with torch.inference_mode():
        changes = [(net(clip) - net(clip.flip(2))).abs().max() / net(clip).std() for net in nets]
    assert changes[0] > 0.01
    assert changes[1] < 1e-9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(frames=0), "frames 0"),
        (
            dict(style=replace(SPECS["resnet3d_50"].style, time_kernel=0)),
            "time kernels 0, 1, 1, 3, 3",
        ),
        (dict(style=replace(STYLE, blur=True)), "blur"),
        (dict(stem=SPECS["tresnet_m"].stem), "SpaceToDepthStem"),
    ],
)
def test_a_spec_of_images_and_clips_at_once_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(SPECS["resnet3d_50"], **change)


def test_even_numbers_of_frames_in_a_kernel_are_refused():
    with pytest.raises(ValueError, match="time_kernel 2 of a stage"):
        replace(SPECS["resnet3d_50"].stages[0], time_kernel=2)
