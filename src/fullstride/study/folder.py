"""What is in the folder of a study? Its arguments, and the result of each stage that has ended."""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from fullstride.data.dataset import DataSet
from fullstride.data.readers.splits import SplitRule
from fullstride.io.records import from_json, read_json
from fullstride.io.writing import Output, atomic_write, check_output, json_output
from fullstride.study.locks import STUDY, lock_study
from fullstride.train.recipes.choice import RecipeChoice

BY_CASE = RecipeChoice()  # the default of the data and the weights
SECONDS = "seconds.json"
STAGE_OUTPUT = json_output("the result of a stage of a study", "stage", "result")
SECONDS_OUTPUT = json_output("the seconds of the stages of a study", "seconds")


@dataclass(frozen=True)
class Event:
    """A line on the progress of a stage, or its result when it has ended."""

    stage: str
    line: str = ""
    result: Any = None


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What the folder of a study is for. The data may have moved."""

    data: str
    fingerprint: str  # of the images and their labels
    classes: tuple[str, ...]
    rule: SplitRule  # by which the splits were taken
    settings: Any  # a frozen dataclass, of which each study has its own
    recipe: str = ""  # a name or a path; "" for the default of the case
    changes: Mapping[str, Any] = field(default_factory=dict)  # fields of the recipe

    def to_dict(self) -> dict[str, Any]:
        """As in JSON."""
        return plain(self)


@dataclass(frozen=True, kw_only=True)
class StudyKind:
    """How the folders of one kind of study are recognised, and what other arguments change."""

    noun: str
    config: type[StudyConfig]
    trained: tuple[str, ...]  # folders of a study that has begun to train
    # The patterns of results that an argument changes, and those that all others change.
    changed_by: Mapping[str, tuple[str, ...]]
    changed: tuple[str, ...]

    @property
    def file(self) -> str:
        return f"{self.noun}_config.json"

    @property
    def output(self) -> Output:
        return json_output(f"the settings of a {self.noun}", "settings", "fingerprint")


def config_of(
    kind: StudyKind, data: DataSet, settings: Any, recipe: RecipeChoice
) -> dict[str, Any]:
    """The fields of a configuration, for `kind.config`."""
    return dict(
        data=data.where,
        fingerprint=data.fingerprint,
        classes=data.classes,
        rule=data.rule,
        settings=settings,
        recipe=str(recipe.source),
        changes=plain(recipe.changes),
    )


def check_images(data: DataSet) -> None:
    """Raises ValueError, in one line, for data on which networks cannot be compared."""
    if len(data.classes) < 2:
        raise ValueError(f"{data.name} has one class: to tell apart, give images of two or more")
    if not len(data.val):
        raise ValueError(
            f"{data.name} has no validation images, which compare networks: leave --val 0 out"
        )


@contextmanager
def open_study(
    kind: StudyKind, folder: Path, data: DataSet, settings: Any, recipe: RecipeChoice
) -> Iterator[tuple[Any, str]]:
    """`create_or_resume` for one process at a time, until the body ends.

    Raises ValueError, in one line, for a folder of something else, and as `LockedError` where
    another process works in the folder.
    """
    check_folder(kind, folder)  # before anything is written there
    with lock_study(folder):
        yield create_or_resume(kind, folder, data, settings, recipe)


def check_folder(kind: StudyKind, folder: Path) -> None:
    """Raises ValueError, in one line, for a folder of something else than such a study."""
    path = folder / kind.file
    check_output(path, kind.output)
    if path.exists() or not folder.is_dir():
        return
    names = sorted(each.name for each in folder.iterdir() if not each.name.startswith(STUDY))
    if names:
        raise ValueError(
            f"{folder} exists and is no {kind.noun}, but has {names[0]}: give another --out"
        )


def create_or_resume(
    kind: StudyKind, folder: Path, data: DataSet, settings: Any, recipe: RecipeChoice = BY_CASE
) -> tuple[Any, str]:
    """Create the folder of a study, or check that it has a study of the same arguments.

    Until something trains, other arguments are allowed, so that a user can answer an error or a
    plan: the results that they change are deleted. Returns the `kind.config`, and a line on that.

    Raises ValueError, in one line, for other arguments later.
    """
    config = kind.config(**config_of(kind, data, settings, recipe))
    path, note = folder / kind.file, ""
    if path.exists():
        saved = from_json(kind.config, read_json(path), str(path))
        changes = differences(saved, config)
        if not changes:
            return saved, ""
        words = "; ".join(changes.values())
        if any((folder / name).exists() for name in kind.trained):
            raise ValueError(
                f"{folder} has another {kind.noun}: {words}. Give another --out, or the same "
                "arguments"
            )
        note = f"{words}: nothing was trained yet, so the stages that this changes run again"
        for pattern in {each for name in changes for each in patterns(kind, name)}:
            for path_of_result in folder.glob(pattern):
                path_of_result.unlink()
    write_config(path, kind, config)
    return config, note


def patterns(kind: StudyKind, argument: str) -> tuple[str, ...]:
    return kind.changed_by.get(argument, kind.changed)


def write_config(path: Path, kind: StudyKind, config: StudyConfig) -> None:
    with atomic_write(path, kind.output) as temporary:
        temporary.write_text(json.dumps(plain(config), indent=1))


def differences(saved: StudyConfig, config: StudyConfig) -> dict[str, str]:
    """The arguments that are not the same in two configurations, each with a line on it."""
    if saved.fingerprint != config.fingerprint:
        return {"data": "its images or labels are others"}
    before, now = (
        {
            **plain(each.settings),
            "recipe": each.recipe,
            **{f"recipe.{name}": value for name, value in each.changes.items()},
        }
        for each in (saved, config)
    )
    return {
        name: f"{name} is {before.get(name)!r} there and {now.get(name)!r} now"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    }


def plain(value: Any) -> Any:
    """Dataclasses, and tuples of them, as JSON has them."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    return json.loads(json.dumps(value, default=asdict))


def saved_stage(folder: Path, name: str, kind: Any) -> Any:
    """The result of a stage that has ended; None before."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    content = read_json(path)
    if not isinstance(content, Mapping) or "result" not in content:
        raise ValueError(f"{path} has no result: delete it, and the stage runs again")
    return from_json(kind, content["result"], f"{path}: result")


def run_stage(
    folder: Path, name: str, kind: Any, work: Generator[str, None, Any]
) -> Generator[str, None, Any]:
    """The result of a stage, which is computed by `work` unless it is in the folder.

    Yields the lines of `work`, a generator that has not begun. `kind` is the type of the result.
    """
    result = saved_stage(folder, name, kind)
    if result is not None:
        return result
    began = perf_counter()
    try:
        result = yield from work
    finally:
        add_seconds(folder, name, perf_counter() - began)
    write_stage(folder, name, result)
    return from_json(kind, plain(result), name)  # as a study that is resumed reads it


def write_stage(folder: Path, name: str, result: Any) -> None:
    with atomic_write(folder / f"{name}.json", STAGE_OUTPUT) as temporary:
        temporary.write_text(json.dumps({"stage": name, "result": plain(result)}, indent=1))


def stage_events(stage: str, work: Generator[str, None, Any]) -> Generator[Event, None, Any]:
    """An event for each line of `work`, and one for its result, which is returned."""
    while True:
        try:
            yield Event(stage, next(work))
        except StopIteration as stop:
            yield Event(stage, result=stop.value)
            return stop.value


def add_seconds(folder: Path, name: str, seconds: float) -> None:
    """Add to the time that a stage took, over all calls."""
    total = read_seconds(folder)
    total[name] = total.get(name, 0.0) + seconds
    with atomic_write(folder / SECONDS, SECONDS_OUTPUT) as temporary:
        temporary.write_text(json.dumps({"seconds": total}, indent=1))


def read_seconds(folder: Path) -> dict[str, float]:
    """The seconds of each stage so far."""
    path = folder / SECONDS
    if not path.exists():
        return {}
    return from_json(dict[str, dict[str, float]], read_json(path), str(path))["seconds"]
