"""Defines an exported file: a network, and metadata about its inputs and outputs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullstride.deploy.settings import InputKind
from fullstride.io.records import MAX_JSON_BYTES, Count, from_json, parse_json
from fullstride.nets.bundle import About, Bundle
from fullstride.nets.efficiency import Precision
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.spec import pixel_sizes
from fullstride.tables import check_name
from fullstride.tasks import TASKS

Infer = Callable[[np.ndarray], np.ndarray]  # a batch of inputs -> outputs (N, ...)

# Fields of Metadata stored as JSON in a file; all others are text.
JSON_FIELDS = ("classes", "preprocessing", "scores", "float_layers", "temperature", "mirror")
JSON_FIELDS += ("task_state", "outputs")


@dataclass(frozen=True, kw_only=True)
class Metadata(About):
    """The metadata of an exported file, which stores each value as text or JSON.

    A file that computes probabilities divides by the temperature itself.
    """

    # The sizes of the outputs per image, with 0 for the image's sides; (): one output per class.
    outputs: tuple[Count, ...] = ()
    precision: Precision = "fp32"
    input_kind: InputKind = "normalised"
    device: str = "cpu"  # for aoti and pt2 files; other runtimes choose their own
    float_layers: tuple[str, ...] = ()  # layers of an int8 file that stay in float

    def __post_init__(self) -> None:
        check_name("task", self.task, TASKS)
        if not self.classes and not self.outputs:  # a size of 0 would be any size
            raise ValueError("it has neither classes nor sizes of outputs")

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The sizes of the outputs per image; 0 for the image's sides."""
        return self.outputs or (len(self.classes),)

    def input_shape(self, resolution: int | None = None) -> tuple[int, ...]:
        """The shape of one input, see `one_input`."""
        return one_input(self.preprocessing, self.input_kind, resolution)

    def to_strings(self) -> dict[str, str]:
        return {
            name: as_utf8(value) if isinstance(value, str) else json.dumps(value)
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_strings(cls, strings: Any, path: Path) -> "Metadata":
        """Read a mapping by `to_strings`. Raises ValueError, in one line, for anything else."""
        try:
            if sum(map(len, strings.values())) > MAX_JSON_BYTES:
                raise ValueError("its metadata is too large")
            values: dict[str, Any] = {each.name: strings[each.name] for each in fields(cls)}
            for name in JSON_FIELDS:
                values[name] = parse_json(values[name], name)
            return from_json(cls, values, "metadata")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} was not written by `fullstride export`: {type(error).__name__} {error}"
            ) from None


def one_input(
    pre: Preprocessing, kind: InputKind, resolution: int | None = None
) -> tuple[int, ...]:
    """The shape of one input of a file: (C, H, W), or (C, T, H, W) for clips; C is last for pixels.

    H and W are `resolution`, by default the resolution of `pre`.
    """
    sizes = pixel_sizes(pre.frames, resolution or pre.resolution)
    return (pre.channels, *sizes) if kind == "normalised" else (*sizes, pre.channels)


def as_utf8(text: str) -> str:
    """Escape bytes of file names that are not UTF-8, which runtimes reject."""
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class ExportedModel:
    """An exported file opened by its runtime."""

    path: Path  # of the file or folder
    metadata: Metadata  # in the file
    infer: Infer  # inputs as an array -> outputs
    runtime: str  # the program, its version and its number of threads

    def __repr__(self) -> str:
        about, classes = self.metadata, f"{len(self.classes):,}: {shortened(self.classes)}"
        return (
            f"ExportedModel({str(self.path)!r}, {about.precision}, {about.input_kind} in, "
            f"classes {classes}, {self.preprocessing}, {self.runtime})"
        )

    def run(self, images: np.ndarray) -> np.ndarray:
        """Run inputs (N, ...) of the kind `metadata.input_kind` -> float32 outputs (N, ...).

        Raises ValueError if the file does not accept images of this shape, or the outputs do not
        match the metadata.
        """
        shape, pre = tuple(images.shape), self.preprocessing
        try:
            outputs = self.infer(images)
        except Exception as error:  # each runtime has its own types
            frames = f"{pre.frames} frames of " if pre.frames else ""
            raise ValueError(
                f"{self.path} does not take inputs of {shape}: it was exported for {frames}"
                f"{pre.resolution} x {pre.resolution} pixels ({type(error).__name__})"
            ) from error
        sizes = self.metadata.output_shape
        if not has_shape(outputs, (len(images), *sizes)):
            values = " x ".join(str(size) if size else "?" for size in sizes)
            what = f"{values} outputs" if self.metadata.outputs else f"{values} classes"
            raise ValueError(
                f"{self.path} returns {outputs.shape} for {shape}, but its metadata has {what}"
            )
        return outputs

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def classes(self) -> tuple[str, ...]:
        return self.metadata.classes

    @property
    def preprocessing(self) -> Preprocessing:
        return self.metadata.preprocessing

    @property
    def task(self) -> str:
        return self.metadata.task

    @property
    def has_class_names(self) -> bool:
        """Always True: a file's classes have the names of the training, see `Bundle`."""
        return True

    @property
    def may_mirror(self) -> bool:
        return self.metadata.mirror

    @property
    def temperature(self) -> float:
        return self.metadata.temperature

    @property
    def task_state(self) -> Mapping[str, Any]:
        return self.metadata.task_state


Model = Bundle | ExportedModel  # predicts


def check_graph_sizes(
    path: Path, metadata: Metadata, source: Sequence[Any], result: Sequence[Any]
) -> None:
    """Raise ValueError if the sizes in a graph do not match its metadata.

    `source` and `result` are the sizes of its input and output, with the batch first. A size that
    is no number, or below 1, means any size, and () means an unknown number of sizes.
    """
    names = ("input", source, metadata.input_shape()), ("output", result, metadata.output_shape)
    for noun, batch_and_sizes, expected in names:
        sizes = [size if isinstance(size, int) and size > 0 else 0 for size in batch_and_sizes[1:]]
        pairs = zip(sizes, expected, strict=False)
        differs = any(a != b for a, b in pairs if a and b) or len(sizes) != len(expected)
        if batch_and_sizes and differs:
            here, there = (" x ".join(map(str, each)) for each in (sizes, expected))
            raise ValueError(
                f"{path} was changed: its {noun} has {here} numbers, and its metadata says {there} "
                "(0 is any size); export it again"
            )


def has_shape(outputs: np.ndarray, sizes: tuple[int, ...]) -> bool:
    """Whether `outputs` have these sizes; 0 matches any size."""
    return len(sizes) == outputs.ndim and all(
        size in (0, own) for size, own in zip(sizes, outputs.shape, strict=True)
    )


class ExportedModule(nn.Module):
    """An exported file as a module, to measure it like a network.

    It has no parameters, cannot be trained, and a deep copy is the module itself.
    """

    def __init__(self, model: ExportedModel):
        super().__init__()
        self.model, self.preprocessing = model, model.preprocessing
        self.runtime = f"{model.runtime}, {model.metadata.precision}"

    def random_images(self, batch: int, resolution: int) -> Tensor:
        """Random inputs of the file's kind, on the CPU."""
        shape = batch, *self.model.metadata.input_shape(resolution)
        if self.model.metadata.input_kind == "normalised":
            return torch.randn(shape)
        return torch.randint(256, shape, dtype=torch.uint8)

    def forward(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.model.run(images.numpy()))

    def train(self, mode: bool = True) -> "ExportedModule":
        if mode:
            raise ValueError(
                f"{self.model.path} cannot be trained: measure it by online, throughput or genet"
            )
        return super().train(mode)

    def __deepcopy__(self, memo: object) -> "ExportedModule":
        return self
