"""Pads networks of odd widths with zero channels, so that they fill whole tiles.

Tensor cores and 128-bit loads need multiples of 8 channels; TResNet-L has 76, TResNet-XL 83. The
weights of a padded channel are zero, so it is zero after its convolution, batch norm and
activation, and the weights that read it get no gradient. The channel's own weights get none either,
as the weights that read it are zero: training, with weight decay or momentum, keeps the padding.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.nets.backbone import Backbone
from fullstride.nets.blocks import DeepStem
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec, Stage

MULTIPLE = 8  # channels
# These are padded with ones, as in a new batch norm: a gain that scales zeros gets no gradient.
ONES = ("norm.weight", "norm.running_var")


def to_padded(net: nn.Module, name: str = "this network") -> Network:
    """The network with zero channels up to multiples of `MULTIPLE`; `net` itself if none is needed.

    Logits and training are equal up to the order of sums; maps, `features` and `embed` have more
    channels. If the input of the classifier is widened (in no TResNet of the zoo), dropout draws
    other masks from the same seed. Raises ValueError if grouped channels would not divide, and for
    a network from elsewhere; `name` is for the message.
    """
    if not isinstance(net, Network) or net.spec.frames:
        raise ValueError(
            f"{name} has no padded form: leave pad_channels out, or use a network of images that "
            "`fullstride zoo` lists"
        )
    spec = padded_spec(net.spec)
    if spec == net.spec:
        return net
    wide = twin(net, spec)
    state = wide.state_dict()
    for name, value in net.state_dict().items():
        state[name].fill_(name.endswith(ONES))
        corner(state[name], value).copy_(value)
    return wide


def to_unpadded(net: Backbone, spec: Any) -> Backbone:
    """The inverse of `to_padded`: the network of `spec` from its padded form `net`.

    Returns `net` itself if it has this spec. Raises ValueError if `net` is no padded form of
    `spec`, or if its padding is not zero and would be lost.
    """
    if net.spec == spec:
        return net
    assert isinstance(net, Network)
    widths = ((stage.width, stage.ratio) for stage in net.spec.stages)
    stages = tuple(
        replace(stage, width=w, ratio=r) for stage, (w, r) in zip(spec.stages, widths, strict=False)
    )
    like = replace(
        spec, stem_width=net.spec.stem_width, head_width=net.spec.head_width, stages=stages
    )
    if like != net.spec:
        raise ValueError(
            "the network and that spec differ in more than widths: use the spec that was padded"
        )
    narrow = twin(net, spec)
    state = narrow.state_dict()
    for name, value in net.state_dict().items():
        if any(few > many for few, many in zip(state[name].shape, value.shape, strict=True)):
            raise ValueError(
                f"{name} has {tuple(value.shape)}, less than {tuple(state[name].shape)}: "
                "use the spec that was padded"
            )
        inner = corner(value, state[name])
        state[name].copy_(inner)
        if not name.endswith(ONES) and value.count_nonzero() > inner.count_nonzero():
            raise ValueError(
                f"the padding of {name} is not zero and would be lost: use the padded network"
            )
    return narrow


def padded_spec(spec: NetSpec) -> NetSpec:
    """`spec` with all numbers of channels rounded up to multiples of `MULTIPLE`."""

    def up(channels: int, step: int = MULTIPLE) -> int:
        return -(-channels // step) * step

    # A deep stem's first convolutions have half the channels of the stem.
    stem = up(spec.stem_width, 2 * MULTIPLE if issubclass(spec.stem, DeepStem) else MULTIPLE)
    before, wide, stages = spec.stem_width, stem, list[Stage]()
    for stage in spec.stages:
        width, inner = up(stage.width), up(stage.inner)
        if stage.stride == 1 and stage.width == before:
            width = wide
        elif stage.stride == 1 and width == wide:
            width += MULTIPLE  # equal widths would make an identity of the shortcut's convolution
        if stage.group_width and inner % stage.group_width:
            raise ValueError(
                f"{stage.inner} inner channels padded to {inner} do not divide into groups of "
                f"{stage.group_width}: use the network without padding"
            )
        ratio = stage.ratio if round(width * stage.ratio) == inner else inner / width
        stages.append(replace(stage, width=width, ratio=ratio))
        before, wide = stage.width, width
    head = up(spec.head_width)
    try:
        return replace(spec, stem_width=stem, stages=tuple(stages), head_width=head)
    except ValueError as error:  # from groups of basic blocks
        raise ValueError(
            f"with padding the network cannot be built ({error}): use it without"
        ) from None


def twin(net: Network, spec: NetSpec) -> Network:
    """A network of `spec`, which has other widths, with the settings of `net` and fresh weights.

    Raises ValueError if its modules or groups of channels differ from `net`.
    """
    with torch.random.fork_rng(devices=[]):  # later draws must not depend on unused weights
        other = Network(spec).to(net.head.fc.weight)
    if list(net.state_dict()) != list(other.state_dict()):
        raise ValueError(
            "the network has other modules than that spec: use the spec that was padded"
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
                    f"groups of {old_group} channels would become {new_group}: "
                    "use the network without padding"
                )
    for old, new in zip(net.parameters(), other.parameters(), strict=True):
        new.requires_grad_(old.requires_grad)
    other.drop_paths, other.dropout = net.drop_paths, net.dropout
    return other


def corner(wide: Tensor, narrow: Tensor) -> Tensor:
    """The leading part of `wide` with the shape of `narrow`, as a view."""
    return wide[tuple(slice(size) for size in narrow.shape)]
