"""Runs the stages of a study under one lock; their results are files in one folder."""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.table import Table

from fullstride.data.dataset import DataSet, open_data
from fullstride.data.readers.splits import SplitRule
from fullstride.data.targets import check_purpose
from fullstride.io.locks import hold
from fullstride.io.records import Record, deletable, differences, from_json, to_json
from fullstride.io.writing import MAX_JSON_BYTES, check_output, looks_like_path, read_regular
from fullstride.study.executors import find_executor
from fullstride.study.settings import StudyOptions
from fullstride.study.trials import (
    CORES_PER_TRIAL,
    Executor,
    LocalExecutor,
    Trial,
    TrialKind,
    Work,
    local_devices,
    run_trials,
)
from fullstride.tasks import find_task
from fullstride.tasks.task import Task
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.recipe import Recipe

BY_CASE = RecipeChoice()  # the default of the data and the weights
DEFAULTS = StudyOptions()
LOCK = ".study.lock"
SECONDS = "seconds.json"
PLAN = "plan"  # the last stage of a dry run

Results = Mapping[str, Any]  # results of finished stages, by name
Parts = Iterable[str | Table]


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyJob:
    """The arguments and devices of a study, which are passed to every stage."""

    folder: Path
    data: DataSet
    settings: Any  # a frozen dataclass, see `Study.settings`
    recipe: RecipeChoice = BY_CASE
    options: StudyOptions = DEFAULTS
    devices: Sequence[str] = ("cpu",)  # of this machine; the first device measures
    executor: Executor | None = None  # where trials run; None: on `devices`

    @cached_property
    def unseen(self) -> DataSet:
        """The data without the test images, which must not influence any choice."""
        return replace(self.data, test=self.data.test.subset([]))

    @cached_property
    def task(self) -> Task:
        return find_task()

    def check(self) -> None:
        """Raise ValueError, in one line, for arguments that no stage can work with."""
        self.data.check_apart(self.folder)
        if self.task.single_label:
            self.data.check_one_class()
            if len(self.data.classes) < 2:
                raise ValueError(
                    f"{self.data.name} has one class: to tell apart, give images of two or more"
                )
        if not len(self.data.val):
            raise ValueError(
                f"{self.data.name} has no validation images, which compare networks: leave --val 0 "
                "out"
            )

    def run(self, kind: TrialKind, trials: Sequence[Trial]) -> Work[tuple[Any, ...]]:
        """The results of the trials, in order; a trial with a result does not run again."""
        return run_trials(kind, trials, self.executor or LocalExecutor(self.devices))


@dataclass(frozen=True)
class Stage:
    name: str
    work: Callable[[Any, Results], Work]  # gets the job and the results of earlier stages
    kind: Any = None  # type of the stored result; None: each call computes the result
    render: Callable[[Any], Parts] = lambda result: ()
    when: Callable[[Any, Results], bool] = lambda job, results: True


@dataclass(frozen=True, kw_only=True)
class Study:
    """A kind of study: the stages, and the files by which its folders are recognised."""

    noun: str
    job: type[StudyJob]
    settings: type[Any]
    stages: tuple[Stage, ...]
    closing: Callable[[Any, Path], Parts]  # renders the last result and the folder
    trained: tuple[str, ...]  # folders that exist once a study has begun to train
    # Argument -> patterns of the results that it changes; all other arguments change `changed`.
    changed_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()  # settings that may not change in a folder; all by default
    cores_per_trial: int | None = CORES_PER_TRIAL  # see `local_devices`

    @property
    def file(self) -> str:
        return f"{self.noun}_config.json"

    @property
    def record(self) -> "Record[StudyConfig]":
        noun = f"the settings of a {self.noun}"
        return Record(StudyConfig, noun, ("settings", "fingerprint"))


@dataclass(frozen=True)
class Event:
    """A line on the progress of a stage, or the result of the stage at its end."""

    stage: str
    line: str = ""  # of text; "" with a result
    result: Any = None  # None before the end
    # converts the result to lines and tables
    render: Callable[[Any], Parts] = field(default=lambda result: (), repr=False)
    done: float = 0.0  # the share of finished stages

    @property
    def parts(self) -> Parts:
        """The lines and tables that a command prints."""
        return [self.line] if self.line else [*self.render(self.result)]


def run_study(
    study: Study,
    data: DataSet,
    folder: Path,
    settings: Any,
    recipe: RecipeChoice = BY_CASE,
    options: StudyOptions = DEFAULTS,
) -> Iterator[Event]:
    """Run the stages that have no result yet; yields their lines and all results.

    After a stop, the same call resumes. Raises ValueError, in one line, for arguments that do not
    fit, for a folder of something else, and as `LockedError` if another process works in it.
    """
    devices = local_devices(options.device, study.cores_per_trial)
    job = study.job(
        folder=folder, data=data, settings=settings, recipe=recipe, options=options, devices=devices
    )
    job.check()
    if not options.dry_run:
        job = replace(job, executor=find_executor(options, folder, devices))
    check_folder(study, folder)  # before anything is written there
    with hold(folder / LOCK):
        if note := create_or_resume(study, job):
            yield Event(study.stages[0].name, note)
        results: dict[str, Any] = {}
        last = replace(study.stages[-1], render=lambda result: study.closing(result, folder))
        for number, stage in enumerate((*study.stages[:-1], last)):
            if stage.when(job, results):
                done = number / len(study.stages), (number + 1) / len(study.stages)
                results[stage.name] = yield from stage_events(stage, job, results, done)
            if options.dry_run and stage.name == PLAN:
                return


def stage_events(
    stage: Stage, job: StudyJob, results: Results, done: tuple[float, float]
) -> Generator[Event, None, Any]:
    """Yield an event for each line of a stage and for its result; return the result.

    `done` has the finished shares of the study before and after the stage.
    """
    work = stage.work(job, results)
    if stage.kind is not None:
        work = run_stage(job.folder, stage.name, stage.kind, work)
    while True:
        try:
            yield Event(stage.name, next(work), done=done[0])
        except StopIteration as stop:
            yield Event(stage.name, result=stop.value, render=stage.render, done=done[1])
            return stop.value


def start_study(
    study: Study, data: str | Path | DataSet, out: str | Path, recipe: str, arguments: Any
) -> Iterator[Event]:
    """`run_study` with `arguments`: fields of the settings, of `StudyOptions`, and of the recipe.

    Raises ValueError, in one line, for others, besides the errors of `run_study`.
    """
    kinds, rest = (study.settings, StudyOptions, Recipe), dict(arguments)
    own, how, changes = (
        {each.name: rest.pop(each.name) for each in fields(kind) if each.name in rest}
        for kind in kinds
    )
    for name in rest:
        close = get_close_matches(name, [each.name for kind in kinds for each in fields(kind)], n=1)
        listed = ", ".join(kind.__name__ for kind in kinds)
        hint = f"did you mean {close[0]}?" if close else f"give fields of {listed}"
        raise ValueError(f"a {study.noun} has no argument {name!r}: {hint}")
    if not isinstance(data, DataSet):
        check_purpose(str(data))
    images = data if isinstance(data, DataSet) else open_data(str(data))
    settings, options = study.settings(**own), StudyOptions(**how)
    return run_study(study, images, Path(out), settings, RecipeChoice(recipe, changes), options)


# The folder of a study: the arguments, and the results of finished stages.


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """The arguments of the study in a folder. The data may have moved."""

    data: str
    fingerprint: str  # of images and labels
    classes: tuple[str, ...]
    rule: SplitRule  # defines the splits
    settings: Mapping[str, Any]
    recipe: str = ""  # a name or a path; "" for the default of the case
    changes: Mapping[str, Any] = field(default_factory=dict)  # fields of the recipe
    contents: Mapping[str, str] = field(default_factory=dict)  # argument -> digests of its files

    @property
    def arguments(self) -> dict[str, Any]:
        changes = {f"recipe.{name}": value for name, value in self.changes.items()}
        return {**self.settings, "recipe": self.recipe, **changes}

    def changes_since(self, saved: "StudyConfig") -> dict[str, str]:
        """Argument -> a line, for other arguments, and for files that were edited."""
        edited = {
            name: f"the file of {name} has another content"
            for name, digests in self.contents.items()
            if saved.contents.get(name, digests) != digests
        }
        return edited | differences(saved.arguments, self.arguments)


def contents_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the specs, recipes and profiles that each argument names by path."""
    contents = dict[str, str]()
    for name, value in arguments.items():
        for word in value if isinstance(value, list) else [value]:
            is_path = isinstance(word, str) and looks_like_path(word)
            if is_path or (name == "recipe" and word not in ("", *RECIPES)):
                contents[name] = contents.get(name, "") + digest_of(Path(word))
    return contents


def digest_of(path: Path) -> str:
    """A digest of a JSON file, or of the run or bundle in a folder; "" for anything else."""
    for file in (path, path / "run.json", path / "bundle.json"):
        with suppress(OSError, ValueError):
            return hashlib.sha256(read_regular(file, MAX_JSON_BYTES)).hexdigest()[:16]
    return ""


def check_folder(study: Study, folder: Path) -> None:
    """Raise ValueError, in one line, for a folder of anything but such a study."""
    path = folder / study.file
    check_output(path, study.record.output)
    if path.exists() or not folder.is_dir():
        return
    names = sorted(each.name for each in folder.iterdir() if not each.name.startswith(LOCK))
    if names:
        raise ValueError(
            f"{folder} exists and is no {study.noun}, but has {names[0]}: give another --out"
        )


def create_or_resume(study: Study, job: StudyJob) -> str:
    """Create the folder of a study, or check that it has a study with the same arguments.

    Until something trains, arguments may change, so that a user can react to an error or a plan:
    results that depend on the changes are deleted, which the returned line says.

    Raises ValueError, in one line, for changed arguments later.
    """
    data, path, note = job.data, job.folder / study.file, ""
    settings = asdict(job.settings)
    config = StudyConfig(
        data=data.where,
        fingerprint=data.fingerprint,
        classes=data.classes,
        rule=data.rule,
        settings={name: settings[name] for name in study.identity or settings},
        recipe=str(job.recipe.source),
        changes=job.recipe.changes,
    )
    config = from_json(StudyConfig, to_json(config), str(path))  # tuples are lists in a file
    config = replace(config, contents=contents_of(config.arguments))
    if path.exists():
        saved = study.record.load(path)
        changes = config.changes_since(saved)
        if saved.fingerprint != config.fingerprint:
            changes = {"data": "its images or labels are others"}
        if not changes:
            return ""
        words = "; ".join(changes.values())
        if any((job.folder / name).exists() for name in study.trained):
            raise ValueError(
                f"{job.folder} has another {study.noun}: {words}. Give another --out, or the same "
                "arguments"
            )
        note = f"{words}: nothing was trained yet, so the stages that this changes run again"
        names = {p for name in changes for p in study.changed_by.get(name, study.changed)}
        discard(job.folder, names)
    study.record.save(path, config)
    return note


@dataclass(frozen=True)
class StageResult:
    stage: str
    result: Any


@dataclass(frozen=True)
class Seconds:
    """The file of the seconds of all stages, over all calls."""

    seconds: dict[str, float]


STAGE_RECORD = Record(StageResult, "the result of a stage of a study", ("stage", "result"))
SECONDS_RECORD = Record(Seconds, "the seconds of the stages of a study", ("seconds",))


def saved_stage(folder: Path, name: str, kind: Any) -> Any:
    """The result of a finished stage; None before."""
    path = folder / f"{name}.json"
    saved = STAGE_RECORD.find(path)
    with deletable():
        return saved and from_json(kind, saved.result, f"{path}: result")


def run_stage(folder: Path, name: str, kind: Any, work: Work) -> Work:
    """The result of a stage, from the folder or by `work`, whose lines are yielded.

    `work` is a generator that has not begun, and `kind` the type of the result.
    """
    result = saved_stage(folder, name, kind)
    if result is not None:
        return result
    began = perf_counter()
    try:
        result = yield from work
    finally:
        seconds = read_seconds(folder)
        seconds[name] = seconds.get(name, 0.0) + perf_counter() - began
        SECONDS_RECORD.save(folder / SECONDS, Seconds(seconds))
    write_stage(folder, name, result)
    return saved_stage(folder, name, kind)  # as a resumed study reads it


def write_stage(folder: Path, name: str, result: Any) -> None:
    STAGE_RECORD.save(folder / f"{name}.json", StageResult(name, result))


def discard(folder: Path, patterns: Iterable[str]) -> None:
    """Delete results by the patterns of their paths, and the seconds of their stages."""
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        path.unlink()
    seconds = read_seconds(folder)
    remaining = {
        name: value for name, value in seconds.items() if f"{name}.json" not in {*patterns}
    }
    if remaining != seconds:
        SECONDS_RECORD.save(folder / SECONDS, Seconds(remaining))


def read_seconds(folder: Path) -> dict[str, float]:
    saved = SECONDS_RECORD.find(folder / SECONDS)
    return saved.seconds if saved else {}
