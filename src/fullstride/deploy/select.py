"""Which of several trained networks should ship, and as which file? What answers in time, and best or fastest."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fullstride.deploy.export import (
    Exported,
    Sample,
    Say,
    Tuning,
    check_free,
    export,
    original_of,
)
from fullstride.deploy.exported import Engine, Input, Kind
from fullstride.deploy.formats import FORMATS, open_file, tensorrt
from fullstride.measure.bench import bench
from fullstride.measure.protocols import ONLINE
from fullstride.nets.bundle import Bundle
from fullstride.storage import atomic_write


def most_accurate(
    bundles: Mapping[str, Bundle], budget_ms: float | None
) -> tuple[str, Bundle, float | None]:
    """The bundle with the best test top-1 among those whose median latency of one image, here, is within the budget.

    Without a budget nothing is measured and the third value is None. Raises ValueError, with the
    times, where none fits, and where several are to be compared of which one has no test score or other classes.
    """
    if len({bundle.classes for bundle in bundles.values()}) > 1:
        raise ValueError(f"{', '.join(bundles)} know different classes: export each alone")
    fit, ms = dict(bundles), {}
    if budget_ms is not None:
        for name, bundle in bundles.items():
            pre = bundle.preprocessing
            measured = bench(
                {name: bundle.net},
                replace(ONLINE, resolution=pre.resolution),
                in_channels=pre.channels,
            )
            ms[name] = measured[0].ms_p50
        fit = {name: bundle for name, bundle in bundles.items() if ms[name] <= budget_ms}
        if not fit:
            times = ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items())
            raise ValueError(f"nothing answers within {budget_ms:g} ms: {times}")
    if len(fit) > 1:
        for name, bundle in fit.items():
            if "top1" not in bundle.scores.get("test", {}):
                raise ValueError(f"{name} has no test score to be compared by: export it alone")
    best = max(fit, key=lambda name: fit[name].scores["test"]["top1"] if len(fit) > 1 else 0.0)
    return best, fit[best], ms.get(best)


def fastest(
    bundle: Bundle,
    out: Path,
    sample: Sample,
    *,
    precision: Kind | None = None,
    takes: Input = "normalised",
    finetune: Tuning | None = None,
    budget_ms: float | None = None,
    say: Say = lambda line: None,
    force: bool = False,
    **how: Any,
) -> Exported:
    """Export `bundle` to all that runs here, in `precision` or each there is, and keep what answers one image fastest.

    They are timed in turn by the online protocol. `out` gets the suffix of the winner's format if it has none; `how`
    is passed to `export`. Raises ValueError, with the times, if none passes its comparison or fits the budget.
    """
    made: dict[str, Exported] = {}
    kinds = candidates(precision)
    for suffix in {FORMATS[name].suffix for name, _ in kinds}:
        check_free(ending(out, suffix), force, suffix)
    original = original_of(bundle, sample, takes)
    once = cache(finetune) if finetune else None
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        for name, kind in kinds:
            label, path = f"{name} {kind}", Path(scratch) / f"{name}_{kind}{FORMATS[name].suffix}"
            try:
                each: dict[str, Any] = dict(
                    format=name, precision=kind, takes=takes, finetune=once, original=original
                )
                each["say"] = lambda line, label=label: say(f"{label}: {line}")
                made[label] = export(bundle, path, sample, **each, **how)
            except ValueError as error:
                say(f"{label}: {str(error).removeprefix(f'{path} ')}")
        if not made:
            raise ValueError(f"{out} was not written: no format of those that run here passed")
        times = measured({label: each.path for label, each in made.items()}, bundle)
        for label, ms in sorted(times.items(), key=lambda item: item[1]):
            say(f"{label}: {ms:.3f} ms an image, {made[label].check.drop:.2f} points lost")
        best = min(times, key=lambda label: times[label])
        if budget_ms is not None and times[best] > budget_ms:
            raise ValueError(
                f"{out} was not written: {best} is the fastest with {times[best]:.3f} ms an image, "
                f"the budget is {budget_ms:g} ms"
            )
        final = ending(out, FORMATS[made[best].format].suffix)
        with atomic_write(final) as beside:
            made[best].path.rename(beside)
    return replace(made[best], path=final)


def ending(out: Path, suffix: str) -> Path:
    return out if out.suffix == suffix else out.with_name(out.name + suffix)


def candidates(precision: Kind | None) -> list[tuple[str, Kind]]:
    """Formats and precisions that can be written and run on this machine."""
    names = [
        name for name in ("openvino", "onnx", "aoti", "tensorrt") if not FORMATS[name].missing()
    ]
    if tensorrt.engine_missing() and "tensorrt" in names:
        names.remove("tensorrt")
    return [
        (name, kind)
        for name in names
        for kind in FORMATS[name].precisions
        if precision in (None, kind)
    ]


def measured(paths: Mapping[str, Path], bundle: Bundle) -> dict[str, float]:
    """The median milliseconds of one image of each file, in turn."""
    engines = {label: Engine(open_file(path, trust=True)) for label, path in paths.items()}
    protocol = replace(ONLINE, resolution=bundle.preprocessing.resolution)
    rows = bench(engines, protocol, in_channels=bundle.preprocessing.channels)
    return {row.name: row.ms_p50 for row in rows if row.ms_p50 is not None}
