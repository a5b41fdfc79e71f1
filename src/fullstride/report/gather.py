"""Which numbers does a report show? Those of finished runs and of a benchmark, from their files."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fullstride import tasks
from fullstride.console import printable
from fullstride.data.dataset import DataSet
from fullstride.deploy.predict import probabilities
from fullstride.measure.cost.flops import cost
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import Measurement
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.report.page import Entry, Prediction
from fullstride.strict_json import read_json
from fullstride.tasks import find_task
from fullstride.tasks.task import Metric
from fullstride.train.run_folder import BUNDLE, read_config, read_log
from fullstride.train.scoring import matching_data

SHOWN = 24  # pictures with their predicted class


def gather(runs: Sequence[Path], bench: Path | None = None) -> dict[str, Any]:
    """The arguments of `page.render` for finished `runs` and a file of `fullstride bench --out`.

    Networks that were only measured become entries without accuracy. Raises ValueError for a run
    that is not finished, and for runs on different images.
    """
    bundles = {str(run): finished(run) for run in runs}
    first = next(iter(bundles))
    data = matching_data(first, bundles[first])
    for run in bundles:
        other = read_config(Path(run), "give other runs")
        if other.fingerprint != data.fingerprint:
            raise ValueError(
                f"{run} was trained on {other.data}, {first} on {data.name}: report them apart"
            )
    metric = find_task(bundles[first].task).metric
    times = measurements(bench) if bench else {}
    entries = [entry(run, bundle, times.get(run, {}), metric) for run, bundle in bundles.items()]
    entries += [
        untrained(name, rows, metric) for name, rows in times.items() if name not in bundles
    ]
    best = max(bundles.values(), key=lambda bundle: metric.rank(bundle.scores["test"][metric.name]))
    environment = next((m.environment for rows in times.values() for m in rows.values()), None)
    return dict(
        title=printable(f"fullstride on {data.name}"),
        entries=entries,
        predictions=examples(best, data) if find_task(best.task).single_label else [],
        environment=asdict(environment or Environment.here()),
        notes=notes(data, best, bench is not None),
    )


def finished(run: Path) -> Bundle:
    if not (run / BUNDLE).is_dir():
        raise ValueError(f"{run} is not a finished run: train it to its end first")
    return tasks.load(run / BUNDLE)


def measurements(path: Path) -> dict[str, dict[str, Measurement]]:
    """Network -> protocol -> measurement."""
    by_network: dict[str, dict[str, Measurement]] = {}
    rows = read_json(path)
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not what `fullstride bench --out` writes")
    for row in rows:
        measurement = Measurement.from_json(row, str(path))
        by_network.setdefault(measurement.name, {})[measurement.protocol.name] = measurement
    return by_network


def entry(run: str, bundle: Bundle, times: dict[str, Measurement], metric: Metric) -> Entry:
    test, pre = bundle.scores["test"], bundle.preprocessing
    for measurement in times.values():
        if measurement.protocol.resolution != pre.resolution:
            raise ValueError(
                f"{run} was trained at {pre.resolution} pixels a side and timed at "
                f"{measurement.protocol.resolution}: measure with --resolution {pre.resolution}"
            )
    return Entry(
        name=printable(bundle.name),
        data=printable(bundle.source.removeprefix("trained on ")),
        metric=metric,
        score=test[metric.name],
        test_images=test["images"],
        log=read_log(Path(run)),
        **costs(bundle.net, pre.resolution, pre.channels),
        **speeds(times),
    )


def untrained(name: str, times: dict[str, Measurement], metric: Metric) -> Entry:
    """A network that was only measured, on the same input as the runs."""
    net = zoo.create(name)
    resolution = next(iter(times.values())).protocol.resolution
    return Entry(
        name=name,
        data="",
        metric=metric,
        score=None,
        test_images=0,
        log=[],
        **costs(net, resolution, net.spec.in_channels),
        **speeds(times),
    )


def costs(net: Any, resolution: int, channels: int) -> dict[str, int]:
    total = cost(net, resolution, channels)
    return dict(params=total.params, macs=total.macs, resolution=resolution)


def speeds(times: dict[str, Measurement]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if online := times.get("online"):
        values |= dict(ms_p50=online.ms_p50, ms_p99=online.ms_p99)
    if throughput := times.get("throughput"):
        values |= dict(images_per_s=throughput.images_per_s, batch=throughput.protocol.batch)
    return values


def examples(bundle: Bundle, data: DataSet) -> list[Prediction]:
    """Test images with predictions: wrong ones first, then correct ones from the whole set."""
    indices, rows = [], []
    pictures = data.test.readable()
    while batch := list(islice(pictures, 128)):  # the whole test set may not fit into memory
        indices += [index for index, _ in batch]
        rows.append(probabilities(bundle, [picture for _, picture in batch]))
    probability_nk = np.concatenate(rows)
    labels, predicted = np.array(data.test.targets)[indices], probability_nk.argmax(1)
    wrong = np.flatnonzero(predicted != labels)[: SHOWN // 2]
    right = np.flatnonzero(predicted == labels)
    spread = np.linspace(0, len(right) - 1, min(SHOWN - len(wrong), len(right))).astype(int)
    return [
        Prediction(
            picture=np.asarray(data.test.picture(indices[i])),
            truth=printable(data.classes[labels[i]]),
            predicted=printable(bundle.classes[predicted[i]]),
            probability=float(probability_nk[i, predicted[i]]),
        )
        for i in (*wrong, *right[spread])
    ]


def notes(data: DataSet, best: Bundle, measured: bool) -> list[str]:
    sizes = (
        f"{len(data.train)} training, {len(data.minival)} minival and {len(data.test)} test images"
    )
    lines = [
        f"{data.name}: {sizes}. Test images were used once, after training.",
        f"Predicted images are predictions of {best.name} on test images, wrong ones first.",
        "Accuracies are of the averaged weights after the last epoch, or after the best one if the "
        "recipe stops early.",
    ]
    if measured:
        lines.append(
            "Times are medians of rounds in which all networks alternate on the same random input, "
            "one image at a time (online) and in batches (throughput), in fp32."
        )
    return list(map(printable, lines))
