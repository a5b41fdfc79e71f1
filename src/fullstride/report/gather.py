"""What does a report tell? The numbers of finished runs and of a benchmark, read from their files."""

from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.data.images import DataSet
from fullstride.deploy.predict import probabilities
from fullstride.measure.bench import Measurement
from fullstride.measure.cost import cost
from fullstride.measure.environment import Environment
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle, read_json
from fullstride.report.page import Entry, Prediction
from fullstride.train.run import BUNDLE, LOG, fitting_data, logged

SHOWN = 24  # pictures with their predicted class


def gather(runs: Sequence[Path], bench: Path | None = None) -> dict[str, Any]:
    """The arguments of `page.render` for finished `runs` and a file of `fullstride bench --out`.

    Networks that were only measured become entries without accuracy. Raises ValueError for a run
    that is not finished, and for runs on different images.
    """
    bundles = {str(run): finished(run) for run in runs}
    first = next(iter(bundles))
    data = fitting_data(first, bundles[first].classes)
    for run in bundles:
        other = read_json(Path(run) / "run.json")
        if other["fingerprint"] != data.fingerprint:
            raise ValueError(f"{run} was trained on {other['data']}, {first} on {data.name}: report them apart")
    times = measurements(bench) if bench else {}
    entries = [entry(run, bundle, times.pop(run, {})) for run, bundle in bundles.items()]
    entries += [untrained(name, found) for name, found in times.items()]
    best = max(bundles.values(), key=lambda bundle: bundle.scores["test"]["top1"])
    environment = next((m.environment for found in times.values() for m in found.values()), None)
    return dict(
        title=f"fullstride on {data.name}",
        entries=entries,
        predictions=examples(best, data),
        environment=asdict(environment or Environment.here()),
        notes=notes(data, best),
    )


def finished(run: Path) -> Bundle:
    if not (run / BUNDLE).is_dir():
        raise ValueError(f"{run} is not a finished run: train it to its end first")
    return Bundle.load(run / BUNDLE)


def measurements(path: Path) -> dict[str, dict[str, Measurement]]:
    """Network -> protocol -> measurement."""
    found: dict[str, dict[str, Measurement]] = {}
    rows = read_json(path)
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not what `fullstride bench --out` writes")
    for row in rows:
        measurement = Measurement.from_json(dumps(row))
        found.setdefault(measurement.name, {})[measurement.protocol.name] = measurement
    return found


def entry(run: str, bundle: Bundle, found: dict[str, Measurement]) -> Entry:
    test, pre = bundle.scores["test"], bundle.preprocessing
    return Entry(
        name=bundle.name,
        data=bundle.source.removeprefix("trained on "),
        top1=test["top1"],
        test_images=test["images"],
        log=logged(Path(run), bundle.recipe["epochs"]),
        **prices(bundle.net, pre.resolution, pre.channels),
        **speeds(found),
    )


def untrained(name: str, found: dict[str, Measurement]) -> Entry:
    """A network that was measured beside the runs, on the same input."""
    net = zoo.create(name)
    resolution = next(iter(found.values())).protocol.resolution
    return Entry(
        name=name,
        data="",
        top1=None,
        test_images=0,
        log=[],
        **prices(net, resolution, net.spec.in_channels),
        **speeds(found),
        note="not trained here",
    )
