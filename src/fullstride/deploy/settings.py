"""Holds what a user asks of an export, without the imports of PyTorch."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from fullstride.measure.budget import HERE, Budget, find_budget
from fullstride.nets.efficiency import Precision

# What a file takes, and returns. normalised: float32 (N, C, H, W) -> logits. pixels: uint8
# (N, H, W, C) at the network's resolution -> probabilities. pictures: uint8 (N, H, W, C) of any
# size, resized in the file. Clips are (N, C, T, H, W) and (N, T, H, W, C), not resized in files.
InputKind = Literal["normalised", "pixels", "pictures"]
Backend = Literal["onnx", "openvino", "tensorrt"]
Tta = Literal["none", "flip"]  # test-time augmentation
PART_IMAGES = 8192  # rows that are held at once: 64 MiB of embeddings of 2,048 numbers


# Runtimes of servers and of phones and boards.
ServerFormat = Literal["onnx", "openvino", "aoti", "pt2", "tensorrt", "triton-server"]
PhoneFormat = Literal["executorch", "ncnn", "litert"]


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """What a file computes, and where. The comment on a field is its command-line help."""

    # By default fp32, and any of them where the fastest file is chosen.
    precision: Precision | None = None
    # The sides of images may be any multiples of 32.
    any_size: bool = False
    # The runtime inside triton-server.
    backend: Backend = "onnx"
    # With auto: another machine, on which files are measured: ssh://HOST, or a command that runs a
    # Python there. See docs/guides/targets.md.
    target: str = HERE
    # Points of top-1, or in int8 of the metric of the task, that the file may lose; by default 0 in
    # fp32, 0.2 in bf16 and fp16, 0.5 in int8.
    max_drop: float | None = None
    # Where files of the formats aoti and pt2 compute: cpu or cuda.
    device: str = "cpu"
    # Replace an existing --out.
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions(FileSettings):
    """How a file is written and compared."""

    format: str = "onnx"
    input_kind: InputKind = "normalised"
    threads: int | None = None  # of the CPU, for the comparison; None: PyTorch's number


@dataclass(frozen=True, kw_only=True)
class ShipSettings(FileSettings):
    """Which file is made of trained networks, and by which images it is judged."""

    # See docs/guides/shipping.md. auto: the fastest format and precision of openvino, onnx, aoti,
    # tensorrt, executorch, ncnn and litert, of those that run here. By default the format of files
    # that end as --out does: onnx, executorch for .pte, litert for .tflite; and openvino, the
    # fastest on CPUs, for a folder.
    format: Literal[ServerFormat, PhoneFormat, "auto"] | None = None
    # The file takes uint8 pixels (N, H, W, C) of the network's resolution and returns
    # probabilities; else normalised float32 (N, C, H, W) and logits.
    with_preprocessing: bool = False
    # The file also resizes images of any size.
    with_resize: bool = False
    # Only accept what takes at most this time, measured here or on --target: the median time of a
    # call divided by its images.
    budget_ms: float | None = None
    # The budget as a rate instead.
    images_per_s: float | None = None
    # Images of a call of the budget.
    call_batch: int = 1
    # A file of `fullstride bench --out` with the times of the runs; by default they are measured.
    bench: Path | None = None
    # Images to compare on; by default the run's own validation split.
    data: str = ""
    # Images for the ranges of int8; by default the run's own training images.
    calibration: str = ""
    # Where int8 loses more, fine-tune with simulated int8 for so many epochs before layers fall
    # back to float.
    finetune_epochs: int = 0

    @property
    def budget(self) -> Budget | None:
        """Raises ValueError for two budgets, and for a batch without one."""
        return find_budget(self.budget_ms, self.images_per_s, self.call_batch)

    @property
    def options(self) -> ExportOptions:
        with_pixels: InputKind = "pixels" if self.with_preprocessing else "normalised"
        kind: InputKind = "pictures" if self.with_resize else with_pixels
        own = {each.name: getattr(self, each.name) for each in fields(FileSettings)}
        return ExportOptions(**own, input_kind=kind)
