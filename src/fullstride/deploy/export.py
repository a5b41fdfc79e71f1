"""How is a network exported? To a file that is kept only if its outputs are those of PyTorch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from fullstride.deploy.comparison import (
    Comparison,
    ComparisonImages,
    check,
    compare,
    tolerances,
)
from fullstride.deploy.exported import ExportedModel, InputKind, Metadata, Precision
from fullstride.deploy.fold_batch_norm import fold_batch_norm
from fullstride.deploy.formats import FORMATS, output
from fullstride.deploy.formats.base import Format, last_line
from fullstride.deploy.int8 import fall_back_to_float, sensitivity
from fullstride.deploy.job import STRIDE, Backend, ExportJob
from fullstride.deploy.predict import LazyInputs, activate, inputs, logits, outputs
from fullstride.io.writing import atomic_write, check_output, remove
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import find_task, task_of

MAX_FLOAT_SHARE = 0.5  # of the layers of an int8 file that may stay in float
Finetune = Callable[[nn.Module], nn.Module]  # a folded network -> one that loses less in int8
Progress = Callable[[str], None]  # is called with one line at each stage of a long export


@dataclass(frozen=True)
class Reference:
    """The network of an export and its outputs, for all files of a bundle and an input kind."""

    net: nn.Module  # batch norms folded
    inputs: Sequence[np.ndarray]  # the comparison images as inputs of the file
    outputs: np.ndarray  # (N, ...), of the bundle in PyTorch
    graphs: dict[Any, Any] = field(default_factory=dict)  # see `ExportJob`


@dataclass(frozen=True)
class ExportResult:
    """A file that passed its comparison."""

    path: Path
    format: str
    metadata: Metadata
    runtime: str
    comparison: Comparison
    tried: tuple[tuple[int, float], ...]  # for int8: number of layers in float -> points lost


def export(
    bundle: Bundle,
    path: Path,
    images: ComparisonImages,
    *,
    format: str = "onnx",
    precision: Precision = "fp32",
    input_kind: InputKind = "normalised",
    any_size: bool = False,
    backend: Backend = "onnx",
    calibration: Sequence[Image.Image | np.ndarray] = (),
    max_drop: float | None = None,
    finetune: Finetune | None = None,
    device: str = "cpu",
    threads: int | None = None,
    force: bool = False,
    reference: Reference | None = None,
    progress: Progress = lambda line: None,
) -> ExportResult:
    """Write `bundle` to `path` in evaluation mode, with batch norms folded, and compare outputs.

    The file is written next to `path`, opened by its runtime, run on all `images`, and renamed to
    `path` if it passes. Raises ValueError, and leaves an earlier file as it was, if an output
    differs from PyTorch's by more than `MAX_DIFFERENCE` of the largest, or if top-1 drops by more
    than `max_drop` points (None: `MAX_DROP`).

    An int8 file takes its ranges from the pictures `calibration`. If it loses more than `max_drop`,
    `finetune` trains the folded network for int8 (the network stays as it was if that raises
    FloatingPointError); then layers fall back to float, the most sensitive first.

    Args:
        input_kind: Inputs of the file, see `Metadata`.
        any_size: Allow sides that are any multiples of 32.
        backend: Runtime inside triton-server.
        device: Where aoti and pt2 files compute; other runtimes choose their own.
        threads: CPU threads of the comparison; None: PyTorch's number.
        reference: The result of `make_reference` for the same arguments; computed if None.
        progress: Called with one line at each stage of an int8 export.
    """
    kind = find_format(format, precision)
    if device != "cpu" and not kind.runs_code:
        raise ValueError(
            f"{format} files compute where their runtime does, "
            f"--device {device} is for aoti and pt2: leave it out"
        )
    check_free(path, kind, force)
    check_arguments(bundle, images, kind, input_kind, any_size, backend, max_drop, precision)
    if precision == "int8" and not calibration:
        raise ValueError(
            "int8 takes its ranges from images: name some of the same kind by --calibration"
        )
    pre = bundle.preprocessing
    reference = reference or make_reference(bundle, images, input_kind)
    metadata = Metadata(
        name=bundle.name,
        classes=bundle.classes,
        preprocessing=bundle.preprocessing,
        scores=dict(bundle.scores),
        source=bundle.source,
        licence=bundle.licence,
        task=bundle.task,
        temperature=bundle.temperature,
        task_state=bundle.task_state,
        mirror=bundle.may_mirror,
        outputs=output_sizes(reference.outputs.shape[1:], len(bundle.classes)),
        precision=precision,
        input_kind=input_kind,
        device=device,
    )
    ranges = input_batches(input_kind, pre, calibration) if precision == "int8" else ()
    job = ExportJob(
        reference.net,
        metadata,
        reference.inputs[0],
        any_size,
        backend,
        ranges,
        reference.graphs,
    )
    task = task_of(bundle)
    max_difference, default_drop = tolerances(precision, input_kind, task)
    max_drop = default_drop if max_drop is None else max_drop

    with atomic_write(path, output(kind, force)) as temporary:
        last: list[tuple[ExportedModel, Comparison]] = []

        def attempt(float_layers: Sequence[str] = ()) -> float:
            """Write the file with these layers in float. Returns the points lost."""
            remove(temporary)
            write(
                kind,
                replace(job, metadata=replace(metadata, float_layers=tuple(float_layers))),
                temporary,
            )
            model = kind.open(temporary, threads or torch.get_num_threads())
            rows = outputs(model, reference.inputs), reference.outputs
            comparison = compare(*rows, images.labels, task)
            last[:] = [(model, comparison)]
            if precision == "int8":
                progress(
                    f"layers in float: {len(float_layers)}, "
                    f"points of top-1 lost: {comparison.drop:.2f}"
                )
            return comparison.drop

        drop = attempt()
        if precision == "int8" and drop > max_drop and finetune:
            try:
                job = replace(job, net=finetune(job.net), graphs={})
                drop = attempt()
            except FloatingPointError as error:
                progress(f"fine-tuning for int8 failed: {error}")
        tried = [(0, drop)]
        if precision == "int8" and drop > max_drop:
            progress("measuring the sensitivity of each layer; the most sensitive stay in float")
            batches = inputs("normalised", pre, calibration)
            by_sensitivity = [
                name
                for name, _ in sensitivity(job.net, torch.from_numpy(np.concatenate([*batches])))
            ]
            most = int(MAX_FLOAT_SHARE * len(by_sensitivity))
            tried += fall_back_to_float(attempt, max_drop, by_sensitivity[:most])
        ((model, comparison),) = last
        check(path, comparison, max_difference, max_drop)
    return ExportResult(path, format, model.metadata, model.runtime, comparison, tuple(tried))


def check_arguments(
    bundle: Bundle,
    images: ComparisonImages,
    kind: Format,
    input_kind: InputKind,
    any_size: bool,
    backend: Backend,
    max_drop: float | None,
    precision: Precision,
) -> None:
    """Raises ValueError for arguments of `export` that do not fit together."""
    if backend != "onnx" and kind.name != "triton-server":
        raise ValueError(f"--backend {backend} is for --format triton-server: leave it out")
    if max_drop is not None and not max_drop >= 0:
        raise ValueError(f"--max-drop {max_drop:g}: use 0 or more points")
    if bundle.preprocessing.frames and input_kind == "pictures":
        raise ValueError(
            f"{bundle.name} takes clips, which files do not resize: use --with-preprocessing, or "
            "leave both out"
        )
    if any_size and input_kind == "pictures":
        raise ValueError("a file that resizes takes pictures of any size: leave --any-size out")
    side = bundle.preprocessing.resolution
    if any_size and (side % STRIDE or side == STRIDE):  # blur-pool pads a map of 1 pixel otherwise
        sides = ", ".join(str(STRIDE * factor) for factor in (2, 3, 4))
        raise ValueError(
            f"--any-size for a network of {side} pixels: it works for resolutions of {sides}, ..."
        )
    if precision == "int8" and not find_task(bundle.task).single_label:
        raise ValueError(
            f"int8 files are compared by their top-1, which the task {bundle.task} does not have: "
            "use another --precision"
        )
    if not images.pictures:
        raise ValueError("no images to compare outputs on: name some by --data")


def make_reference(bundle: Bundle, images: ComparisonImages, input_kind: InputKind) -> Reference:
    pre = bundle.preprocessing
    batches = input_batches(input_kind, pre, images.pictures)
    if input_kind == "normalised":
        expected = logits(bundle, batches)
    else:
        rows = logits(bundle, inputs("normalised", pre, images.pictures))
        expected = activate(bundle, rows)
    return Reference(fold_batch_norm(bundle.net), batches, expected)


def output_sizes(shape: tuple[int, ...], classes: int) -> tuple[int, ...]:
    """`Metadata.outputs` of outputs with this shape for an image; a map has the image's sides."""
    if len(shape) == 3:
        return (shape[0], 0, 0)
    return () if shape == (classes,) else shape


def input_batches(
    input_kind: InputKind, pre: Preprocessing, pictures: Sequence[Image.Image | np.ndarray]
) -> Sequence[np.ndarray]:
    """`inputs` that can be iterated repeatedly.

    Pictures of full size, and clips, are decoded each time.
    """
    if input_kind == "pictures" or pre.frames:
        return LazyInputs(input_kind, pre, pictures)
    return list(inputs(input_kind, pre, pictures))


def write(kind: Format, job: ExportJob, path: Path) -> None:
    """Raises ValueError, in one line, where the libraries that write a format fail."""
    try:
        kind.write(job, path)
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # of dozens of types, with pages of text
        name = f"{kind.name} in {job.metadata.precision}"
        raise ValueError(
            f"{job.metadata.name} cannot be written as {name}: {last_line(error)}"
        ) from error


def check_free(path: Path, kind: Format, force: bool) -> None:
    """Raises ValueError where an export of `kind` must not go to `path`."""
    # Exactly, unlike `check_output`, as a file is opened by the runtime of its suffix.
    if kind.suffix and path.suffix != kind.suffix:
        raise ValueError(
            f"{path} could not be opened later: use an --out that ends in {kind.suffix}"
        )
    check_output(path, output(kind, force=True))
    if path.exists() and not force:
        raise ValueError(f"{path} exists: use --force to replace it, or another --out")


def find_format(name: str, precision: str) -> Format:
    """Raises ValueError, in one line, for a format or a precision that cannot be written here."""
    if name not in FORMATS:
        raise ValueError(f"no format named {name!r}: choose from {', '.join(FORMATS)}")
    kind = FORMATS[name]
    if precision not in kind.precisions:
        others = [each.name for each in FORMATS.values() if precision in each.precisions]
        hint = f", or {precision} in {', '.join(others)}" if others else ""
        raise ValueError(f"{name} in {precision}: use {', '.join(kind.precisions)}{hint}")
    if reason := kind.missing():
        raise ValueError(reason)
    return kind
