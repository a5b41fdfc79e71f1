"""Builds networks from their specs: `Network(spec)`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fullstride.nets.backbone import Backbone, DropBy, Masks
from fullstride.nets.layers import Head
from fullstride.nets.spec import NetSpec, Stage, input_shape


class Network(Backbone):
    """The stem, stages and head of `spec`: (N, in_channels, H, W) -> (N, K) logits. Any H and W.

    With `spec.frames`, the network takes clips, (N, in_channels, T, H, W) with any T.

    Examples:
        >>> import torch
        >>> import fullstride
        >>> net = fullstride.Network(fullstride.zoo.spec("genet_tiny"))
        >>> net(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    spec: NetSpec
    classifier = "head.fc"

    def __init__(self, spec: NetSpec):
        super().__init__()
        self.spec = spec  # pyright: ignore[reportIncompatibleVariableOverride]
        self.stem = spec.stem(spec.in_channels, spec.stem_width, spec.style)
        width, stride = spec.stem_width, spec.stem.stride
        ends = {stride: width}
        stages = []
        for stage in spec.stages:
            stages.append(build_stage(width, stage, spec))
            width, stride = stage.width, stride * stage.stride
            ends[stride] = width
        self.stages = nn.Sequential(*stages)
        self.head = Head(width, spec.head_width, spec.classes, clips=spec.style.clips)
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
        self, *, drop_path: float = 0.0, by: DropBy = "block", dropout: float = 0.0
    ) -> None:
        """Set the rates of stochastic depth and of dropout before the classifier.

        The rate of stochastic depth grows with depth: by block linearly from 0 to `drop_path`
        (arXiv:1603.09382); by stage as in ResNet-RS's code, `drop_path` * (i + 2) / (stages + 1)
        for the i-th stage from 0.
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

    def layer_numbers(self, *, coarse: bool = False) -> dict[str, int]:
        depths = [stage.depth for stage in self.spec.stages]
        last = len(depths) if coarse else sum(depths)

        def number(name: str) -> int:
            first, *rest = name.split(".")
            if first == "stem":
                return 0
            if first == "stages":
                stage, block = int(rest[0]), int(rest[1])
                return 1 + (stage if coarse else sum(depths[:stage]) + block)
            return last + name.startswith((f"{self.classifier}.", "task_head."))

        return {name: number(name) for name, _ in self.named_parameters()}

    def draw(self, images: int) -> Masks:
        """Masks with the values 0 and 1 / (1 - rate), from PyTorch's generator of the device."""
        weight = self.head.fc.weight

        def mask(rate: float, *shape: int) -> Tensor | None:
            if not rate:
                return None
            values = torch.empty(images, *shape, device=weight.device)
            return values.bernoulli_(1 - rate) / (1 - rate)

        ones = [1] * len(input_shape(self.spec))
        branches = tuple(mask(rate, *ones) for rate in self.drop_paths)
        return Masks(branches, mask(self.dropout, weight.shape[1]))

    def forward(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        """Logits (N, K). In training, masks are drawn if none are passed.

        Masks are an input so that they can be drawn outside of a compiled network: a compiler that
        recomputes activations would draw other masks.
        """
        if self.task_head is not None:
            return self.task_head(self.head_input(x, masks))
        return self.head(*self.last_map(x, masks))

    def embed(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        return self.head.embed(self.last_map(x, masks)[0])

    def logits_and_embedding(self, x: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
        last, mask = self.last_map(x, masks)
        embedding = self.head.embed(last)
        return self.head.classify(embedding, mask), embedding

    def last_map(self, x: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor | None]:
        """The output of the stages, and the mask of the global average."""
        if masks is None and self.training and (self.dropout or any(self.drop_paths)):
            masks = self.draw(len(x))
        if masks is None:
            return self.stages(self.stem(x)), None
        x = self.stem(x)
        blocks = (block for stage in self.stages for block in stage.children())
        for block, mask in zip(blocks, masks.branches, strict=True):
            x = block(x, mask)
        return x, masks.pooled

    def features(self, x: Tensor, out_indices: Sequence[int] | None = None) -> tuple[Tensor, ...]:
        """As in `Backbone`; sizes round up, and the head's convolution belongs to the classifier.

        Stages behind the last of `out_indices` are not computed.
        """
        numbers = self.map_numbers(out_indices)
        x, stride = self.stem(x), self.strides[0]
        maps = {stride: x}
        for module, stage in zip(self.stages, self.spec.stages, strict=True):
            if stage.stride > 1 and len(maps) > numbers[-1]:
                break
            x = module(x)
            stride *= stage.stride
            maps[stride] = x
        return tuple(each for number, each in enumerate(maps.values()) if number in numbers)


def build_stage(c_in: int, stage: Stage, spec: NetSpec) -> nn.Sequential:
    def block(number: int) -> nn.Module:
        return stage.block(
            c_in if number == 0 else stage.width,
            stage.width,
            inner=stage.inner,
            kernel=stage.kernel,
            stride=stage.stride if number == 0 else 1,
            groups=stage.groups,
            se=stage.se,
            style=replace(
                spec.style,
                time_kernel=stage.time_kernel,
                self_gate=spec.style.self_gate and number == stage.depth - 1,
            ),
        )

    return nn.Sequential(*(block(number) for number in range(stage.depth)))
