"""How do trained runs become one exported file? The most accurate run, in the fastest format."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fullstride import tasks
from fullstride.data.loader import Batches
from fullstride.deploy.export import ExportResult, Progress, check_free, export, find_format
from fullstride.deploy.exported import InputKind, Precision
from fullstride.deploy.job import Backend
from fullstride.deploy.run_images import (
    calibration_images,
    comparison_images,
    int8_finetuning,
)
from fullstride.deploy.select import earlier_times, fastest, most_accurate
from fullstride.measure.budget import Budget
from fullstride.measure.environment import choose_device
from fullstride.nets.load_options import BY_DEFAULT, LoadOptions
from fullstride.train import loop

AUTO = "auto"
FORMAT_OF_SUFFIX = {"": "openvino", ".onnx": "onnx"}


def export_runs(
    runs: Sequence[str],
    out: Path,
    *,
    format: str = "",
    precision: Precision | None = None,
    input_kind: InputKind = "normalised",
    any_size: bool = False,
    backend: Backend = "onnx",
    budget: Budget | None = None,
    times: Path | None = None,
    data: str = "",
    calibration: str = "",
    max_drop: float | None = None,
    finetune_epochs: int = 0,
    device: str = "cpu",
    force: bool = False,
    loading: LoadOptions = BY_DEFAULT,
    progress: Progress = lambda line: None,
    watch: Callable[[Batches], loop.BatchSource] = lambda batches: batches,
) -> ExportResult:
    """Export the most accurate of `runs` that fits `budget`; see `fullstride export --help`.

    `progress` is called with lines about the progress; `watch` may wrap training batches. Raises
    ValueError, in one line, for what cannot be exported.
    """
    if not runs:
        raise ValueError(
            "nothing to export: name a run, a bundle or a network with released weights"
        )
    format = format or format_by_suffix(out)
    auto = format == AUTO
    if not auto:  # before anything that takes time
        check_free(out, find_format(format, precision or "fp32"), force)
    int8 = precision == "int8" or (auto and precision is None)
    for flag, value in (("--calibration", calibration), ("--finetune-epochs", finetune_epochs)):
        if value and not int8:
            raise ValueError(f"{flag} {value} is for --precision int8: leave it out")
    bundles = {run: tasks.load(run, options=loading) for run in runs}
    ms = earlier_times(times, bundles, budget.batch if budget else 1) if times else None
    run, bundle = most_accurate(bundles, None if auto else budget, progress, ms)
    how: dict[str, Any] = dict(input_kind=input_kind, any_size=any_size, backend=backend)
    how |= dict(max_drop=max_drop, force=force, progress=progress)
    if device != "cpu":
        how["device"] = str(choose_device(device))
    images = comparison_images(run, bundle, data)
    if int8:
        data = calibration or data
        how["calibration"] = ranges = calibration_images(run, bundle, data)
        how["finetune"] = int8_finetuning(
            run,
            bundle,
            data,
            epochs=finetune_epochs,
            calibration=ranges,
            progress=progress,
            watch=watch,
        )
    if auto:
        return fastest(bundle, out, images, precision=precision, budget=budget, **how)
    return export(bundle, out, images, format=format, precision=precision or "fp32", **how)


def format_by_suffix(out: Path) -> str:
    """onnx for a file that ends in .onnx, and openvino, the fastest on CPUs, for a folder."""
    if out.suffix not in FORMAT_OF_SUFFIX:
        raise ValueError(f"--out {out} does not say which format: say it by --format")
    return FORMAT_OF_SUFFIX[out.suffix]
