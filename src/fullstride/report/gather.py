"""What does a report tell? The numbers of finished runs and of a benchmark, read from their files."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.data.dataset import DataSet
from fullstride.deploy.predict import probabilities
from fullstride.measure.cost.flops import cost
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import Measurement
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.report.page import Entry, Prediction
from fullstride.storage import read_json
from fullstride.train.run import fitting_data
from fullstride.train.run_folder import ASKED, BUNDLE, logged

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
        other = read_json(Path(run) / ASKED)
        if other["fingerprint"] != data.fingerprint:
            raise ValueError(
                f"{run} was trained on {other['data']}, {first} on {data.name}: report them apart"
            )
    times = measurements(bench) if bench else {}
    entries = [entry(run, bundle, times.get(run, {})) for run, bundle in bundles.items()]
    entries += [untrained(name, found) for name, found in times.items() if name not in bundles]
    best = max(bundles.values(), key=lambda bundle: bundle.scores["test"]["top1"])
    environment = next((m.environment for found in times.values() for m in found.values()), None)
    return dict(
        title=f"fullstride on {data.name}",
        entries=entries,
        predictions=examples(best, data),
        environment=asdict(environment or Environment.here()),
        notes=notes(data, best, bench is not None),
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
    for measurement in found.values():
        if measurement.protocol.resolution != pre.resolution:
            raise ValueError(
                f"{run} was trained at {pre.resolution} pixels a side and timed at {measurement.protocol.resolution}: "
                f"measure again with --resolution {pre.resolution}"
            )
    return Entry(
        name=bundle.name,
        data=bundle.source.removeprefix("trained on "),
        top1=test["top1"],
        test_images=test["images"],
        log=logged(Path(run)),
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
    )


def prices(net: Any, resolution: int, channels: int) -> dict[str, int]:
    price = cost(net, resolution, channels)
    return dict(params=price.params, macs=price.macs, resolution=resolution)


def speeds(found: dict[str, Measurement]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if online := found.get("online"):
        told |= dict(ms_p50=online.ms_p50, ms_p99=online.ms_p99)
    if throughput := found.get("throughput"):
        told |= dict(images_per_s=throughput.images_per_s, batch=throughput.protocol.batch)
    return told


def examples(bundle: Bundle, data: DataSet) -> list[Prediction]:
    """Test images with the predicted class: the wrong ones first, then right ones evenly spread over the rest."""
    indices, rows = [], []
    pictures = data.test.readable()
    while batch := list(
        islice(pictures, 128)
    ):  # only some are kept: a test set may not fit into memory
        indices += [index for index, _ in batch]
        rows.append(probabilities(bundle, [picture for _, picture in batch]))
    found = np.concatenate(rows)
    labels, guesses = np.array(data.test.targets)[indices], found.argmax(1)
    wrong = np.flatnonzero(guesses != labels)[: SHOWN // 2]
    right = np.flatnonzero(guesses == labels)
    spread = np.linspace(0, len(right) - 1, min(SHOWN - len(wrong), len(right))).astype(int)
    return [
        Prediction(
            picture=np.asarray(data.test.picture(indices[i])),
            truth=data.classes[labels[i]],
            predicted=bundle.classes[guesses[i]],
            probability=float(found[i, guesses[i]]),
        )
        for i in (*wrong, *right[spread])
    ]


def notes(data: DataSet, best: Bundle, measured: bool) -> list[str]:
    sizes = (
        f"{len(data.train)} training, {len(data.minival)} minival and {len(data.test)} test images"
    )
    told = [
        f"{data.name}: {sizes}. Test images were used once, after training.",
        f"Predicted images are answers of {best.name} on test images; wrong ones are shown first.",
        "Accuracies are of the averaged weights after the last epoch, or where a recipe has patience, the best one.",
    ]
    if measured:
        told.append(
            "Times: all networks in turn within every round on the same random input, medians; "
            "one image at a time (online) and batches (throughput), float32."
        )
    return told
