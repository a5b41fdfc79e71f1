"""Exports the finalists in several forms, scores each file, and measures all of them in turn."""

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from fullstride import tasks
from fullstride.autofit.budget import INPUT, CandidateTime, FitJob
from fullstride.autofit.candidates import Candidate
from fullstride.autofit.halving import TRIALS
from fullstride.autofit.settings import FitSettings
from fullstride.deploy import choose_form
from fullstride.deploy.comparison import load_views, score_model
from fullstride.deploy.export import export, find_format, make_reference
from fullstride.deploy.export_runs import images_for_ranges, images_to_compare, view_of_clips
from fullstride.deploy.exported import Precision
from fullstride.deploy.formats import FORMATS, open_file, output
from fullstride.deploy.settings import ExportOptions
from fullstride.io.console import count_of
from fullstride.io.records import Record
from fullstride.io.writing import atomic_write, bytes_of, remove
from fullstride.latency.profiles import Profile
from fullstride.measure.budget import Budget
from fullstride.measure.environment import Environment, choose_device
from fullstride.measure.protocols import ONLINE, CallTime, call_time, shortest
from fullstride.study.scores import resampled_of
from fullstride.study.trials import Work
from fullstride.tasks.task import Metric

SHIP = "ship"  # folder of the files, in the folder of a fit
SLACK = 1.1  # times the budget: a form that took longer before training is not exported
NEAR = 1.25  # times the fastest format in a precision: slower formats are not exported
COMPARISON_IMAGES = 128  # images on which outputs are compared; all images score the file
MAX_DROP = 100.0  # points of top-1, so no limit: a file is judged by its own score, not by its loss
REMOTE = "onnx"  # the format of files for a device that is not here
REMOTE_PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")  # beside the estimates' precisions


@dataclass(frozen=True, kw_only=True)
class ShippedFile:
    """A finalist in one format and precision."""

    candidate: str
    path: str  # relative to the folder of the fit; "" if the file was not written
    format: str
    precision: Precision
    ms: float | None  # per image, measured at the end in turn with all others, or estimated
    val: Mapping[str, float]  # scores of the file on the validation split
    within: bool = False  # whether the time is within the budget, see `ship.within`
    failure: str = ""  # why the file was not written, in one line
    low: float | None = None  # of the rounds of the measurement, or the interval of the estimate
    high: float | None = None
    measured: bool = True  # False: `ms` is an estimate for a device that is not here
    resolution: int = 0  # pixels a side
    size_mib: float = 0.0  # on the disk
    runtime: str = ""  # that opened the file here
    float_layers: tuple[str, ...] = ()  # layers in float of an int8 file

    @property
    def title(self) -> str:
        return f"{self.candidate} as {self.format} {self.precision}"

    @property
    def upper_ms(self) -> float | None:
        """The measured time, or the upper end of the estimate's interval."""
        return self.ms if self.measured else self.high or self.ms


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The record that is stored with a file, so that it is exported and scored only once."""

    file: ShippedFile  # without a time
    correct: str  # see `PairedScores`
    seconds: float  # of exporting and scoring
    resampled: tuple[float | None, ...] = ()  # see `PairedScores`


FILE_RECORD = Record(FileRecord, "a record of an exported file", ("file", "correct"))


def forms(
    settings: FitSettings, budget: Budget, times: Sequence[CandidateTime]
) -> list[tuple[str, Precision]]:
    """The formats and precisions in which a candidate is exported.

    On a measured machine: the forms that run there and may be the best by the candidate's `times`,
    within `SLACK` of the budget and within `NEAR` of the fastest format in the same precision. For
    other devices: ONNX files. The settings' formats and precisions restrict both as in `runnable`,
    so that programs are exported only if they are named.
    """
    formats, precisions = settings.formats, settings.precisions
    if not settings.is_measured:
        own = sorted({remote_precision(each.precision) for each in times if each.ms is not None})
        wanted = own + [each for each in REMOTE_PRECISIONS if each not in own]
        return [
            (name, precision)
            for name in formats or (REMOTE,)
            for precision in wanted
            if precision in find_format(name, "fp32").precisions
            and (not precisions or precision in precisions)
        ]
    ms = {(each.format, each.precision): each.ms for each in times if each.ms is not None}
    limit = SLACK * budget.ms_per_image

    def fastest(precision: Precision) -> float:
        return min(value for (_, other), value in ms.items() if other == precision)

    return [
        (format, precision)
        for format, precision in choose_form.runnable(formats, precisions)
        if (value := ms.get((format, precision))) is not None
        and value <= limit
        and (value <= NEAR * fastest(precision) or format in formats)
    ]


def remote_precision(precision: Precision) -> Precision:
    """The precision of an ONNX file that is as fast on a device as `precision`."""
    return precision if precision in FORMATS[REMOTE].precisions else "fp16"


def export_finalist(
    job: FitJob, candidate: Candidate, wanted: Sequence[tuple[str, Precision]]
) -> Work[list[FileRecord]]:
    """Export the bundle of a finalist in each form of `wanted`, and score the files in validation.

    A file with a record in the folder is not written again. If a file cannot be written, its record
    has the reason. Yields a line for each new file.
    """
    records = {form: read_record(job.folder, candidate.name, *form) for form in wanted}
    missing = [form for form, record in records.items() if record is None]
    for record in new_records(job, candidate, missing) if missing else ():
        records[record.file.format, record.file.precision] = record
        yield line_of(record, job.metric)
    return [record for record in records.values() if record is not None]


def new_records(
    job: FitJob, candidate: Candidate, missing: Sequence[tuple[str, Precision]]
) -> Iterator[FileRecord]:
    """Write the files of `candidate` that have no record yet, and their records."""
    folder = job.folder
    bundle = tasks.load(str(folder / TRIALS / candidate.name / "bundle"))
    bundle = replace(bundle, licence=bundle.licence or candidate.licence)
    data = job.data.over(bundle.preprocessing.background)
    clips = view_of_clips(bundle)
    images = images_to_compare(data, bundle, COMPARISON_IMAGES)
    reference = make_reference(bundle, images, INPUT)
    views = load_views(bundle, data.val)
    for format, precision in missing:
        start, own = perf_counter(), record_path(folder, candidate.name, format, precision)
        path = own.with_name(own.stem + FORMATS[format].suffix)
        written = ShippedFile(
            candidate=candidate.name,
            path=path.relative_to(folder).as_posix(),
            format=format,
            precision=precision,
            ms=None,
            val={},
            resolution=bundle.preprocessing.resolution,
        )
        correct, resampled = "", ()
        try:
            export(
                bundle,
                path,
                images,
                ExportOptions(
                    format=format,
                    precision=precision,
                    input_kind=INPUT,
                    max_drop=MAX_DROP if job.task.single_label else None,
                    device=job.devices[0] if find_format(format, precision).runs_code else "cpu",
                    force=True,
                ),
                calibration=images_for_ranges(data, view=clips) if precision == "int8" else (),
                reference=reference,
            )
            model = open_file(path, trust=True)
            result = score_model(model, data.val, views=views)
            written = replace(
                written,
                val=result.evaluation.scores,
                size_mib=bytes_of(path) / 2**20,
                runtime=model.runtime,
                float_layers=model.metadata.float_layers,
            )
            if job.task.single_label:
                correct = result.correct
            else:
                is_compared = job.metric == job.task.metric
                resampled = resampled_of(result.evaluation.score, is_compared)
        except (ValueError, FloatingPointError, MemoryError) as error:
            remove(path)
            why = " ".join(str(error).removeprefix(f"{path} ").split())
            written = replace(written, path="", failure=why or type(error).__name__)
        record = FileRecord(
            file=written, correct=correct, resampled=resampled, seconds=perf_counter() - start
        )
        yield FILE_RECORD.save(own, record)


def record_path(folder: Path, candidate: str, format: str, precision: Precision) -> Path:
    return folder / SHIP / f"{candidate}_{format}_{precision}.json"


def read_record(
    folder: Path, candidate: str, format: str, precision: Precision
) -> FileRecord | None:
    """The record of a file that exists or could not be written; None if it is to be written."""
    record = FILE_RECORD.find(record_path(folder, candidate, format, precision))
    if record and not record.file.failure and not (folder / record.file.path).exists():
        return None
    return record


def line_of(record: FileRecord, metric: Metric) -> str:
    file = record.file
    if file.failure:
        return f"{file.title}: {file.failure}"
    layers = len(file.float_layers)
    in_float = f"{count_of(layers, 'layer')} in float, " if layers else ""
    return (
        f"{file.title}: validation {metric.text(file.val[metric.name])}, {file.size_mib:.1f} MiB, "
        f"{in_float}after {record.seconds:.1f} s"
    )


def copy_export(path: Path, final: Path, format: str) -> None:
    """Link the exported file or folder at `path` to `final` too, or else copy it.

    Raises OSError if the disk is full, and leaves an earlier `final` as it was.
    """
    if final.exists() and same_files(path, final):
        return
    with atomic_write(final, output(FORMATS[format], True)) as temporary:
        if path.is_dir():
            shutil.copytree(path, temporary, copy_function=link_or_copy)
        else:
            link_or_copy(path, temporary)


def same_files(path: Path, final: Path) -> bool:
    """Whether `final` has links to all files of `path`; renaming a link would leave both names."""
    if path.is_dir() != final.is_dir():
        return False
    if not path.is_dir():
        return final.samefile(path)
    pairs = [(each, final / each.relative_to(path)) for each in path.rglob("*") if each.is_file()]
    return all(other.exists() and other.samefile(each) for each, other in pairs)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:  # another file system, or no support of links
        shutil.copyfile(source, target)


# The files of the finalists are measured in turn, or estimated.

MEASUREMENTS = 5  # most measurements of a file
PAUSE_S = 2.0  # before measuring again: right after a training a file takes up to 1.2x as long
# Times the budget: a virtual machine made two files take 3.1 and 4 times as long (docs/log.md).
SLOW_PHASE = 4.0
TIMES = "times.json"  # in the folder of the files


@dataclass(frozen=True, kw_only=True)
class FileTimes:
    """The times of all files, measured in turn."""

    times: Mapping[str, CallTime]  # by path
    measurements: int  # how often the files in doubt were measured
    environment: Mapping[str, Any]


FILE_TIMES = Record(FileTimes, "the times of exported files", ("times", "measurements"))


def measured(
    job: FitJob, records: Sequence[FileRecord], times: Sequence[CandidateTime]
) -> Work[tuple[list[FileRecord], Mapping[str, Any]]]:
    """The records with the times of their files, and the environment of the measurement.

    Files close enough to the budget that noise could flip the verdict, see `in_doubt`, are measured
    again, up to `MEASUREMENTS` times, and keep their shortest times. `times` are the candidates'
    times before training.
    """
    path, again = job.folder / SHIP / TIMES, [each.file.path for each in records]
    stored = FILE_TIMES.find(path)
    if stored is None or set(stored.times) != {*again}:
        stored = FileTimes(times={}, measurements=0, environment={})
    else:
        again = in_doubt(stored, records, times, job.budgets)
    while again and stored.measurements < MEASUREMENTS:
        if stored.measurements:
            yield "once more, as the budget may have been missed by noise:"
            time.sleep(PAUSE_S)
        yield f"measuring {count_of(len(again), 'file')} in turn, batch {job.budget.batch}"
        later = measure_files(job, again)
        times_so_far = shortest(stored.times, later.times)
        count = stored.measurements + later.measurements
        later = replace(later, times=times_so_far, measurements=count)
        stored = FILE_TIMES.save(path, later)
        again = in_doubt(stored, records, times, job.budgets)
    timed = [
        replace(each, file=replace(each.file, **asdict(stored.times[each.file.path])))
        for each in records
    ]
    return timed, stored.environment


def in_doubt(
    measured: FileTimes,
    records: Sequence[FileRecord],
    times: Sequence[CandidateTime],
    budgets: Sequence[Budget],
) -> list[str]:
    """The paths of files beyond a budget that may be within it.

    Their quiet rounds are within it, or they are beyond it by less than `SLOW_PHASE` and were
    within it before training.
    """
    before = {(each.candidate, each.format, each.precision): each.ms for each in times}

    def may_fit(file: ShippedFile, budget: Budget) -> bool:
        own, limit = measured.times[file.path], budget.ms_per_image
        was_ms = before.get((file.candidate, file.format, file.precision)) or math.inf
        is_noise = was_ms <= limit and own.ms < SLOW_PHASE * limit
        return own.ms > limit and (own.low <= limit or is_noise)

    return [
        each.file.path for each in records if any(may_fit(each.file, budget) for budget in budgets)
    ]


def measure_files(job: FitJob, paths: Sequence[str]) -> FileTimes:
    """Measure files of the folder in turn, by the online protocol at the budget's batch."""
    models = {path: open_file(job.folder / path, trust=True) for path in paths}
    protocol = replace(ONLINE, batch=job.budget.batch)
    rows = choose_form.measure_files(models, protocol, target=job.target)
    here = Environment.here(choose_device("auto"))
    return FileTimes(
        times={row.name: call_time(row, job.settings.percentile) for row in rows},
        measurements=1,
        environment=asdict(rows[0].environment if job.target is not None else here),
    )


def estimated(records: Sequence[FileRecord], times: Sequence[CandidateTime]) -> list[FileRecord]:
    """The records with the estimates of their candidates in the same precision, if any."""
    estimates = {
        (each.candidate, remote_precision(each.precision)): each
        for each in times
        if each.ms is not None
    }

    def timed(file: ShippedFile) -> ShippedFile:
        estimate = estimates.get((file.candidate, file.precision))
        if estimate is None or estimate.ms is None:
            return replace(file, measured=False)
        ms, low, high = estimate.ms, estimate.low or estimate.ms, estimate.high or estimate.ms
        return replace(file, ms=ms, low=low, high=high, measured=False)

    return [replace(each, file=timed(each.file)) for each in records]


def device_of(profile: Profile) -> Mapping[str, Any]:
    """The conditions of estimates."""
    return {
        "device": profile.device,
        "runtime": profile.machine.runtime,
        "precision": profile.precision,
        "profile": profile.name,
    }
