"""How do odd widths get whole tiles? By channels of zeros up to a multiple of 8, which change no number.

Tensor cores and loads of 128 bits want channels in eights; TResNet-L has 76 of them, TResNet-XL 83. A padded channel
has rows of weights that are zero, so it is zero behind its convolution, its batch norm and its activation, and no
weight that reads it gets a gradient. Its own rows get none either, as all that reads it is zero: training, with weight
decay or momentum, leaves the padding as it is.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fullstride.nets.blocks import DeepStem
from fullstride.nets.fused.network import FusedNetwork, fused_layers, to_fused
from fullstride.nets.network import Network
from fullstride.nets.spec import MOST_CHANNELS, NetSpec, Stage, check_range

# What is one, not zero, in the padding. A gain of zero would make `abn.invertible` refuse the layer; it scales a
# normalised value that is zero, so it gets no gradient and its size is of no matter. The same holds for variances.
ONES = ("norm.weight", "norm.running_var")


def padded(net: Network, multiple: int = 8) -> Network:
    """The same network with channels of zeros up to multiples of `multiple`; `net` itself where none is missing.

    Logits and training are equal but for the order of sums; maps, `features` and `embed` have more channels. Where
    what the classifier sees is widened (in no TResNet of the zoo), dropout draws more numbers from the same seed:
    other masks, as likely as before. Raises ValueError where channels of grouped convolutions would not divide.
    """
    spec = padded_spec(net.spec, multiple)
    if spec == net.spec:
        return net
    wide = twin(net, spec)
    state = wide.state_dict()
    for name, value in net.state_dict().items():
        state[name].fill_(name.endswith(ONES))
        corner(state[name], value).copy_(value)
    return wide


def unpadded(net: Network, spec: NetSpec) -> Network:
    """Back again: the network of `spec` whose padded form `net` is, which may have been trained; `net` where it fits.

    Raises ValueError where `net` is no such form, or where its padding is not zero and would be lost.
    """
    if net.spec == spec:
        return net
    widths = ((stage.width, stage.ratio) for stage in net.spec.stages)
    stages = tuple(
        replace(stage, width=w, ratio=r) for stage, (w, r) in zip(spec.stages, widths, strict=False)
    )
    like = replace(
        spec, stem_width=net.spec.stem_width, head_width=net.spec.head_width, stages=stages
    )
    if like != net.spec:
        raise ValueError(
            "the network is not of that spec in more than its widths: give the spec that was padded"
        )
    narrow = twin(net, spec)
    state = narrow.state_dict()
    for name, value in net.state_dict().items():
        if any(few > many for few, many in zip(state[name].shape, value.shape, strict=True)):
            raise ValueError(
                f"{name} has {tuple(value.shape)}, less than {tuple(state[name].shape)}: give the spec that was padded"
            )
        inner = corner(value, state[name])
        state[name].copy_(inner)
        if not name.endswith(ONES) and value.count_nonzero() > inner.count_nonzero():
            raise ValueError(
                f"the padding of {name} is not zero: what moved it would be lost, keep the padded network"
            )
    return narrow


def padded_spec(spec: NetSpec, multiple: int = 8) -> NetSpec:
    """`spec` with the stem's width, widths, inner channels and the head's width rounded up to multiples."""
    check_range("padding to multiples of", multiple, MOST_CHANNELS)

    def up(channels: int, step: int = multiple) -> int:
        return -(-channels // step) * step

    # A deep stem's first convolutions have half of its channels.
    stem = up(spec.stem_width, 2 * multiple if issubclass(spec.stem, DeepStem) else multiple)
    before, wide, stages = spec.stem_width, stem, list[Stage]()
    for stage in spec.stages:
        width, inner = up(stage.width), up(stage.inner)
        if stage.stride == 1 and stage.width == before:
            width = wide
        elif stage.stride == 1 and width == wide:
            width += multiple  # equal widths would make an identity of the shortcut's convolution
        if stage.group_width and inner % stage.group_width:
            raise ValueError(
                f"{stage.inner} inner channels padded to {inner} do not divide into groups of {stage.group_width}: "
                "leave the network as it is"
            )
        ratio = stage.ratio if round(width * stage.ratio) == inner else inner / width
        stages.append(replace(stage, width=width, ratio=ratio))
        before, wide = stage.width, width
    return replace(spec, stem_width=stem, stages=tuple(stages), head_width=up(spec.head_width))


def twin(net: Network, spec: NetSpec) -> Network:
    """A network of `spec`, which has other widths, with all settings of `net`; its weights are fresh ones.

    Raises ValueError where it has other parts than `net`, or other groups of channels.
    """
    with torch.random.fork_rng(
        devices=[]
    ):  # these weights are not used: what is drawn next must not depend on them
        try:
            other = Network(spec).to(net.head.fc.weight)
        except ValueError as error:  # of convolutions in groups
            raise ValueError(
                f"padded, the network cannot be built ({error}): leave it as it is"
            ) from None
    if list(net.state_dict()) != list(other.state_dict()):
        raise ValueError(
            "the network has other parts than that spec: give the spec that was padded"
        )
    for old, new in zip(net.modules(), other.modules(), strict=True):
        new.training = old.training
        if isinstance(old, nn.BatchNorm2d) and isinstance(new, nn.BatchNorm2d):
            new.eps, new.momentum = old.eps, old.momentum
        if (
            isinstance(old, nn.Conv2d)
            and isinstance(new, nn.Conv2d)
            and not old.groups == new.groups == 1
        ):
            old_group, new_group = (
                (c.in_channels // c.groups, c.out_channels // c.groups) for c in (old, new)
            )
            if old_group != new_group:
                raise ValueError(
                    f"groups of {old_group} channels would become {new_group}: leave the network as it is"
                )
    for old, new in zip(net.parameters(), other.parameters(), strict=True):
        new.requires_grad_(old.requires_grad)
    other.drop_paths, other.dropout = net.drop_paths, net.dropout
    if isinstance(net, FusedNetwork):
        for old, new in zip(fused_layers(net), fused_layers(to_fused(other)), strict=True):
            new.saved, new.group, new.int8 = old.saved, old.group, old.int8
    return other


def corner(wide: Tensor, narrow: Tensor) -> Tensor:
    """The leading part of `wide` that has the shape of `narrow`; a view."""
    return wide[tuple(slice(size) for size in narrow.shape)]
