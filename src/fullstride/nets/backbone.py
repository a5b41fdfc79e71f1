"""What do the networks of this package and of timm have in common? `Backbone`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn


class Masks(NamedTuple):
    """The random masks of one training step. None: nothing is dropped."""

    branches: tuple[Tensor | None, ...]  # of stochastic depth, (N, 1, 1, 1) for every block
    pooled: Tensor | None  # of dropout, (N, channels of the global average)


class Spec(Protocol):
    """The description of a network, as frozen data."""

    @property
    def in_channels(self) -> int: ...

    @property
    def classes(self) -> int: ...

    @property
    def resolution(self) -> int: ...

    @property
    def source(self) -> str: ...

    def to_json(self) -> str: ...


class EmbeddingHead(nn.Module):
    """A task's head over the input of the classifier, (N, C), in place of the maps."""


class Backbone(nn.Module, ABC):
    """A classifier with a feature pyramid: (N, in_channels, H, W) -> (N, K) logits.

    `channels` and `strides` describe what `features` returns. With a `task_head`, a module over
    these maps or, if it is an `EmbeddingHead`, over `embed`, `forward` returns what that makes of
    them in place of logits.
    """

    spec: Spec
    classifier: str  # path of the linear layer that gives the logits
    task_head: nn.Module | None
    root = ""  # path of the module that holds stem, stages and head; "" is the network itself
    is_fused = False  # whether it trains by the operators of `nets.fused`

    def __init__(self) -> None:
        super().__init__()
        self.register_module("task_head", None)

    def __repr__(self) -> str:
        """One line; `print` shows the tree of modules, as of any module of PyTorch."""
        spec, count = self.spec, sum(parameter.numel() for parameter in self.parameters())
        shape = f"{spec.in_channels} x {spec.resolution} x {spec.resolution}"
        return (
            f"{type(self).__name__}({count:,} parameters, images {shape}, classes {spec.classes:,};"
            f" {spec.source})"
        )

    __str__ = nn.Module.__repr__

    @property
    @abstractmethod
    def channels(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def strides(self) -> tuple[int, ...]: ...

    @abstractmethod
    def forward(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        """Logits (N, K). In training, masks are drawn if none are passed."""

    @abstractmethod
    def embed(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        """The input of the classifier before dropout: (N, C)."""

    def head_input(self, x: Tensor, masks: Masks | None = None) -> Tensor | tuple[Tensor, ...]:
        """What `task_head` takes: the maps, or the embedding for an `EmbeddingHead`."""
        if isinstance(self.task_head, EmbeddingHead):
            return self.embed(x, masks)
        return self.features(x)

    @abstractmethod
    def logits_and_embedding(self, x: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
        """`forward` and `embed` in one pass."""

    @abstractmethod
    def features(self, x: Tensor) -> tuple[Tensor, ...]:
        """The last map at every stride, each (N, channels[i], H / strides[i], W / strides[i])."""

    @abstractmethod
    def regularise(
        self,
        *,
        drop_path: float = 0.0,
        by: Literal["block", "stage"] = "block",
        dropout: float = 0.0,
    ) -> None:
        """Set the rates of stochastic depth and of dropout."""

    @abstractmethod
    def layer_numbers(self, *, coarse: bool = False) -> dict[str, int]:
        """The layer of each parameter, by name: 0 is the stem, the highest number the classifier.

        Layers are blocks, or stages if `coarse`. What follows the last block, but for the
        classifier, is of its layer.
        """

    def draw(self, images: int) -> Masks | None:
        """Masks for one training step of `images` images; None if the layers draw their own."""
        return None

    @property
    def custom_operators(self) -> Any:
        """The operators of `nets.fused` for the compiler; None for PyTorch's own alone."""
        return None

    def saved_tensor_choices(self) -> list[str]:
        """Per batch norm, the tensors that it saves for the backward pass; empty unless fused."""
        return []

    def restore_saved_tensor_choices(self, choices: Sequence[str]) -> None:
        """Set what `saved_tensor_choices` returned, so that a resumed epoch rounds as it began."""
