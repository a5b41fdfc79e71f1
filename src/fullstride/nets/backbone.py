"""Holds `Backbone`, the interface that networks of this package and of timm share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from fullstride.nets.spec import Spec, input_text, pixel_sizes

DropBy = Literal["block", "stage"]  # the unit that shares a rate of stochastic depth


class Masks(NamedTuple):
    """The random masks of one training step. None: nothing is dropped."""

    # of stochastic depth, for every block (N, 1, 1, 1), or (N, 1, 1, 1, 1) for clips
    branches: tuple[Tensor | None, ...]
    pooled: Tensor | None  # of dropout, (N, channels of the global average)


def batch_shape(net: nn.Module, batch: int, in_channels: int, resolution: int) -> tuple[int, ...]:
    """The shape of a batch: (N, C, H, W), or (N, C, T, H, W) with the frames of the network."""
    frames = net.spec.frames if isinstance(net, Backbone) else 0
    return (batch, in_channels, *pixel_sizes(frames, resolution))


def channels_last(dims: int) -> torch.memory_format:
    """The channels-last memory format of batches with 4 or 5 dimensions."""
    return torch.channels_last_3d if dims == 5 else torch.channels_last


class EmbeddingHead(nn.Module):
    """A task's head that takes the classifier's input, (N, C), in place of the maps."""


class Backbone(nn.Module, ABC):
    """A classifier with a feature pyramid: (N, in_channels, H, W) -> (N, K) logits.

    Networks of clips take (N, in_channels, T, H, W), and their maps have T as well.

    `channels` and `strides` describe the maps of `features`. With a `task_head`, `forward` returns
    the head's output in place of logits; the head takes the maps or, if it is an `EmbeddingHead`,
    the result of `embed`.
    """

    spec: Spec
    classifier: str  # path of the linear layer that gives the logits
    task_head: nn.Module | None
    root = ""  # path of the module that holds stem, stages and head; "" is the network itself

    def __init__(self) -> None:
        super().__init__()
        self.register_module("task_head", None)

    def __repr__(self) -> str:
        """One line; `print` shows the tree of modules, as for any PyTorch module."""
        spec, count = self.spec, sum(parameter.numel() for parameter in self.parameters())
        return (
            f"{type(self).__name__}({count:,} parameters, {input_text(spec)}, "
            f"classes {spec.classes:,}; {spec.source})"
        )

    __str__ = nn.Module.__repr__

    @property
    def classifiers(self) -> tuple[str, ...]:
        """The paths of all layers that give logits; some networks average two classifiers."""
        return (self.classifier,)

    @property
    def class_rows(self) -> dict[str, int]:
        """The paths of layers with rows for each class, and how many rows a class has.

        The head names its layers by its own `class_rows`. Rows before the first class are of the
        background.
        """
        head = getattr(self.task_head, "class_rows", {})
        return {f"task_head.{path}": rows for path, rows in head.items()}

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
        """The input of `task_head`: the maps, or the embedding for an `EmbeddingHead`."""
        if isinstance(self.task_head, EmbeddingHead):
            return self.embed(x, masks)
        return self.features(x)

    @abstractmethod
    def logits_and_embedding(self, x: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
        """`forward` and `embed` in one pass."""

    @abstractmethod
    def features(self, x: Tensor, out_indices: Sequence[int] | None = None) -> tuple[Tensor, ...]:
        """The last map at every stride, each (N, channels[i], H / strides[i], W / strides[i]).

        `out_indices` selects maps i, from the largest to the smallest, as timm's `features_only`
        does; negative indices count from the last map. Raises ValueError for other indices.
        """

    def map_numbers(self, out_indices: Sequence[int] | None) -> Sequence[int]:
        """The indices of the maps that `features` returns, in order."""
        count = len(self.strides)
        if out_indices is None:
            return range(count)
        if not out_indices or not all(-count <= index < count for index in out_indices):
            raise ValueError(
                f"out_indices {tuple(out_indices)}: the network has {count} maps, so use numbers "
                f"from 0 to {count - 1}"
            )
        return sorted({index % count for index in out_indices})

    @abstractmethod
    def regularise(
        self, *, drop_path: float = 0.0, by: DropBy = "block", dropout: float = 0.0
    ) -> None:
        """Set the rates of stochastic depth and of dropout."""

    @abstractmethod
    def layer_numbers(self, *, coarse: bool = False) -> dict[str, int]:
        """The layer of each parameter, by name: 0 is the stem, the highest number the classifier.

        Layers are blocks, or stages if `coarse`. Modules between the last block and the classifier
        belong to the last block's layer.
        """

    def draw(self, images: int) -> Masks | None:
        """Masks for one training step of `images` images; None if the layers draw their own."""
        return None


HeadBuilder = Callable[[Backbone], nn.Module | None]  # of a task's head; None: the classifier
