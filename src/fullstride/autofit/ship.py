"""Chooses the file that ships among the finalists' files, and scores it on the test images."""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fullstride.autofit.budget import CandidateTimes, FitJob, timed_in_first_form
from fullstride.autofit.finalists import (
    SHIP,
    FileRecord,
    ShippedFile,
    copy_export,
    device_of,
    estimated,
    export_finalist,
    forms,
    measured,
    read_record,
)
from fullstride.autofit.halving import TRIALS, Outcome, tie
from fullstride.deploy.comparison import ImageScore, Mistake, score_model
from fullstride.deploy.formats import FORMATS, open_file
from fullstride.io.records import Record
from fullstride.measure.budget import Budget
from fullstride.measure.protocols import BUSY
from fullstride.report.page import ClassTable, worst_classes
from fullstride.report.training_progress import shift_lines
from fullstride.study.scores import PairedScores
from fullstride.tasks.task import Calibration, ConfusionMatrix, Metric
from fullstride.train.scoring import SplitScores

MODEL = "model"  # name of the file that ships, without its suffix
MISTAKES = 24  # most listed mistakes
NOISE = 1.05  # allowance for noise in a suggested budget
TEST = "test.json"  # in the folder of the files


@dataclass(frozen=True, kw_only=True)
class SmallerBudget:
    """The file that ships for a smaller budget."""

    budget_ms: float
    best: int  # index in the files of the shipment
    model: str  # the file, relative to the folder of the fit
    test: Mapping[str, Any]  # as in `Shipment`


@dataclass(frozen=True, kw_only=True)
class ScoredImages:
    """What images show of a file: the test images, or without a test the validation images."""

    confusion: ConfusionMatrix | None = None
    calibration: Calibration | None = None
    class_table: ClassTable = ()
    mistakes: tuple[Mistake, ...] = ()  # the most confident ones first
    worst: tuple[ImageScore, ...] = ()  # for tasks without one class for each image
    skipped: Mapping[str, str] = field(default_factory=dict)  # unreadable image -> reason


@dataclass(frozen=True, kw_only=True)
class Shipment(ScoredImages):
    """All files of the finalists, and the test scores of the file that ships."""

    files: tuple[ShippedFile, ...]
    best: int  # index in `files`
    test: Mapping[str, Any]  # scores of the shipped file on the test images; empty without a test
    test_split: str  # "test"; "" if the data have none
    bundle: str  # folder of the exported network, relative to the folder of the fit
    environment: Mapping[str, Any]
    model: str = ""  # the file that ships, relative to the folder of the fit
    metric: str = "top1"  # by which files are compared
    smaller: tuple[SmallerBudget, ...] = ()  # the largest first
    notes: tuple[str, ...] = ()  # lines for the user

    @property
    def file(self) -> ShippedFile:
        """The file that ships."""
        return self.files[self.best]


@dataclass(frozen=True, kw_only=True)
class FinalScores(ScoredImages):
    """The scores of the shipped file on the images of the final scoring."""

    path: str
    split: str
    scores: Mapping[str, float]


TEST_SCORES = Record(FinalScores, "the scores of the file that ships", ("path", "scores"))


def ship(
    job: FitJob, outcome: Outcome, candidate_times: CandidateTimes
) -> Generator[str, None, Shipment]:
    """Export and score the finalists, measure all files in turn, and choose the file that ships.

    It is the file with the highest validation score within the budget by the last measurement,
    and the fastest among ties (see `choose`). Files close to the budget are measured again. If no
    file is within the budget, the fastest ships, and a note says so. Only the file that ships is
    scored on the test images, after the choice. The copy in the folder is called model; with
    several budgets, each has a copy of its best file, such as model-2ms. Forms that were too slow
    before training are not exported, but all of a network that was timed in its first form alone
    (see `times.measured`). For a device that is not here, times are estimates.

    Files, scores and times are stored in the folder at once and read by a later call.

    Raises ValueError, in one line, for a format that cannot be written here and if no file could be
    written, and OSError if the disk is full.
    """
    folder, device = job.folder, job.devices[0]
    records: list[FileRecord] = []
    for name in outcome.finalists:
        own = [each for each in candidate_times.times if each.candidate == name]
        wanted = job.labels if timed_in_first_form(own) else forms(job.settings, job.budget, own)
        records += yield from export_finalist(job, candidate_times.by_name[name], wanted)
    ready = [each for each in records if not each.file.failure]
    if not ready:
        raise ValueError(no_file(records, outcome.finalists))
    if job.profile is None:
        timed, environment = yield from measured(job, ready, candidate_times.times)
    else:
        timed, environment = estimated(ready, candidate_times.times), device_of(job.profile)
    timed = within(timed, job.budget, job.settings.maybe)
    metric = job.metric
    best = timed[choose(timed, metric)].file
    notes = doubts(best, job.budget)
    test = final_scores(job, best, TEST)
    smaller, others = for_smaller_budgets(job, timed, best, test)
    notes += others
    if test.split == "test" and test.confusion:
        by_class = tuple(test.confusion.by_class(job.data.classes))
        scores = SplitScores(test.scores, test.skipped, by_class, test.confusion)
        run = (folder / bundle_of(best.candidate)).parent
        notes += shift_lines(run, job.data, scores, device)
    model = model_name(best, job.budget if smaller else None)
    copy_export(folder / best.path, folder / model, best.format)
    files = [each.file for each in timed] + [each.file for each in records if each.file.failure]
    return Shipment(
        files=tuple(files),
        best=files.index(best),
        test=test.scores if test.split == "test" else {},
        test_split="test" if test.split == "test" else "",
        bundle=bundle_of(best.candidate),
        environment=environment,
        model=model,
        metric=metric.name,
        smaller=tuple(smaller),
        notes=tuple(notes),
        **{each.name: getattr(test, each.name) for each in fields(ScoredImages)},
    )


def for_smaller_budgets(
    job: FitJob, timed: Sequence[FileRecord], best: ShippedFile, test: FinalScores
) -> tuple[list[SmallerBudget], list[str]]:
    """Choose, score and copy a file for each budget but the largest; also notes on doubts.

    `best` is the file of the largest budget, and `test` has its scores.
    """
    chosen, notes = [], list[str]()
    for budget in job.budgets[1:]:
        records = within(timed, budget, job.settings.maybe)
        number = choose(records, job.metric)
        file, scores = timed[number].file, test
        notes += doubts(records[number].file, budget)
        if file is not best:
            scores = final_scores(job, file, f"test-{budget.ms_per_image:g}ms.json")
        ships = SmallerBudget(
            budget_ms=budget.ms_per_image,
            best=number,
            model=model_name(file, budget),
            test=scores.scores if scores.split == "test" else {},
        )
        chosen.append(ships)
        copy_export(job.folder / file.path, job.folder / ships.model, file.format)
    return chosen, notes


def model_name(file: ShippedFile, budget: Budget | None = None) -> str:
    """The name of the copy of a file that ships, with its `budget` if there are several."""
    limit = f"-{budget.ms_per_image:g}ms" if budget else ""
    return f"{MODEL}{limit}{FORMATS[file.format].suffix}"


def within(records: Sequence[FileRecord], budget: Budget, maybe: bool) -> list[FileRecord]:
    """The records with `within` set by the budget; `maybe` is a setting of the fit."""

    def marked(file: ShippedFile) -> ShippedFile:
        ms = file.ms if maybe else file.upper_ms
        return replace(file, within=ms is not None and ms <= budget.ms_per_image)

    return [replace(each, file=marked(each.file)) for each in records]


def pick(
    folder: Path, shipment: Shipment, metric: Metric, budget_ms: float, maybe: bool = False
) -> tuple[str, str]:
    """Copy the best file within a time to the folder of a finished fit, without training.

    `maybe` is a setting of the fit. Returns the name of the copy, and a line with its validation
    score, as test images must not choose. Raises ValueError, in one line, if no file is within the
    time.
    """
    budget = Budget(ms_per_image=budget_ms)
    stored = [
        (file, read_record(folder, file.candidate, file.format, file.precision))
        for file in shipment.files
        if not file.failure
    ]
    records = [replace(record, file=file) for file, record in stored if record]
    records = within(records, budget, maybe)
    file = records[choose(records, metric)].file
    if not file.within:
        raise ValueError(
            f"no file of {folder} is within {budget_ms:g} ms: the fastest, {file.path}, takes "
            f"{file.upper_ms or math.inf:.3g} ms an image"
        )
    name = model_name(file, budget)
    copy_export(folder / file.path, folder / name, file.format)
    score = metric.text(file.val[metric.name])
    return name, f"{file.title}: validation {score}, {file.ms:.3g} ms an image"


def bundle_of(candidate: str) -> str:
    return f"{TRIALS}/{candidate}/bundle"


def no_file(records: Sequence[FileRecord], finalists: Sequence[str]) -> str:
    """Why nothing ships, in one line."""
    names = ", ".join(finalists)
    if not records:
        return (
            f"no format and precision is left for {names}: allow more of them, or a larger budget"
        )
    first = records[0].file
    return (
        f"none of the files of {names} could be written; the first, {first.format} "
        f"{first.precision}: {first.failure}"
    )


def choose(records: Sequence[FileRecord], metric: Metric) -> int:
    """The index of the file that ships: the best validation score within the budget.

    Ties, by the rule of `halving.run_halving`, go to the fastest file. If no file is within the
    budget, the fastest ships.
    """
    within = [number for number, each in enumerate(records) if each.file.within]

    def ms(number: int) -> float:
        time = records[number].file.ms
        return float("inf") if time is None else time

    def rank(number: int) -> tuple[float, float]:
        return metric.quality(records[number].file.val)

    def speed(number: int) -> tuple[float, ...]:
        return -ms(number), *rank(number)

    def scores(number: int) -> PairedScores:
        record = records[number]
        return PairedScores(record.file.val, record.correct, record.resampled)

    if not within:
        return max(range(len(records)), key=speed)
    best = max(within, key=lambda number: (rank(number), -ms(number)))
    tied = [each for each in within if tie(scores(best), scores(each), metric) is not None]
    return max({best, *tied}, key=speed)


def doubts(file: ShippedFile, budget: Budget) -> list[str]:
    """Warnings about the file that ships."""
    if file.ms is None or (time := file.upper_ms) is None:
        return [f"there is no estimate of the time of {file.path}: measure it on the device"]
    notes = []
    if file.float_layers:
        notes.append(f"{file.path} has layers in float: {', '.join(file.float_layers)}")
    if not file.within:
        by = "measured" if file.measured else "estimated"
        notes.append(
            f"no file is within {budget}: the fastest, {file.path}, {by}, takes up to {time:.3g} "
            f"ms an image; it ships, and --budget-ms {NOISE * time:.3g} would do"
        )
    if file.measured and file.low is not None and file.high is not None:
        spread = (file.high - file.low) / file.ms
        if spread > BUSY:
            notes.append(
                f"the rounds of {file.path} spread by {spread:.0%} of its time, so the machine was "
                "busy: measure the file again by `fullstride bench`"
            )
    return notes


def final_scores(job: FitJob, file: ShippedFile, name: str) -> FinalScores:
    """The scores of the file that ships on the test images, or without any on validation images.

    They are stored at once under `name`, as the test images are read only once.
    """
    path = job.folder / SHIP / name
    stored = TEST_SCORES.find(path)
    if stored and stored.path == file.path:
        return stored
    split = job.data.score_split
    model = open_file(job.folder / file.path, trust=True)
    result = score_model(model, getattr(job.data, split), mistakes=MISTAKES)
    scores = FinalScores(
        path=file.path,
        split=split,
        scores=result.evaluation.scores,
        skipped=result.evaluation.skipped,
        confusion=result.evaluation.score.confusion(),
        calibration=result.evaluation.score.calibration(),
        class_table=worst_classes(result.evaluation.score.by_class(job.data.classes)),
        mistakes=result.mistakes,
        worst=result.worst,
    )
    return TEST_SCORES.save(path, scores)
