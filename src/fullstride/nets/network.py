"""How does data become a module? The one builder: `Network(spec)`."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullstride.nets.backbone import Backbone, Masks
from fullstride.nets.fused.batch_norm import invertible
from fullstride.nets.layers import ConvNorm, Head, Lean, Save
from fullstride.nets.spec import NetSpec, Stage


class Network(Backbone):
    """Stem, stages, head, as `spec` says: (N, in_channels, H, W) -> (N, K) logits. Any H and W.

    `channels` and `strides` describe what `features` returns.
    """

    spec: NetSpec  # pyright: ignore[reportIncompatibleVariableOverride]
    classifier = "head.fc"
    lean_group: str | None = None  # name of the processes that `lean` was given; None: not lean
    int8_maps = False  # as `lean` was given

    def __init__(self, spec: NetSpec):
        super().__init__()
        self.spec = spec
        self.stem = spec.stem(spec.in_channels, spec.stem_width, spec.style)
        width, stride = spec.stem_width, spec.stem.stride
        ends = {stride: width}
        stages = []
        for stage in spec.stages:
            stages.append(blocks(width, stage, spec))
            width, stride = stage.width, stride * stage.stride
            ends[stride] = width
        self.stages = nn.Sequential(*stages)
        self.head = Head(width, spec.head_width, spec.classes)
        self._channels = ends  # by stride
        self.regularise()
        spec.init(self)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(self._channels)

    @property
    def channels(self) -> tuple[int, ...]:
        return tuple(self._channels.values())

    def regularise(
        self,
        *,
        drop_path: float = 0.0,
        by: Literal["block", "stage"] = "block",
        dropout: float = 0.0,
    ) -> None:
        """Set what training leaves out by chance: branches of blocks, and what the classifier sees.

        The probability that a branch is left out grows with depth: by block on a line from 0 to `drop_path`
        (arXiv:1603.09382); by stage as in ResNet-RS's code, `drop_path` * (i + 2) / (stages + 1) for the i-th from 0.
        """
        depths = [stage.depth for stage in self.spec.stages]
        if by == "stage":
            rates = [
                drop_path * (i + 2) / (len(depths) + 1)
                for i, depth in enumerate(depths)
                for _ in range(depth)
            ]
        else:
            rates = [drop_path * i / max(sum(depths) - 1, 1) for i in range(sum(depths))]
        self.drop_paths, self.dropout = tuple(rates), dropout

    def lean(
        self, on: bool = True, group: "dist.ProcessGroup | None" = None, *, int8: bool = False
    ) -> "Network":
        """Train by the operators of `abn`: the same numbers from less memory. All else is unchanged, evaluation too.

        The processes of `group` take their batch statistics together, which plain networks do not. Which batch norms
        keep their result in place of their input depends on their gains (see `abn.invertible`), which are looked at
        here and at every call of `train`, as at the start of an epoch; between, a GPU need not be waited for.

        `int8`: what only the batch norms at the ends of blocks need is kept in a byte a value (see `abn.tail`): less
        memory yet, and gradients that are a little less exact.
        """
        self.int8_maps = on and int8
        self.lean_group = (group.group_name if group else "") if on else None
        self.choose_saves()
        return self

    def train(self, mode: bool = True) -> "Network":
        super().train(mode)
        if mode:
            self.choose_saves()
        return self

    @property
    def saves(self) -> list[Save]:
        """What each batch norm keeps while the network learns lean; nothing where it does not."""
        layers = [layer for layer in self.modules() if isinstance(layer, ConvNorm)]
        return [layer.lean.save for layer in layers if layer.lean]

    def saved_tensor_choices(self) -> list[str]:
        return list(self.saves)

    def restore_saved_tensor_choices(self, choices: Sequence[str]) -> None:
        self.choose_saves(cast(Sequence[Save], choices))

    def choose_saves(self, saves: Sequence[Save] = ()) -> None:
        """Decide what each batch norm keeps, or take it over: an epoch that goes on must round as it began."""
        layers = [layer for layer in self.modules() if isinstance(layer, ConvNorm)]
        if self.lean_group is None:
            for layer in layers:
                layer.lean = None
            return
        if not saves:
            healthy = torch.stack([invertible(layer.norm) for layer in layers])
            # On the meta device, where there are no gains to look at, they pass for fresh ones.
            found = [True] * len(layers) if healthy.is_meta else healthy.tolist()
            which = zip(layers[:-1], found[:-1], strict=True)
            first: list[Save] = [
                "output" if fits and layer.slope else "both" for layer, fits in which
            ]
            saves = [*first, "input"]  # no convolution follows the last one and keeps its result
        for layer, save in zip(layers, saves, strict=True):
            layer.lean = Lean(save, self.lean_group, self.int8_maps)

    def draw(self, images: int) -> Masks:
        """Masks for one step of `images` images, from PyTorch's generator of the device. What is kept is scaled up."""
        where = self.head.fc.weight

        def kept(rate: float, *shape: int) -> Tensor | None:
            return (
                torch.empty(images, *shape, device=where.device).bernoulli_(1 - rate) / (1 - rate)
                if rate
                else None
            )

        branches = tuple(kept(rate, 1, 1, 1) for rate in self.drop_paths)
        return Masks(branches, kept(self.dropout, where.shape[1]))

    def forward(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        """`masks`: drawn here where training wants some and none are given.

        They come as an input so that whoever compiles the network can draw them outside of what is compiled:
        compilers that compute activations a second time would draw other ones.
        """
        return self.head(*self.last_map(x, masks))

    def embed(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        """What the classifier sees, before dropout: (N, channels of the global average)."""
        return self.head.embed(self.last_map(x, masks)[0])

    def logits_and_embedding(self, x: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
        """`forward` and `embed` in one pass."""
        last, keep = self.last_map(x, masks)
        embedding = self.head.embed(last)
        return self.head.classify(embedding, keep), embedding

    def last_map(self, x: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor | None]:
        """What the stages make of `x`, and the mask of the global average."""
        if masks is None and self.training and (self.dropout or any(self.drop_paths)):
            masks = self.draw(len(x))
        if masks is None:
            return self.stages(self.stem(x)), None
        x = self.stem(x)
        for block, keep in zip(
            (block for stage in self.stages for block in stage.children()),
            masks.branches,
            strict=True,
        ):
            x = block(x, keep)
        return x, masks.pooled

    def features(self, x: Tensor) -> tuple[Tensor, ...]:
        """The pyramid: the last map at every stride, each (N, channels[i], H / strides[i], W / strides[i]) rounded up.

        The head's 1 x 1 convolution, where there is one, belongs to the classifier and not to the pyramid.
        """
        maps = {}
        x = self.stem(x)
        stride = self.strides[0]
        maps[stride] = x
        for module, stage in zip(self.stages, self.spec.stages, strict=True):
            x = module(x)
            stride *= stage.stride
            maps[stride] = x
        return tuple(maps.values())


def blocks(c_in: int, stage: Stage, spec: NetSpec) -> nn.Sequential:
    def block(number: int) -> nn.Module:
        return stage.block(
            c_in if number == 0 else stage.width,
            stage.width,
            inner=stage.inner,
            kernel=stage.kernel,
            stride=stage.stride if number == 0 else 1,
            groups=stage.groups,
            se=stage.se,
            style=spec.style,
        )

    return nn.Sequential(*(block(number) for number in range(stage.depth)))
