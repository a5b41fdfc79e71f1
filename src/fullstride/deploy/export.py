"""Exports a network to a file that is kept only if its outputs match PyTorch's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from fullstride.deploy.comparison import Comparison, ComparisonImages, check, compare, tolerances
from fullstride.deploy.exported import ExportedModel, Metadata
from fullstride.deploy.fold_batch_norm import fold_batch_norm
from fullstride.deploy.formats import FORMATS, output
from fullstride.deploy.formats.base import Format, last_line
from fullstride.deploy.int8 import fall_back_to_float, sensitivity
from fullstride.deploy.job import STRIDE, ExportJob
from fullstride.deploy.predict import LazyInputs, inputs, logits, outputs
from fullstride.deploy.settings import ExportOptions, InputKind
from fullstride.io.writing import atomic_write, check_output, remove
from fullstride.nets.bundle import About, Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tables import check_name
from fullstride.tasks import task_of
from fullstride.tasks.task import Task

DEFAULTS = ExportOptions()
MAX_FLOAT_SHARE = 0.5  # of the layers of an int8 file that may stay in float
Finetune = Callable[[nn.Module], nn.Module]  # trains a folded network to lose less in int8
Progress = Callable[[str], None]  # called with one line at each stage of a long export


@dataclass(frozen=True)
class Reference:
    """The network to export and its outputs, shared by all files of a bundle and an input kind."""

    net: nn.Module  # batch norms folded
    inputs: Sequence[np.ndarray]  # the comparison images as inputs for the file
    outputs: np.ndarray  # PyTorch's outputs (N, ...)
    graphs: dict[Any, Any] = field(default_factory=dict)  # see `ExportJob`


@dataclass(frozen=True)
class ExportResult:
    """A file that passed its comparison."""

    path: Path  # of the file or folder
    format: str  # such as onnx
    metadata: Metadata  # in the file
    runtime: str  # the program that ran the file, and its version
    comparison: Comparison  # with PyTorch's outputs
    tried: tuple[tuple[int, float], ...]  # for int8: pairs of layers in float and points lost


def export(
    bundle: Bundle,
    path: Path,
    images: ComparisonImages,
    options: ExportOptions = DEFAULTS,
    *,
    calibration: Sequence[Image.Image | np.ndarray] = (),
    finetune: Finetune | None = None,
    reference: Reference | None = None,
    progress: Progress = lambda line: None,
) -> ExportResult:
    """Write `bundle` to `path` in evaluation mode, with batch norms folded, and compare outputs.

    The file is written next to `path`, opened by its runtime, run on all `images`, and renamed to
    `path` if it passes. Raises ValueError, and keeps an earlier file, if an output differs from
    PyTorch's by more than `MAX_DIFFERENCE` of the largest, or if top-1, or for int8 the task's
    metric, drops by more than `max_drop` points (None: `MAX_DROP`).

    Args:
        calibration: Pictures for the ranges of an int8 file.
        finetune: Trains the folded network for int8 if the file loses more than `max_drop` (a
            FloatingPointError keeps the network); then layers fall back to float, the most
            sensitive first.
        reference: The result of `make_reference` for the same arguments; computed if None.
        progress: Called with one line at each stage of an int8 export, and about operators that are
            slow in a runtime.

    Examples:
        >>> from pathlib import Path
        >>> import fullstride
        >>> bundle = fullstride.train_network("digits", "genet_tiny", "runs/few", steps=2)
        >>> digits = fullstride.open_data("digits").val
        >>> images = fullstride.ComparisonImages([digits.picture(number) for number in range(4)])
        >>> result = fullstride.export(bundle, Path("few.onnx"), images)
        >>> result.format, result.comparison.same_class
        ('onnx', 4)
    """
    precision = options.precision or "fp32"
    kind = find_format(options.format, precision)
    check_free(path, kind, options.force)
    check_arguments(bundle, images, kind, options)
    if precision == "int8" and not calibration:
        raise ValueError(
            "int8 takes its ranges from images: name some of the same kind by --calibration"
        )
    expected = reference or make_reference(bundle, images, options.input_kind)
    task = task_of(bundle)
    max_difference, max_drop = tolerances(precision, options.input_kind)
    max_drop = max_drop if options.max_drop is None else options.max_drop
    # in float, all predictions of boxes and pixels must be equal, so no labels are needed
    labels = images.labels if task.single_label or precision == "int8" else ()

    with atomic_write(path, output(kind, options.force)) as temporary:

        def attempt(job: ExportJob) -> tuple[ExportedModel, Comparison]:
            remove(temporary)
            write(kind, job, temporary)
            model = kind.open(temporary, options.threads or torch.get_num_threads())
            rows = outputs(model, expected.inputs)
            return model, compare(rows, expected.outputs, labels, task)

        job = export_job(bundle, expected, options, calibration)
        job = replace(job, progress=progress)
        if precision == "int8":
            search = Int8Search(attempt, job, max_drop)
            search.run(finetune, calibration)
            (model, comparison), tried = search.last, tuple(search.tried)
        else:
            model, comparison = attempt(job)
            tried = ((0, comparison.drop),)
        check(path, comparison, max_difference, max_drop)
    return ExportResult(path, options.format, model.metadata, model.runtime, comparison, tried)


def export_job(
    bundle: Bundle,
    reference: Reference,
    options: ExportOptions,
    calibration: Sequence[Image.Image | np.ndarray],
) -> ExportJob:
    precision = options.precision or "fp32"
    about = {each.name: getattr(bundle, each.name) for each in fields(About)}
    metadata = Metadata(
        **{**about, "mirror": bundle.may_mirror},
        outputs=output_sizes(reference.outputs.shape[1:], len(bundle.classes)),
        precision=precision,
        input_kind=options.input_kind,
        device=options.device,
    )
    ranges: Sequence[np.ndarray] = ()
    if precision == "int8":
        ranges = input_batches(options.input_kind, bundle.preprocessing, calibration)
    return ExportJob(
        reference.net,
        metadata,
        reference.inputs[0],
        any_size=options.any_size,
        backend=options.backend,
        calibration=ranges,
        graphs=reference.graphs,
    )


@dataclass
class Int8Search:
    """The attempts to write an int8 file that loses at most `max_drop` points."""

    write: Callable[[ExportJob], tuple[ExportedModel, Comparison]]
    job: ExportJob
    max_drop: float
    tried: list[tuple[int, float]] = field(default_factory=list)  # see `ExportResult`

    def attempt(self, float_layers: Sequence[str] = ()) -> float:
        """Write the file with these layers in float; return the points lost."""
        metadata = replace(self.job.metadata, float_layers=tuple(float_layers))
        self.last = self.write(replace(self.job, metadata=metadata))
        drop, label = self.last[1].drop, self.last[1].metric.label
        count = len(float_layers)
        self.job.progress(f"layers in float: {count}, points of {label} lost: {drop:.2f}")
        return drop

    def run(
        self, finetune: Finetune | None, calibration: Sequence[Image.Image | np.ndarray]
    ) -> None:
        """Write the network unchanged, then fine-tuned, then with more and more layers in float."""
        drop = self.attempt()
        if drop > self.max_drop and finetune:
            try:
                self.job = replace(self.job, net=finetune(self.job.net), graphs={})
                drop = self.attempt()
            except FloatingPointError as error:
                self.job.progress(f"fine-tuning for int8 failed: {error}")
        self.tried = [(0, drop)]
        if drop > self.max_drop:
            self.job.progress(
                "measuring the sensitivity of each layer; the most sensitive stay in float"
            )
            batches = inputs("normalised", self.job.metadata.preprocessing, calibration)
            pixels = torch.from_numpy(np.concatenate([*batches]))
            layers = [name for name, _ in sensitivity(self.job.net, pixels)]
            most = int(MAX_FLOAT_SHARE * len(layers))
            self.tried += fall_back_to_float(self.attempt, self.max_drop, layers[:most])


def check_arguments(
    bundle: Bundle, images: ComparisonImages, kind: Format, options: ExportOptions
) -> None:
    """Raise ValueError for arguments of `export` that do not fit together."""
    pictures, any_size = options.input_kind == "pictures", options.any_size
    if options.device != "cpu" and not kind.runs_code:
        raise ValueError(
            f"{kind.name} files compute where their runtime does, "
            f"--device {options.device} is for aoti and pt2: leave it out"
        )
    if options.backend != "onnx" and kind.name != "triton-server":
        raise ValueError(f"--backend {options.backend} is for --format triton-server: leave it out")
    if options.max_drop is not None and not options.max_drop >= 0:
        raise ValueError(f"--max-drop {options.max_drop:g}: use 0 or more points")
    if bundle.preprocessing.frames and pictures:
        raise ValueError(
            f"{bundle.name} takes clips, which files do not resize: use --with-preprocessing, or "
            "leave both out"
        )
    if kind.one_size and (any_size or pictures):
        flag = "any-size" if any_size else "with-resize"
        raise ValueError(
            f"{kind.name} files take images of one size, without --{flag}: leave it out, or use "
            "--format onnx"
        )
    if any_size and pictures:
        raise ValueError("a file that resizes takes pictures of any size: leave --any-size out")
    side = bundle.preprocessing.resolution
    # blur-pool pads a map of 1 pixel differently
    if any_size and (side % STRIDE or side == STRIDE):
        sides = ", ".join(str(STRIDE * factor) for factor in (2, 3, 4))
        raise ValueError(
            f"--any-size for a network of {side} pixels: it works for resolutions of {sides}, ..."
        )
    if options.precision == "int8" and (reason := why_not_int8(task_of(bundle), kind)):
        raise ValueError(reason)
    if not images.pictures:
        raise ValueError("no images to compare outputs on: name some by --data")


def why_not_int8(task: Task, kind: Format) -> str:
    """Why the task has no int8 file, in one line; "" if it has."""
    if task.has_places and kind.one_size:
        return (
            f"{kind.name} files of the task {task.name} are in fp32: use another precision, or "
            "onnx or openvino"
        )
    return ""


def make_reference(bundle: Bundle, images: ComparisonImages, input_kind: InputKind) -> Reference:
    pre = bundle.preprocessing
    batches = input_batches(input_kind, pre, images.pictures)
    if input_kind == "normalised":
        expected = logits(bundle, batches)
    else:
        rows = logits(bundle, inputs("normalised", pre, images.pictures))
        expected = task_of(bundle).activate(torch.from_numpy(rows)).numpy()
    return Reference(fold_batch_norm(bundle.net), batches, expected)


def output_sizes(shape: tuple[int, ...], classes: int) -> tuple[int, ...]:
    """`Metadata.outputs` for outputs of this shape per image; a map has the image's sides."""
    if len(shape) == 3:
        return (shape[0], 0, 0)
    return () if shape == (classes,) else shape


def input_batches(
    input_kind: InputKind, pre: Preprocessing, pictures: Sequence[Image.Image | np.ndarray]
) -> Sequence[np.ndarray]:
    """Repeatable `inputs`; full-size pictures and clips are decoded each time."""
    if input_kind == "pictures" or pre.frames:
        return LazyInputs(input_kind, pre, pictures)
    return list(inputs(input_kind, pre, pictures))


def write(kind: Format, job: ExportJob, path: Path) -> None:
    """Write a file; raise ValueError, in one line, if the format's libraries fail."""
    try:
        kind.write(job, path)
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # dozens of types, with pages of text
        name = f"{kind.name} in {job.metadata.precision}"
        raise ValueError(
            f"{job.metadata.name} cannot be written as {name}: {last_line(error)}"
        ) from error


def check_free(path: Path, kind: Format, force: bool) -> None:
    """Raise ValueError if an export of `kind` must not go to `path`."""
    # An exact match, unlike in `check_output`: the suffix decides which runtime opens a file.
    if kind.suffix and path.suffix != kind.suffix:
        raise ValueError(
            f"{path} could not be opened later: use an --out that ends in {kind.suffix}"
        )
    check_output(path, output(kind, force=True))
    if path.exists() and not force:
        raise ValueError(f"{path} exists: use --force to replace it, or another --out")


def find_format(name: str, precision: str) -> Format:
    """Find a format by name. Raises ValueError for a format or precision not possible here."""
    check_name("format", name, FORMATS)
    kind = FORMATS[name]
    if precision not in kind.precisions:
        others = [each.name for each in FORMATS.values() if precision in each.precisions]
        hint = f", or {precision} in {', '.join(others)}" if others else ""
        raise ValueError(f"{name} in {precision}: use {', '.join(kind.precisions)}{hint}")
    if reason := kind.missing():
        raise ValueError(reason)
    return kind
