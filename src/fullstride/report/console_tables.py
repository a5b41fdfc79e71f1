"""Formats results as tables for a terminal, and the numbers in them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from math import floor, log10
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from fullstride.io.console import count_of, printable
from fullstride.nets.efficiency import short_precision

if TYPE_CHECKING:
    from fullstride.deploy.export import ExportResult
    from fullstride.latency.devices import NamedEstimate
    from fullstride.latency.network_times import Estimate
    from fullstride.latency.select import Choice, Option
    from fullstride.measure.protocols import Measurement
    from fullstride.tasks.task import ClassScore, Metric
    from fullstride.train.distill import LabelSelection
    from fullstride.train.timing import DataBench


# Numbers and their intervals.


def wilson(percent: float, images: int) -> tuple[float, float]:
    """The 95 % Wilson interval, in per cent, of an accuracy measured on `images` images.

    Unlike the normal approximation it stays within 0 to 100 and is not empty at 100 %.
    """
    from scipy.stats import binomtest  # takes most of a second to import

    if images < 1:
        raise ValueError(f"an accuracy on {images} images: use 1 or more")
    correct = round(percent / 100 * images)
    interval = binomtest(correct, images).proportion_ci(0.95, "wilson")
    return 100 * float(interval.low), 100 * float(interval.high)


def score_interval(metric: "Metric", scores: Mapping[str, Any]) -> tuple[float, float] | None:
    """The 95 % interval of a score: the task's, or Wilson's for a percentage of the images."""
    if f"{metric.name}_low" in scores:
        return scores[f"{metric.name}_low"], scores[f"{metric.name}_high"]
    if not metric.percent_of_images or not scores.get("images"):
        return None
    return wilson(scores[metric.name], int(scores["images"]))


def three_digits(value: float) -> str:
    """0.4213 -> 0.421, 31.389 -> 31.4, 2930.4 -> 2,930."""
    rounded = float(f"{value:.3g}")
    if rounded == 0 or abs(rounded) >= 1000:
        return f"{value:,.0f}"
    return f"{rounded:.{max(2 - floor(log10(abs(rounded))), 0)}f}"


def count(value: float) -> str:
    """1_082_032 -> 1.08 M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * unit:
            return f"{three_digits(value / unit)} {name}"
    return f"{value:.0f}"


def ms(value: float) -> str:
    return f"{three_digits(value)} ms"


def percent(value: float) -> str:
    return f"{value:.1f} %" if value < 99.95 or value == 100 else f"{value:.2f} %"


def class_columns(rows: "Sequence[ClassScore]") -> list[str]:
    """The header of a table by class; each type of rows has its own columns."""
    return [rows[0].headers.get(each.name, each.name.replace("_", " ")) for each in fields(rows[0])]


def class_cells(row: "ClassScore") -> list[str]:
    def cell(value: str | float | None) -> str:
        if value is None or isinstance(value, str):
            return value or "-"
        return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"

    return [cell(getattr(row, each.name)) for each in fields(row)]


MOST_CLASSES = 100  # rows in the table of pseudo-labels


def table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without lines, with a bold header."""
    result = Table(box=None, header_style="bold")
    for column in columns:
        result.add_column(Text(printable(column)))
    for row in rows:
        result.add_row(*(Text(printable(cell)) for cell in row))
    return result


def class_table(rows: "Sequence[ClassScore]") -> Table:
    """A row for each class, in percent."""
    return table(class_columns(rows), [class_cells(row) for row in rows])


def pseudo_label_table(selection: "LabelSelection") -> Table:
    """A row for each class, at most the `MOST_CLASSES` with the fewest used images."""
    rows = selection.by_class
    if len(rows) > MOST_CLASSES:
        rows = sorted(rows, key=lambda row: row.used)[:MOST_CLASSES]
    numbers = ("predicted", "confident", "used", "repeated")
    cells = [[row.name, *(f"{getattr(row, name):,}" for name in numbers)] for row in rows]
    return table(["class", *numbers], cells)


def latency_and_throughput_table(
    online: "Sequence[Measurement]", throughput: "Sequence[Measurement]"
) -> Table:
    """The protocols online and throughput side by side, a row for each network."""
    batch, reference = throughput[0].protocol.batch, throughput[0].reference
    columns = ["network", "ms p50", "p90", "p99", f"images/s at {batch}", "spread"]
    rows = []
    for one, many in zip(online, throughput, strict=True):
        times = (f"{ms:.3f}" for ms in (one.ms_p50, one.ms_p90, one.ms_p99))
        rates = f"{many.images_per_s:,.1f}", f"{many.spread:.2f}", *ratio_cells(many)
        rows.append([one.name, *times, *rates])
    return table([*columns, *([f"to {reference}"] if reference else [])], rows)


def protocol_table(parts: "Sequence[Sequence[Measurement]]") -> Table:
    """The rows of one protocol, with an empty row after each part; ratios are within a part."""
    return table(*protocol_cells(parts, between=[[]]))


def protocol_cells(
    parts: "Sequence[Sequence[Measurement]]", between: Sequence[list[str]] = ()
) -> tuple[list[str], list[list[str]]]:
    """The columns of one protocol, and a row of cells for each measurement."""
    first = parts[0][0]
    numbers = number_columns(first)
    reference = [f"to {first.reference}"] if first.reference else []
    columns = [first.protocol.name, "work", "batch", *numbers, "spread", *reference]
    rows = []
    for part in parts:
        for row in part:
            cells = [row.name, row.protocol.work, str(row.protocol.batch)]
            cells += [cell(row) for cell in numbers.values()]
            rows.append([*cells, f"{row.spread:.2f}", *ratio_cells(row)])
        rows += between
    return columns, rows


def ratio_cells(row: "Measurement") -> list[str]:
    return [] if row.ratio is None else [f"{row.ratio:.2f}"]


def number_columns(first: "Measurement") -> "dict[str, Callable[[Measurement], str]]":
    """The columns of a protocol beside the network, batch, spread and ratio."""
    by_protocol: dict[str, dict[str, Callable[[Measurement], str]]] = {
        "online": {
            f"ms p{p}": lambda row, p=p: f"{getattr(row, f'ms_p{p}'):.3f}" for p in (50, 90, 99)
        },
        "genet": {"ms/image": lambda row: f"{row.ms_per_image:.3f}"},
        "resnet_rs": {"s/128 images": lambda row: f"{128 / row.images_per_s:.3f}"},
    }
    rate = {"images/s": lambda row: f"{row.images_per_s:,.1f}"}
    columns = dict(by_protocol.get(first.protocol.name, rate))
    if first.largest_batch:
        columns["largest batch"] = lambda row: str(row.largest_batch)
    if first.peak_memory_mib:
        images = f" at {first.protocol.memory_batch}" if first.protocol.memory_batch else ""
        columns[f"peak MiB{images}"] = lambda row: f"{row.peak_memory_mib:,.0f}"
    if first.cpu_ms_per_image:
        columns["CPU ms/image"] = lambda row: f"{row.cpu_ms_per_image:.3f}"
    return columns


def measurement_notes(rows: "Sequence[Measurement]", channels: int | None = None) -> list[str]:
    """Conditions of the measurements, runtimes of exported files, and warnings about noise."""
    from fullstride.measure.protocols import BUSY, spread_of_rounds

    environment = rows[-1].environment
    sides = dict.fromkeys(row.protocol.resolution for row in rows)
    sizes = " and ".join(f"{side} x {side}" for side in sides)
    precisions = ", ".join(dict.fromkeys(short_precision(row.precision) for row in rows))
    modes = " and ".join(dict.fromkeys("compiled" if row.compiled else "eager" for row in rows))
    where = f"{environment.device}, {count_of(environment.threads, 'thread')}"
    if environment.torch:  # not used on another machine
        where = f"{precisions}, {rows[-1].layout}, {modes}, {where}, torch {environment.torch}"
    sizes += f" x {channels}" if channels else ""
    how = f"{sizes}, {where}"
    notes = [how, *dict.fromkeys(f"{row.name}: {row.runtime}" for row in rows if row.runtime)]
    notes += [busy_note(row) for row in rows if spread_of_rounds(row) > BUSY]
    if any(row.protocol.name == "tresnet" and row.efficiency != "plain" for row in rows):
        notes.insert(1, "--efficiency is for training: measure inference without it")
    return notes


def busy_note(row: "Measurement") -> str:
    from fullstride.measure.protocols import spread_of_rounds

    return (
        f"{row.name}: rounds of {row.protocol.name} spread by {spread_of_rounds(row):.0%} of their "
        "median, the machine was busy"
    )


def estimate_table(rows: "Sequence[NamedEstimate]") -> Table:
    """A row for each network, the fastest first, numbered from 1."""
    columns = ["", "network", "pixels", "ms/image", "90 % interval", "images/s", "device ms"]
    cells = []
    for number, row in enumerate(rows, start=1):
        time = row.estimate
        speed = three_digits(time.ms_per_image), interval(time), f"{time.images_per_s:,.0f}"
        parts = three_digits(time.device_ms), three_digits(time.host_ms), time.bound
        ties = f"{row.ties[0] + 1} to {row.ties[-1] + 1}" if len(row.ties) > 1 else ""
        cells.append([str(number), row.network, str(row.resolution), *speed, *parts, ties])
    return table([*columns, "host ms", "bounded by", "ties"], cells)


def interval(estimate: "Estimate") -> str:
    return f"{three_digits(estimate.low)} to {three_digits(estimate.high)}"


def selection_table(choice: "Choice", tied: "Callable[[Option, Option], bool]") -> Table:
    """The networks on the front of accuracy and time, the fastest first."""
    printed = any(option.published_ms is not None for option in choice.front)
    columns = ["on the front", "pixels", "top-1 %", "ms/image", "time", "estimate, 90 % interval"]
    columns += [*(["published"] if printed else []), "tie", "accuracy from", "note"]
    rows = []
    for number, option in enumerate(choice.front):
        network, time = option.network, option.estimate
        cells = [network.name, str(network.resolution), f"{network.top1:g}"]
        cells += [three_digits(option.ms), option.by]
        cells.append(f"{three_digits(time.ms_per_image)}, {interval(time)}")
        if printed:
            cells.append("" if option.published_ms is None else f"{option.published_ms:g}")
        tie = "with the above" if number and tied(option, choice.front[number - 1]) else ""
        rows.append([*cells, tie, network.source, network.note])
    result = table(columns, rows)
    result.columns[0].no_wrap = True  # a wrapped name is useless
    return result


def export_table(exported: "ExportResult") -> Table:
    """The comparison of a file with PyTorch on the same images."""
    check = exported.comparison
    score = f"{check.metric.label} {check.metric.unit}".rstrip()
    columns = ["images", "difference", "cosine", "same prediction"]
    columns += [f"{score} PyTorch", f"{score} file"]
    both = check.accuracy, check.file_accuracy
    scores = ("-" if value is None else f"{value:.2f}" for value in both)
    differences = f"{check.relative_difference:.1e}", f"{check.cosine:.6f}"
    same = f"{check.same_class} of {check.images}"
    return table(columns, [[str(check.images), *differences, same, *scores]])


def data_bench_table(bench: "DataBench") -> Table:
    """Rates of decoding and of training steps."""
    from fullstride.measure.protocols import spread

    loading, steps = bench.loading, bench.steps
    training = f"training steps of {steps.batch} at {bench.resolution} pixels"
    rows = [
        ("decoding in one process", loading.images_per_s_alone, loading.samples_alone),
        ("the same, per CPU-second", loading.images_per_cpu_s, loading.samples_cpu),
        (f"decoding with --workers {loading.workers}", loading.images_per_s, loading.samples),
        (training, steps.images_per_s, steps.samples),
    ]
    if not loading.workers:
        del rows[2]
    cells = [[name, f"{rate:,.1f}", f"{spread(samples):.2f}"] for name, rate, samples in rows]
    return table(["", "images/s", "spread"], cells)
