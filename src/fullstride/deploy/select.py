"""Which network should be exported, and to which format? The most accurate or the fastest one."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import (
    ExportResult,
    Finetune,
    Progress,
    check_free,
    export,
    make_reference,
)
from fullstride.deploy.exported import ExportedModule, InputKind, Precision
from fullstride.deploy.formats import FORMATS, open_file, output, tensorrt
from fullstride.measure.bench import bench
from fullstride.measure.budget import Budget
from fullstride.measure.environment import cpu_name
from fullstride.measure.protocols import ONLINE
from fullstride.nets.bundle import Bundle
from fullstride.tasks import find_task
from fullstride.writing import atomic_write, parent_folders

CANDIDATES = ("openvino", "onnx", "aoti", "tensorrt")  # formats that `fastest` compares


def most_accurate(
    bundles: Mapping[str, Bundle], budget: Budget | None
) -> tuple[str, Bundle, float | None]:
    """The name and the bundle with the best test score within the budget, and its ms per image.

    That is the median time of a call, measured here at the budget's batch size, divided by the
    images; without a budget it is not measured and None.
    Raises ValueError, with the latencies, if no bundle fits, and if one of several has no test
    score or other classes.
    """
    if len({(bundle.task, bundle.classes) for bundle in bundles.values()}) > 1:
        raise ValueError(f"{', '.join(bundles)} have different classes: export each alone")
    fit, ms = dict(bundles), {}
    if budget is not None:
        for name, bundle in bundles.items():
            pre = bundle.preprocessing
            rows = bench(
                {name: bundle.net},
                replace(ONLINE, resolution=pre.resolution, batch=budget.batch),
                in_channels=pre.channels,
            )
            assert rows[0].ms_p50 is not None  # by the online protocol
            ms[name] = rows[0].ms_p50 / budget.batch
        fit = {name: bundle for name, bundle in bundles.items() if ms[name] <= budget.ms_per_image}
        if not fit:
            times = ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items())
            raise ValueError(f"no network runs within {budget.on(cpu_name(), 'float32')}: {times}")
    best = next(iter(fit))
    if len(fit) > 1:
        metric = find_task(fit[best].task).metric
        for name, bundle in fit.items():
            if metric.name not in bundle.scores.get("test", {}):
                raise ValueError(f"{name} has no test score to be compared by: export it alone")
        best = max(fit, key=lambda name: metric.rank(fit[name].scores["test"][metric.name]))
    return best, fit[best], ms.get(best)


def fastest(
    bundle: Bundle,
    out: Path,
    images: ComparisonImages,
    *,
    precision: Precision | None = None,
    input_kind: InputKind = "normalised",
    finetune: Finetune | None = None,
    budget: Budget | None = None,
    progress: Progress = lambda line: None,
    force: bool = False,
    **options: Any,
) -> ExportResult:
    """Export `bundle` to each format that runs here and keep the file with the lowest latency.

    Files are in `precision`, or in each precision if None, and are measured in turn by the online
    protocol. `out` gets the suffix of the chosen format; `options` are passed to `export`. Raises
    ValueError, with the latencies, if no file passes its comparison or fits the budget.
    """
    candidates = available(precision)
    for kind in {FORMATS[name].suffix: FORMATS[name] for name, _ in candidates}.values():
        check_free(with_suffix(out, kind.suffix), kind, force)
    shared: dict[str, Any] = dict(
        input_kind=input_kind,
        finetune=cache(finetune) if finetune else None,
        reference=make_reference(bundle, images, input_kind),
    )
    results: dict[str, ExportResult] = {}
    with (
        parent_folders(out),
        TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch,
    ):
        for name, each in candidates:
            label, path = f"{name} {each}", Path(scratch) / f"{name}_{each}{FORMATS[name].suffix}"
            try:
                results[label] = export(
                    bundle,
                    path,
                    images,
                    format=name,
                    precision=each,
                    progress=lambda line, label=label: progress(f"{label}: {line}"),
                    **shared,
                    **options,
                )
            except ValueError as error:
                progress(f"{label}: {str(error).removeprefix(f'{path} ')}")
        if not results:
            raise ValueError(f"{out} was not written: no format of those that run here passed")
        ms = latencies(
            {label: each.path for label, each in results.items()},
            bundle,
            budget.batch if budget else 1,
        )
        for label in sorted(ms, key=lambda label: ms[label]):
            drop = results[label].comparison.drop
            progress(f"{label}: {ms[label]:.3f} ms an image, {drop:.2f} points lost")
        best = min(ms, key=lambda label: ms[label])
        if budget is not None and ms[best] > budget.ms_per_image:
            raise ValueError(
                f"{out} was not written: {best} is the fastest with {ms[best]:.3f} ms an image, "
                f"the budget is {budget}"
            )
        kind = FORMATS[results[best].format]
        final = with_suffix(out, kind.suffix)
        with atomic_write(final, output(kind, force)) as temporary:
            results[best].path.rename(temporary)
    return replace(results[best], path=final)


def with_suffix(out: Path, suffix: str) -> Path:
    return out if out.suffix == suffix else out.with_name(out.name + suffix)


def available(precision: Precision | None) -> list[tuple[str, Precision]]:
    """Formats and precisions that can be written and run on this machine."""
    names = [name for name in CANDIDATES if not FORMATS[name].missing()]
    if tensorrt.engine_missing() and "tensorrt" in names:
        names.remove("tensorrt")
    return [
        (name, each)
        for name in names
        for each in FORMATS[name].precisions
        if precision in (None, each)
    ]


def latencies(paths: Mapping[str, Path], bundle: Bundle, batch: int = 1) -> dict[str, float]:
    """The median time of a call / its images, in ms, of each file, measured in turn."""
    modules = {label: ExportedModule(open_file(path, trust=True)) for label, path in paths.items()}
    protocol = replace(ONLINE, resolution=bundle.preprocessing.resolution, batch=batch)
    rows = bench(modules, protocol, in_channels=bundle.preprocessing.channels)
    return {row.name: row.ms_p50 / batch for row in rows if row.ms_p50 is not None}
