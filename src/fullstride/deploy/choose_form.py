"""Chooses the most accurate network and the fastest format, and times files."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fullstride.deploy import export as exporting
from fullstride.deploy import exported
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import DEFAULTS, ExportResult, Finetune, Progress, export
from fullstride.deploy.exported import ExportedModel, InputKind, Precision
from fullstride.deploy.fold_batch_norm import fold_batch_norm
from fullstride.deploy.formats import (
    FORMATS,
    check_timed,
    detect_format,
    litert,
    onnx,
    open_file,
    output,
    tensorrt,
)
from fullstride.deploy.job import ExportJob
from fullstride.deploy.settings import ExportOptions
from fullstride.io.console import count_of, print_note
from fullstride.io.writing import atomic_write, scratch_folder
from fullstride.measure import protocols
from fullstride.measure.bench import DEFAULTS as BENCH_DEFAULTS
from fullstride.measure.bench import BenchOptions, Series, bench, measurement
from fullstride.measure.budget import HERE, Budget, conditions, is_elsewhere, ties, within
from fullstride.measure.environment import cpu_name
from fullstride.measure.protocols import ONLINE, Measurement, Protocol, call_time
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tables.class_names import permutation
from fullstride.targets.target import Target, TimedFile, connect
from fullstride.tasks import common_metric, find_task
from fullstride.tasks.task import Task
from fullstride.train.averages import BATCH_NORM

TRIAL = replace(ONLINE, rounds=3, warmup_s=0.2, round_s=0.1)  # for progress lines, not the choice
# The formats that `fastest` compares.
CANDIDATES = ("openvino", "onnx", "aoti", "tensorrt", "executorch", "ncnn", "litert")
Label = tuple[str, Precision]  # a file's format and precision


def compared_split(bundles: Mapping[str, Bundle], metric: str) -> str:
    """The split to compare networks on: the test, or validation if a network has no test score."""
    scored = {
        split: [name for name, each in bundles.items() if metric in each.scores.get(split, {})]
        for split in ("test", "val")
    }
    for split, names in scored.items():
        if len(names) == len(bundles):
            return split
    name = next((each for each in bundles if each not in sum(scored.values(), [])), [*bundles][0])
    raise ValueError(f"{name} has no test score to be compared by: export it alone")


def most_accurate(
    bundles: Mapping[str, Bundle],
    budget: Budget | None,
    progress: Progress = lambda line: None,
    times: Mapping[str, float] | None = None,
) -> tuple[str, Bundle]:
    """Return the name and bundle with the best test score within the budget; the fastest of ties.

    If a bundle has no test score, all are compared by validation scores. A tie is an equal score.
    Times come from earlier measurements (`times`) or from `ms_per_image`, only if there is a budget
    or a tie; `progress` is called with a line about them. Raises ValueError, with the times, if no
    bundle fits, and if one of several has no score or other classes.
    """
    first = next(iter(bundles.values()))
    for bundle in bundles.values():
        if first.task != bundle.task or permutation(first.classes, bundle.classes) is None:
            raise ValueError(f"{', '.join(bundles)} have different classes: export each alone")
    metric = common_metric(bundles.values())
    batch = budget.batch if budget else 1

    @cache
    def ms(name: str) -> float:
        return times[name] if times else ms_per_image(bundles[name], batch)

    names = [*bundles]
    if budget is not None:
        names = within(names, ms, budget.ms_per_image)
        if not names:
            limit, all_ms = budget.on(cpu_name(), "fp32"), {name: ms(name) for name in bundles}
            raise ValueError(f"no network runs within {limit}: {in_words(all_ms)}")
    if len(names) > 1:
        split = compared_split({name: bundles[name] for name in names}, metric.name)
        scores = {name: bundles[name].score(split, metric.name) for name in names}
        names = ties(names, lambda name: metric.rank(scores[name]))
        if len(names) > 1:
            score, all_ms = metric.text(scores[names[0]]), {name: ms(name) for name in names}
            progress(
                f"the fastest network with the best {split} {score} is exported: {in_words(all_ms)}"
            )
    name = names[0] if len(names) == 1 else min(names, key=ms)
    if budget or len(names) > 1:
        where = f"(batch {batch}, as measured before)"
        if not times:
            where = f"here ({conditions(batch, cpu_name(), 'fp32')})"
        limit = f" within {budget.ms_per_image:g} ms" if budget else ""
        progress(
            f"{name}: {ms(name):.3f} ms an image {where}, the most accurate of "
            f"{len(bundles)}{limit}"
        )
    return name, bundles[name]


def measure_bundle(bundle: Bundle, batch: int = 1) -> Measurement:
    """Measure a network here by the online protocol at its own resolution."""
    pre = bundle.preprocessing
    protocol = replace(ONLINE, resolution=pre.resolution, batch=batch)
    (row,) = bench(
        {bundle.name: bundle.net}, protocol, options=BenchOptions(in_channels=pre.channels)
    )
    return row


def ms_per_image(bundle: Bundle, batch: int = 1) -> float:
    """The median time of a call in `measure_bundle`, divided by its images."""
    return call_time(measure_bundle(bundle, batch)).ms


def earlier_times(path: Path, bundles: Mapping[str, Bundle], batch: int = 1) -> dict[str, float]:
    """Read the times of `bundles`, by path, from a file of `fullstride bench --out`.

    Raises ValueError, in one line, for a bundle that is missing, or measured at another resolution
    or batch.
    """
    rows = protocols.by_network(protocols.read_measurements(path))
    times: dict[str, float] = {}
    for word, bundle in bundles.items():
        side = bundle.preprocessing.resolution
        row = rows.get(protocols.location(word), {}).get("online")
        if row is None or (row.protocol.batch, row.protocol.resolution) != (batch, side):
            raise ValueError(
                f"{path} has no time of {word} by the protocol online at batch {batch} and {side} "
                "pixels a side: measure it by `fullstride bench --out`, or leave --bench out"
            )
        assert row.ms_p50 is not None  # by the online protocol
        times[word] = row.ms_p50 / batch
    return times


def in_words(ms: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items())


def fastest(
    bundle: Bundle,
    out: Path,
    images: ComparisonImages,
    options: ExportOptions = DEFAULTS,
    *,
    calibration: Sequence[Image.Image | np.ndarray] = (),
    finetune: Finetune | None = None,
    budget: Budget | None = None,
    progress: Progress = lambda line: None,
) -> ExportResult:
    """Export `bundle` to each format that runs and keep the file with the lowest latency.

    Files run on the target of `options`, by default this machine, in the precision of `options`, or
    in every precision if that is None. They are measured in turn by the online protocol. `progress`
    is called with a line at the start of each export, and with its duration, first latency and lost
    points at the end. `out` gets the suffix of the chosen format. See `export` for the other
    arguments. Raises ValueError, with the latencies, if no file passes its comparison or fits the
    budget.
    """
    candidates, target = available(options.precision), find_target(options.target)
    if target is not None:
        candidates = [*supported_by(target, candidates)]
    for kind in {FORMATS[name].suffix: FORMATS[name] for name, _ in candidates}.values():
        exporting.check_free(with_suffix(out, kind.suffix), kind, options.force)
    reference = exporting.make_reference(bundle, images, options.input_kind)
    finetune = cache(finetune) if finetune else None
    batch = budget.batch if budget else 1
    results: dict[str, ExportResult] = {}
    with scratch_folder(out) as scratch:
        for number, (name, precision) in enumerate(candidates, start=1):
            label = f"{name} {precision}"
            path = scratch / f"{name}_{precision}{FORMATS[name].suffix}"
            progress(f"{label}: {number} of {len(candidates)}")
            start = time.perf_counter()
            try:
                result = export(
                    bundle,
                    path,
                    images,
                    replace(options, format=name, precision=precision, force=False),
                    calibration=calibration,
                    finetune=finetune,
                    reference=reference,
                    progress=lambda line, label=label: progress(f"{label}: {line}"),
                )
                alone = latencies({label: path}, bundle, batch, TRIAL, target)[label]
            except ValueError as error:
                what = str(error).removeprefix(f"{path} ")
            else:
                results[label], drop = result, result.comparison.drop
                what = f"{alone:.3f} ms an image, {drop:.2f} points lost"
            progress(f"{label}: {what}, after {time.perf_counter() - start:.1f} s")
        if not results:
            raise ValueError(f"{out} was not written: no format that runs here passed")
        paths = {label: each.path for label, each in results.items()}
        ms = latencies(paths, bundle, batch, ONLINE, target)
        ms = {label: ms[label] for label in sorted(ms, key=lambda label: ms[label])}
        progress(f"measured in turn, an image: {in_words(ms)}")
        best = next(iter(ms))
        if budget is not None and ms[best] > budget.ms_per_image:
            raise ValueError(
                f"{out} was not written: {best} is the fastest with {ms[best]:.3f} ms an image, "
                f"the budget is {budget}"
            )
        kind = FORMATS[results[best].format]
        final = with_suffix(out, kind.suffix)
        with atomic_write(final, output(kind, options.force)) as temporary:
            results[best].path.rename(temporary)
    return replace(results[best], path=final)


def with_suffix(out: Path, suffix: str) -> Path:
    return out if out.suffix == suffix else out.with_name(out.name + suffix)


def available(precision: Precision | None) -> list[tuple[str, Precision]]:
    """Formats and precisions that can be written and run on this machine."""
    return [
        (name, each)
        for name in CANDIDATES
        if runs_here(name)
        for each in FORMATS[name].precisions
        if precision in (None, each)
    ]


def runs_here(name: str) -> bool:
    also = {"tensorrt": tensorrt.engine_missing, "litert": litert.converter_missing}
    return not FORMATS[name].missing() and not (name in also and also[name]())


def runnable(
    formats: Sequence[str] = (), precisions: Sequence[str] = ()
) -> tuple[tuple[str, Precision], ...]:
    """The formats and precisions to compare here; by default all that may be the fastest.

    Programs, which run code when they are opened, are compared only if `formats` names them, and
    fp16 that the runtime computes in fp32 only if `precisions` does. Raises ValueError for a format
    or precision that does not exist or cannot run here, and if nothing is left.
    """
    for name in formats:
        exporting.find_format(name, FORMATS[name].precisions[0] if name in FORMATS else "")
        check_timed(name)
    if "tensorrt" in formats and (reason := tensorrt.engine_missing()):
        raise ValueError(reason)
    for each in precisions:
        if each not in get_args(Precision):
            raise ValueError(f"precision {each!r}: use {', '.join(get_args(Precision))}")
    pairs: list[tuple[str, Precision]] = []
    for name in dict.fromkeys(formats) or data_formats():
        for precision in FORMATS[name].precisions:
            # without a choice, no fp16 that would be computed in fp32
            is_half = name not in ("openvino", "ncnn") and torch.cuda.is_available()
            if precision in precisions if precisions else precision != "fp16" or is_half:
                pairs.append((name, precision))
    if not pairs:
        names = ", ".join(formats or data_formats())
        if not names:
            raise ValueError(
                f"no file runs here: {next(each.missing() for each in FORMATS.values())}"
            )
        raise ValueError(f"{', '.join(precisions)} does not run in {names}: choose another")
    return tuple(pairs)


def find_target(where: str) -> Target | None:
    """Connect to another machine; None for this machine. Raises ValueError for a profile."""
    if where == HERE:
        return None
    if is_elsewhere(where):
        return connect(where)
    raise ValueError(
        f"--target {where}: files are measured, so use {HERE}, ssh://HOST, or a command that runs "
        "Python"
    )


def supported_by(target: Target, labels: Sequence[Label]) -> tuple[Label, ...]:
    """The labels whose runtime `target` has. Raises ValueError if it has none."""
    there = target.describe().machine.runtimes
    if own := tuple(label for label in labels if label[0] in there):
        return own
    raise ValueError(
        f"{target.where} has none of the requested runtimes; `fullstride measure target` says what "
        "to install"
    )


def probe_label(labels: Sequence[Label]) -> Label:
    """The label to measure first: quickly written, in a runtime that most machines have."""
    preferred: tuple[Label, ...] = ("tensorrt", "fp16"), ("onnx", "fp32"), ("openvino", "fp32")
    return next((each for each in preferred if each in labels), labels[0])


def data_formats() -> list[str]:
    """The formats that run here and whose files are data, not programs."""
    return [name for name in CANDIDATES if not FORMATS[name].runs_code and runs_here(name)]


def latencies(
    paths: Mapping[str, Path],
    bundle: Bundle,
    batch: int = 1,
    protocol: Protocol | None = None,
    target: Target | None = None,
) -> dict[str, float]:
    """Measure the files in turn; return each median time of a call / its images, in ms.

    `protocol` is online by default; for `target` see `measure_files`.
    """
    models = {label: open_file(path, trust=True) for label, path in paths.items()}
    protocol = replace(protocol or ONLINE, resolution=bundle.preprocessing.resolution, batch=batch)
    rows = measure_files(models, protocol, target=target)
    return {row.name: call_time(row).ms for row in rows}


def measure_files(
    models: Mapping[str, ExportedModel], protocol: Protocol, target: Target | None = None
) -> list[Measurement]:
    """Measure opened files with the same number of input channels in turn in every round.

    Each file is measured at its own resolution. `target`: another machine to measure on.
    """
    if target is not None:
        return measure_there(models, protocol, target)
    channels = next(iter(models.values())).preprocessing.channels
    modules = {label: exported.ExportedModule(model) for label, model in models.items()}
    sides = {label: model.preprocessing.resolution for label, model in models.items()}
    options = BenchOptions(in_channels=channels, resolutions=sides)
    return bench(modules, protocol, options=options)


def timed_file(name: str, model: ExportedModel, batch: int) -> TimedFile:
    """Describe a file for another machine."""
    about, format = model.metadata, detect_format(model.path)
    assert format is not None
    return TimedFile(
        name=name,
        path=model.path,
        format=format,
        precision=about.precision,
        shape=(batch, *about.input_shape()),
        dtype="float32" if about.input_kind == "normalised" else "uint8",
    )


def run_there(target: Target, model: ExportedModel, batch: int) -> None:
    """Raise ValueError, in one line, if `target` cannot open or run a file."""
    images = example(model.preprocessing, model.metadata.input_kind)
    file = timed_file("", model, batch)
    target.run(file, np.resize(images, file.shape), rows=0)  # a map for every image may be large


def measure_there(
    models: Mapping[str, ExportedModel], protocol: Protocol, target: Target
) -> list[Measurement]:
    """`measure_files` on all cores of another machine, which waits after each call."""
    files = [timed_file(name, model, protocol.batch) for name, model in models.items()]
    times = target.measure(files, protocol)
    if reason := times.environment.held_back_by:
        print_note(f"{target.where} was held back while it measured: {reason}")
    versions, threads = target.describe().machine.runtimes, times.environment.threads
    rows = []
    for file in files:
        ms = np.reshape(times.ms[file.name], (protocol.rounds, -1))
        series = Series(lambda: None, protocol.batch, ms.shape[1], environment=times.environment)
        for each in ms / 1e3:
            series.add(each if protocol.waits else [each.sum()], 0.0, protocol.waits)
        own = replace(protocol, resolution=models[file.name].preprocessing.resolution)
        row = measurement(file.name, series, own, BENCH_DEFAULTS)
        runtime = f"{file.format} {versions[file.format]}, {count_of(threads, 'thread')}"
        rows.append(replace(row, runtime=f"{runtime}, {file.precision}"))
    return rows


# Times of untrained networks as files: weights do not change the time. The files are only timed,
# not compared with PyTorch, since outputs of random weights say little.


IMAGES = 2  # of the example, which int8 takes its ranges from
TRACED_BATCH = 7  # images; few other dimensions of networks have this size
STATISTICS_SHARE = 0.99  # weight of the images' variance; the rest is 1, as channels may be zero


@dataclass
class UntrainedFiles:
    """Writes an untrained network in evaluation mode to files of all formats."""

    job: ExportJob
    has_own_graphs: bool = True  # False: the graphs were traced at another resolution
    was_run: bool = False  # whether a file of these graphs has run on a batch

    def at(self, name: str, pre: Preprocessing) -> "UntrainedFiles":
        """The same network at another resolution, traced again only if its graph does not fit."""
        job, graphs = self.job, {}
        if job.metadata.input_kind != "pictures":  # graphs of pictures have it in constants
            sides = replace(job, any_size=True).dynamic_sides
            graphs = {
                key: onnx.at_resolution(model, pre.resolution, sides)
                for key, model in job.graphs.items()
            }
        images = example(pre, job.metadata.input_kind)
        metadata = replace(job.metadata, name=name, preprocessing=pre)
        changes = dict(metadata=metadata, example=images, calibration=(images,), graphs=graphs)
        return UntrainedFiles(replace(job, **changes), has_own_graphs=not graphs)

    def open(
        self,
        format: str,
        precision: Precision,
        folder: Path,
        threads: int | None = None,
        batch: int = IMAGES,
    ) -> ExportedModel:
        """Write a file to `folder`, open it and run it on a batch.

        A graph that was traced at another resolution or batch is traced again if it does not fit.
        Raises ValueError, in one line, if anything fails.
        """
        try:
            model = self.written(format, precision, folder, threads, batch)
        except ValueError:
            if self.has_own_graphs and (self.was_run or self.job.traced_batch is None):
                raise
            self.job = replace(self.job, graphs={}, traced_batch=None)
            self.has_own_graphs = True
            model = self.written(format, precision, folder, threads, batch)
        self.was_run = True
        return model

    def written(
        self, format: str, precision: Precision, folder: Path, threads: int | None, batch: int
    ) -> ExportedModel:
        kind = FORMATS[format]
        attempts = len([*folder.iterdir()])
        path = folder / f"{attempts}_{format}_{precision}{kind.suffix}"
        job = replace(self.job, metadata=replace(self.job.metadata, precision=precision))
        exporting.write(kind, job, path)
        model = open_file(path, threads=threads, trust=True)
        model.run(np.resize(job.example, (batch, *job.example.shape[1:])))
        return model


def untrained_files(
    net: nn.Module,
    name: str,
    pre: Preprocessing,
    classes: int,
    input_kind: InputKind,
    task: Task | None = None,
) -> UntrainedFiles:
    """Prepare to write a network with random weights to files; its batch statistics are changed.

    `name` goes into the metadata, `pre` has the input's resolution and channels, and `classes` is
    the number of classes. `task` is the task of the head, classification if None.
    """
    images, task = torch.randn(IMAGES, *exported.one_input(pre, "normalised")), task or find_task()
    with_typical_statistics(net, images)
    with torch.inference_mode():
        shape = tuple(net(images).shape[1:])
    metadata = exported.Metadata(
        name=name,
        classes=tuple(map(str, range(classes))),
        preprocessing=pre,
        scores={},
        task=task.name,
        task_state=task.state(),
        outputs=exporting.output_sizes(shape, classes),
        input_kind=input_kind,
    )
    inputs = example(pre, input_kind)
    job = ExportJob(
        fold_batch_norm(net),
        metadata,
        inputs,
        calibration=(inputs,),
        per_channel=False,  # files take the same time, but are written in half of it
        traced_batch=TRACED_BATCH,
    )
    return UntrainedFiles(job)


@torch.no_grad()
def with_typical_statistics(net: nn.Module, images: Tensor) -> None:
    """Set batch statistics so that batch norms normalise, as in a trained network.

    Scales become 1, so that branches add to their shortcuts. Otherwise activations may fade to
    numbers so small that processors take many times as long.
    """
    net.eval()  # a head may need targets in training
    for norm in net.modules():
        if isinstance(norm, BATCH_NORM):
            norm.momentum = STATISTICS_SHARE
            if norm.affine:
                nn.init.ones_(norm.weight)
            norm.train()
    net(images)
    net.eval()


def example(pre: Preprocessing, input_kind: InputKind) -> np.ndarray:
    """Random inputs for a file."""
    random, shape = np.random.default_rng(0), (IMAGES, *exported.one_input(pre, input_kind))
    if input_kind == "normalised":
        return random.standard_normal(shape, np.float32)
    return random.integers(256, size=shape, dtype=np.uint8)
