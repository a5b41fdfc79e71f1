"""Holds the options of exports and of offline predictions, without importing PyTorch."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from fullstride.io.records import Count, PositiveInt
from fullstride.measure.budget import HERE, Budget, find_budget
from fullstride.nets.efficiency import Precision

# Inputs and outputs of a file. normalised: float32 (N, C, H, W) -> logits. pixels: uint8
# (N, H, W, C) at the network's resolution -> probabilities. pictures: uint8 (N, H, W, C) of any
# size, resized in the file. Clips are (N, C, T, H, W) or (N, T, H, W, C); files do not resize them.
InputKind = Literal["normalised", "pixels", "pictures"]
Backend = Literal["onnx", "openvino", "tensorrt"]
Tta = Literal["none", "flip"]  # test-time augmentation
PART_IMAGES = 8192  # rows in memory at once: 64 MiB of embeddings of 2,048 numbers


# Runtimes of servers and of phones and boards.
ServerFormat = Literal["onnx", "openvino", "aoti", "pt2", "tensorrt", "triton-server"]
PhoneFormat = Literal["executorch", "ncnn", "litert", "coreml"]


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """How and where a file computes. The comment on a field is its command-line help."""

    # By default fp32, or with auto any of them.
    precision: Precision | None = None
    # Accept images whose sides are any multiples of 32.
    any_size: bool = False
    # The runtime inside triton-server.
    backend: Backend = "onnx"
    # With auto: another machine to measure files on: ssh://HOST, or a command that runs Python
    # there. See docs/guides/targets.md.
    target: str = HERE
    # Points of top-1, or for int8 of the task's metric, that the file may lose; by default 0 in
    # fp32, 0.2 in bf16 and fp16, 0.5 in int8.
    max_drop: float | None = None
    # Where files of the formats aoti and pt2 compute: cpu or cuda.
    device: str = "cpu"
    # Replace an existing --out.
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class OfflineFlags:
    """How a process takes part in predictions for many images."""

    # With --out: processes that decode images beside this process.
    workers: Count = 0
    # With --out: number of this process, from 0, if several share the images; by default
    # torchrun's.
    rank: Count | None = None
    # With --out: processes that share the images, also on other machines with the same folder.
    ranks: PositiveInt | None = None
    # With --out: images per part of the output; a stop loses at most the current part.
    part_images: PositiveInt = PART_IMAGES


@dataclass(frozen=True, kw_only=True)
class ExportOptions(FileSettings):
    """How to write and compare a file."""

    format: str = "onnx"
    input_kind: InputKind = "normalised"
    threads: int | None = None  # CPU threads for the comparison; None: PyTorch's number


@dataclass(frozen=True, kw_only=True)
class ShipSettings(FileSettings):
    """Which file to make from trained networks, and the images to compare it on."""

    # See docs/guides/shipping.md. auto: the fastest format and precision among openvino, onnx,
    # aoti, tensorrt, executorch, ncnn and litert, if they run here. By default the suffix of --out
    # decides: onnx, executorch for .pte, litert for .tflite, coreml for .mlpackage, and for a
    # folder openvino, the fastest on CPUs.
    format: Literal[ServerFormat, PhoneFormat, "auto"] | None = None
    # The file takes uint8 pixels (N, H, W, C) at the network's resolution and returns
    # probabilities; otherwise it takes normalised float32 (N, C, H, W) and returns logits.
    with_preprocessing: bool = False
    # The file also resizes images of any size.
    with_resize: bool = False
    # The longest time allowed, measured here or on --target: the median time of a call divided by
    # its images.
    budget_ms: float | None = None
    # The budget as a rate instead.
    images_per_s: float | None = None
    # Images per call for the budget.
    call_batch: int = 1
    # A file of `fullstride bench --out` with the times of the runs; by default they are measured.
    bench: Path | None = None
    # Images to compare on; by default the run's own validation split.
    data: str = ""
    # Images for the ranges of int8; by default the run's own training images.
    calibration: str = ""
    # If int8 loses more, fine-tune with simulated int8 for this many epochs before layers fall back
    # to float.
    finetune_epochs: int = 0

    @property
    def budget(self) -> Budget | None:
        """The budget. Raises ValueError for two budgets, and for a batch without one."""
        return find_budget(self.budget_ms, self.images_per_s, self.call_batch)

    @property
    def options(self) -> ExportOptions:
        with_pixels: InputKind = "pixels" if self.with_preprocessing else "normalised"
        kind: InputKind = "pictures" if self.with_resize else with_pixels
        own = {each.name: getattr(self, each.name) for each in fields(FileSettings)}
        return ExportOptions(**own, input_kind=kind)
