"""Chooses the file that ships among the finalists' files, and scores it on the test images."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fullstride.autofit import finalists
from fullstride.autofit.budget import CandidateTimes, FitJob, timed_in_first_form
from fullstride.autofit.finalists import SHIP, FileRecord, ShippedFile
from fullstride.autofit.halving import TIE_POINTS, TRIALS, Outcome, tie
from fullstride.deploy.comparison import ImageScore, Mistake, score_model
from fullstride.deploy.formats import FORMATS, open_file
from fullstride.io.records import Record
from fullstride.measure.budget import Budget
from fullstride.measure.protocols import BUSY
from fullstride.report.page import ClassTable, worst_classes
from fullstride.report.training_progress import shift_lines
from fullstride.study.scores import PairedScores, expected
from fullstride.study.trials import Work
from fullstride.tasks.task import Calibration, ConfusionMatrix, Metric
from fullstride.train.scoring import SplitScores

MODEL = "model"  # name of the file that ships, without its suffix
MISTAKES = 24  # most listed mistakes
SUGGESTED = 1.05  # allowance for noise in a suggested budget
TEST = "test.json"  # in the folder of the files


@dataclass(frozen=True, kw_only=True)
class BudgetFile:
    """The file that ships for one of several budgets."""

    budget_ms: float
    best: int  # index in the files of the shipment
    model: str  # the file, relative to the folder of the fit
    test: Mapping[str, Any]  # as in `Shipment`


@dataclass(frozen=True, kw_only=True)
class ScoredImages:
    """What images show of a file: the test images, or without a test the validation images."""

    split: str = "val"  # of the images: test or val
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
    bundle: str  # folder of the exported network, relative to the folder of the fit
    environment: Mapping[str, Any]
    model: str = ""  # the file that ships, relative to the folder of the fit
    metric: str = "top1"  # by which files are compared
    smaller: tuple[BudgetFile, ...] = ()  # the largest first
    notes: tuple[str, ...] = ()  # lines for the user

    @property
    def paths(self) -> tuple[str, ...]:
        """All files in the folder of the fit, relative to it."""
        copies = (self.model, *(each.model for each in self.smaller))
        return *copies, *(each.path for each in self.files if not each.failure)

    @property
    def tests(self) -> dict[int, Mapping[str, Any]]:
        """Index of each file that ships for any budget -> its scores on the test images."""
        return {**{each.best: each.test for each in self.smaller}, self.best: self.test}

    @property
    def file(self) -> ShippedFile:
        """The file that ships, for the largest budget."""
        return self.files[self.best]


@dataclass(frozen=True, kw_only=True)
class FinalScores(ScoredImages):
    """The scores of the shipped file on the images of the final scoring."""

    path: str
    scores: Mapping[str, float]


TEST_SCORES = Record(FinalScores, "the scores of the file that ships", ("path", "scores"))


def ship(job: FitJob, outcome: Outcome, candidate_times: CandidateTimes) -> Work[Shipment]:
    """Export and score the finalists, measure all files in turn, and choose the file that ships.

    It is the best file within the budget by the last measurement, by its validation score and its
    time, and the fastest among ties (see `choose`). Files close to the budget are measured again.
    If no file is within the budget, the fastest ships, and a note says so. Only the file that ships
    is scored on the test images, after the choice. The copy in the folder is called model; with
    several budgets, each has a copy of its best file, such as model-2ms. Forms that were too slow
    before training are not exported, but all of a network that was timed in its first form alone
    (see `times.measured`). For a device that is not here, times are estimates.

    Files, scores and times are stored in the folder at once and read by a later call.

    Raises ValueError, in one line, for a format that cannot be written here and if no file could be
    written, and OSError if the disk is full.
    """
    timed, failed, environment = yield from timed_files(job, outcome, candidate_times)
    timed = within(timed, job.budget, job.settings.maybe)
    ships, notes, test = list[BudgetFile](), list[str](), None
    for budget in job.budgets:
        records = within(timed, budget, job.settings.maybe)
        best = choose(records, job.metric)
        file = records[best].file
        notes += doubts(file, budget) + better_by_validation(records, file, job.metric)
        name = TEST if test is None else f"test-{budget.ms_per_image:g}ms.json"
        scores = test if test and test.path == file.path else final_scores(job, file, name)
        test = test or scores
        own = BudgetFile(
            budget_ms=budget.ms_per_image,
            best=best,
            model=model_name(file, budget if len(job.budgets) > 1 else None),
            test=scores.scores if scores.split == "test" else {},
        )
        finalists.copy_export(job.folder / file.path, job.folder / own.model, file.format)
        ships.append(own)
    assert test is not None
    largest, *smaller = ships
    bundle = f"{TRIALS}/{timed[largest.best].file.candidate}/bundle"
    if test.split == "test" and test.confusion:
        by_class = tuple(test.confusion.by_class(job.data.classes))
        scores = SplitScores(test.scores, test.skipped, by_class, test.confusion)
        notes += shift_lines((job.folder / bundle).parent, job.data, scores, job.devices[0])
    return Shipment(
        files=tuple(each.file for each in (*timed, *failed)),
        best=largest.best,
        test=largest.test,
        bundle=bundle,
        environment=environment,
        model=largest.model,
        metric=job.metric.name,
        smaller=tuple(smaller),
        notes=tuple(dict.fromkeys(notes)),
        **{each.name: getattr(test, each.name) for each in fields(ScoredImages)},
    )


def timed_files(
    job: FitJob, outcome: Outcome, candidate_times: CandidateTimes
) -> Work[tuple[list[FileRecord], list[FileRecord], Mapping[str, Any]]]:
    """Export the finalists; return the files with times, files that failed, and the environment."""
    records: list[FileRecord] = []
    for name in outcome.finalists:
        own = [each for each in candidate_times.times if each.candidate == name]
        is_first = timed_in_first_form(own)
        wanted = job.labels if is_first else finalists.forms(job.settings, job.budget, own)
        records += yield from finalists.export_finalist(job, candidate_times.by_name[name], wanted)
    names = ", ".join(outcome.finalists)
    if not records:
        raise ValueError(
            f"no format and precision is left for {names}: allow more of them, or a larger budget"
        )
    ready = [each for each in records if not each.file.failure]
    if not ready:
        first = records[0].file
        raise ValueError(
            f"none of the files of {names} could be written; the first, {first.format} "
            f"{first.precision}: {first.failure}"
        )
    if job.profile is None:
        timed, environment = yield from finalists.measured(job, ready, candidate_times.times)
    else:
        timed = finalists.estimated(ready, candidate_times.times)
        environment = finalists.device_of(job.profile)
    return timed, [each for each in records if each.file.failure], environment


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
    records = []
    for file in (each for each in shipment.files if not each.failure):
        if record := finalists.read_record(folder, file.candidate, file.format, file.precision):
            records.append(replace(record, file=file))
    if not records:
        raise ValueError(f"{folder / SHIP} has no exported file any more: run the fit again")
    records = within(records, budget, maybe)
    file = records[choose(records, metric)].file
    if not file.within:
        raise ValueError(
            f"no file of {folder} is within {budget_ms:g} ms: the fastest, {file.path}, takes "
            f"{file.upper_ms or math.inf:.3g} ms an image"
        )
    name = model_name(file, budget)
    finalists.copy_export(folder / file.path, folder / name, file.format)
    score = metric.text(file.val[metric.name])
    return name, f"{file.title}: validation {score}, {file.ms:.3g} ms an image"


def choose(records: Sequence[FileRecord], metric: Metric) -> int:
    """The index of the file that ships, within the budget.

    Each network takes part with its best file by the validation score, or the fastest tied one, see
    `halving.tie`. The file ships from which most is expected, see `study.scores.expected`. If no
    file is within the budget, the fastest ships.
    """
    files = [each.file for each in records]
    scores = [PairedScores(each.file.val, each.correct, each.resampled) for each in records]
    times = [math.inf if file.ms is None else file.ms for file in files]

    def quality(number: int) -> tuple[float, ...]:
        return *metric.quality(files[number].val), -times[number]

    def speed(number: int) -> tuple[float, ...]:
        return -times[number], *quality(number)

    networks = dict[str, list[int]]()
    for number, file in enumerate(files):
        if file.within:
            networks.setdefault(file.candidate, []).append(number)
    if not networks:
        return max(range(len(files)), key=speed)
    own = list[int]()
    for numbers in networks.values():
        best = scores[max(numbers, key=quality)]
        tied = [each for each in numbers if tie(best, scores[each], metric) is not None]
        own.append(max(tied, key=speed))
    values = expected([scores[each] for each in own], [times[each] for each in own], metric)
    return max(zip(values, own, strict=True), key=lambda one: (one[0], *speed(one[1])))[1]


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
            f"ms an image; it ships, and --budget-ms {SUGGESTED * time:.3g} would do"
        )
    if file.measured and file.low is not None and file.high is not None:
        spread = (file.high - file.low) / file.ms
        if spread > BUSY:
            notes.append(
                f"the rounds of {file.path} spread by {spread:.0%} of its time, so the machine was "
                "busy: measure the file again by `fullstride bench`"
            )
    return notes


def better_by_validation(
    records: Sequence[FileRecord], ships: ShippedFile, metric: Metric
) -> list[str]:
    """A line on the file with the best validation score, if `ships` has a clearly lower one."""
    name = metric.name
    inside = [each.file for each in records if each.file.within]
    best = max([ships, *inside], key=lambda file: metric.rank(file.val[name]))
    if metric.rank(best.val[name]) <= metric.rank(ships.val[name]) + TIE_POINTS:
        return []
    return [
        f"{best.path} has {metric.text(best.val[name])} on the validation images, {ships.path} "
        f"{metric.text(ships.val[name])}; so few images can be wrong by as much, and the second is "
        "expected to be as good by its time"
    ]


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
