"""Lets a network train by memory-efficient operators: `to_fused` changes its classes.

Parameters, state dicts, hooks, evaluation and export stay as they are: each fused class overrides
the forward pass of its plain base class in training, and defers to it everywhere else.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullstride.nets.blocks import Block, DeepStem
from fullstride.nets.fused import batch_norm
from fullstride.nets.layers import BlurPool, ConvNorm, SqueezeExcite
from fullstride.nets.network import Network

Saved = Literal["both", "input", "output"]
Layer = tuple["FusedConvNorm", SqueezeExcite | None]  # with the gate on its output


class Fused(nn.Module):
    """A mixin for modules whose class `to_fused` changed; they pickle as their plain class."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return blank, (plain_class(type(self)),), self.__dict__


class FusedConvNorm(Fused, ConvNorm):
    """`ConvNorm` whose batch norm, activation, gate and blur are one operator in training."""

    saved: Saved = "both"  # tensors of the batch norm that are saved for backward
    group = ""  # name of the process group that shares batch statistics; "": not shared
    int8 = False  # store batch-norm inputs at the end of a block as int8 for the backward pass

    def forward(self, x: Tensor) -> Tensor:
        return self.after_conv(self.conv(x))

    def after_conv(self, x: Tensor, se: SqueezeExcite | None = None) -> Tensor:
        """Batch norm, activation and blur of the convolution's output, then the gate `se`."""
        if not self.norm.training:  # a batch norm may be frozen while other layers train
            y = self.blur(self.act(self.norm(x)))
        elif isinstance(self.blur, BlurPool):
            y, means = batch_norm.bn_act_blur(x, self.norm, self.slope, group=self.group)
            return y if se is None else y * se.gate(means[..., None, None].to(y.dtype))
        elif se is not None and self.slope and self.saved == "output":
            weights = se_weights(se)
            return batch_norm.bn_act_se(x, self.norm, weights, self.slope, group=self.group)
        else:
            saved, group = self.saved, self.group
            y = batch_norm.bn_act(x, self.norm, self.slope, saved=saved, group=group)
        return y if se is None else se(y)


class FusedBlock(Fused, Block):
    """`Block` whose last batch norms, gate, mask, sum and ReLU are one operator in training."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not any(layer.norm.training for layer in fused_layers(self)):
            return super().forward(x, mask)
        if not self.is_fusible():
            branch = self.branch(x)
            if mask is not None:  # not in place, as the branch's result may be saved
                branch = (branch * mask).to(branch.dtype)
            return self.act(branch + self.shortcut(x))
        modules = [*self.branch.children(), None]
        layers: list[Layer] = [
            (layer, after if isinstance(after, SqueezeExcite) else None)
            for layer, after in pairwise(modules)
            if isinstance(layer, FusedConvNorm)
        ]
        last, se = layers[-1]
        other, norm = x, None
        for pool, layer in pairwise((nn.Identity(), *self.shortcut.children())):
            if isinstance(layer, ConvNorm):
                pooled = is_average_pool(pool)
                other = batch_norm.pool_conv(x, layer.conv) if pooled else layer.conv(other)
                norm = layer.norm
            else:
                other = layer(other)
        return batch_norm.bn_add_relu(
            chain(x, layers),
            last.norm,
            (other, norm) if norm else (other,),
            se=se_weights(se) if se else (),
            mask=mask,
            saved="input" if last.saved == "input" else "int8" if last.int8 else "both",
            group=last.group,
        )

    def is_fusible(self) -> bool:
        """Whether branch and shortcut end in batch norms that take statistics from the batch."""
        layers = [layer for layer in self.branch.children() if not isinstance(layer, SqueezeExcite)]
        ends = [layers[-1], *list(self.shortcut.children())[-1:]]
        return (
            all(isinstance(layer, FusedConvNorm) for layer in (*layers, *ends))
            and all(cast(FusedConvNorm, layer).norm.training for layer in ends)
            and cast(FusedConvNorm, layers[-1]).slope is None
        )


class FusedDeepStem(Fused, DeepStem):
    """`DeepStem` whose convolutions recompute their inputs in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.conv1.norm.training:
            return super().forward(x)
        convs = [layer for layer in self.children() if isinstance(layer, FusedConvNorm)]
        x = convs[-1].after_conv(chain(x, [(layer, None) for layer in convs]))
        return x if self.pool is convs[-1] else self.pool(x)


class FusedNetwork(Fused, Network):
    """`Network` that trains by the operators of `batch_norm`; made by `to_fused`.

    The tensors that each batch norm saves depend on its gains (see `batch_norm.is_invertible`).
    They are chosen at each call of `train`, at the start of an epoch: reading the gains at every
    step would synchronise with the GPU.
    """

    is_fused = True

    def train(self, mode: bool = True) -> "FusedNetwork":
        super().train(mode)
        if mode:
            choose_saved_tensors(self)
        return self

    @property
    def custom_operators(self) -> Any:
        from fullstride.nets.fused import compile  # takes seconds to import

        return compile.FUSED  # pyright: ignore[reportAttributeAccessIssue]

    def saved_tensor_choices(self) -> list[str]:
        return [layer.saved for layer in fused_layers(self)]

    def restore_saved_tensor_choices(self, choices: Sequence[str]) -> None:
        if not choices:
            choose_saved_tensors(self)
            return
        for layer, saved in zip(fused_layers(self), choices, strict=True):
            if saved not in get_args(Saved):
                raise ValueError(f"saves {saved!r}: use {', '.join(get_args(Saved))}")
            layer.saved = cast(Saved, saved)


def to_fused(
    net: Network, group: "dist.ProcessGroup | None" = None, *, int8: bool = False
) -> FusedNetwork:
    """Let `net` train by the operators of `batch_norm`, in place: the same numbers, less memory.

    Evaluation does not change. The processes of `group` share their batch statistics, as in
    `nn.SyncBatchNorm`. With `int8`, batch-norm inputs at the ends of blocks are stored as int8 for
    the backward pass (see `batch_norm.bn_add_relu`): less memory, and rounded gradients. A block
    with a forward pass of its own stays plain.
    """
    change_classes(net)
    fused = cast(FusedNetwork, net)
    for layer in fused_layers(fused):
        layer.group, layer.int8 = group.group_name if group else "", int8
    choose_saved_tensors(fused)
    return fused


def change_classes(module: nn.Module) -> None:
    module.__class__ = fused_class(type(module))
    if isinstance(module, Block) and not isinstance(module, FusedBlock):
        return  # its forward pass may change tensors in place that fused layers save
    for child in module.children():
        change_classes(child)


def to_plain(net: Network) -> Network:
    """The inverse of `to_fused`, in place."""
    for module in net.modules():
        module.__class__ = plain_class(type(module))
        for name in ("saved", "group", "int8") if isinstance(module, ConvNorm) else ():
            module.__dict__.pop(name, None)
    return net


def fused_layers(net: nn.Module) -> list[FusedConvNorm]:
    return [layer for layer in net.modules() if isinstance(layer, FusedConvNorm)]


@torch.no_grad()
def choose_saved_tensors(net: FusedNetwork) -> None:
    """Save only outputs where the gains allow it. Waits for the device."""
    layers = fused_layers(net)
    if not layers:
        return
    invertible = torch.stack([batch_norm.is_invertible(layer.norm) for layer in layers])
    # The meta device holds no gains: the initial gains are assumed.
    flags = [True] * len(layers) if invertible.is_meta else invertible.tolist()
    for layer, flag in zip(layers, flags, strict=True):
        layer.saved = "output" if flag and layer.slope else "both"
    layers[-1].saved = "input"  # no convolution follows that would save its output


def chain(x: Tensor, layers: Sequence[Layer]) -> Tensor:
    """`layers` in sequence, each with its gate, up to the output of the last convolution.

    A convolution after a fused layer recomputes its input in the backward pass, unless the batch
    norm before it saves only its output.
    """
    x = layers[0][0].conv(x)
    for (layer, se), (after, _) in pairwise(layers):
        recomputes = layer.norm.training and layer.saved != "output"
        if recomputes and se is None and not isinstance(layer.blur, BlurPool):
            norm, slope, group = layer.norm, layer.slope, layer.group
            x = batch_norm.bn_act_conv(x, norm, slope, after.conv, group=group)
        else:
            x = after.conv(layer.after_conv(x, se))
    return x


def se_weights(se: SqueezeExcite) -> tuple[Tensor, ...]:
    assert se.reduce.bias is not None
    assert se.expand.bias is not None
    return se.reduce.weight, se.reduce.bias, se.expand.weight, se.expand.bias


def is_average_pool(layer: nn.Module) -> bool:
    """Whether `layer` is `layers.average_pool` of stride 2, which `pool_conv` computes."""
    if not isinstance(layer, nn.AvgPool2d):
        return False
    options = layer.kernel_size, layer.stride, layer.ceil_mode, layer.count_include_pad
    return options == (2, 2, True, False)


# Plain class -> the class that replaces its forward pass, also in subclasses that inherit that.
FUSED: dict[type[nn.Module], type[nn.Module]] = {
    ConvNorm: FusedConvNorm,
    Block: FusedBlock,
    DeepStem: FusedDeepStem,
    Network: FusedNetwork,
}


@cache
def fused_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The fused subclass of a plain class; `cls` itself if there is none, or if it is fused."""
    for plain, fused in () if issubclass(cls, Fused) else FUSED.items():
        if cls is plain:
            return fused
        inherits = "forward" not in vars(fused) or cls.forward is plain.forward
        if issubclass(cls, plain) and inherits:
            return type(f"Fused{cls.__name__}", (fused, cls), {"plain": cls})
    return cls


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The inverse of `fused_class`."""
    named = {fused: plain for plain, fused in FUSED.items()}
    return named.get(cls) or cls.__dict__.get("plain", cls)


def blank(cls: type[nn.Module]) -> nn.Module:
    """An empty module of the fused class of `cls`; pickle fills in its state."""
    fused = fused_class(cls)
    return fused.__new__(fused)
