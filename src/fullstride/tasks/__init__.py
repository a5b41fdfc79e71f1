"""The tasks by the names that runs and bundles record, and networks with their heads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, cast

from torch import nn

from fullstride import tables
from fullstride.nets import zoo
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import BY_DEFAULT, LoadOptions
from fullstride.nets.spec import NetSpec
from fullstride.tasks.task import Metric, Task

TASKS: dict[str, type[Task]] = {
    name: resolve_name(f"fullstride.tasks.{place}") for name, place in tables.TASKS.items()
}


class TrainedModel(Protocol):
    """The fields of bundles, exported files and metadata that describe the task."""

    @property
    def task(self) -> str: ...

    @property
    def temperature(self) -> float: ...

    @property
    def task_state(self) -> Mapping[str, Any]: ...

    @property
    def classes(self) -> Sequence[str]: ...


def find_task(name: str = "classify") -> Task:
    """The task `name` with its default options. Raises ValueError if it is not in `TASKS`."""
    tables.check_name("task", name, TASKS)
    return TASKS[name]()


def task_of(model: TrainedModel) -> Task:
    """The task of a bundle or an exported file, for its classes and with its fitted state.

    Raises ValueError for a path, and if the state does not fit the task.
    """
    if isinstance(model, (str, Path)):
        raise ValueError(
            f"{str(model)!r} is a path: open a run or a bundle by tasks.load, and an exported file "
            "by open_file"
        )
    state = {"temperature": model.temperature} if model.temperature != 1 else {}
    task = find_task(model.task).for_classes(model.classes)
    return task.with_state({**state, **model.task_state})


def common_metric(models: Iterable[Any]) -> Metric:
    """The metric by which training chose all bundles among `models`, which have one task.

    The task's own metric if the bundles differ, or if all are exported files.
    """
    models = list(models)
    recipes = [each.recipe for each in models if isinstance(each, Bundle) and each.recipe]
    names = {str(recipe.get("score", "")) for recipe in recipes}
    return find_task(models[0].task).find_metric(names.pop() if len(names) == 1 else "")


def load(what: str | Path, name: str | None = None, options: LoadOptions = BY_DEFAULT) -> Bundle:
    """`zoo.load` that also builds the head of a network's task."""
    return zoo.load(what, name, build_head, options)


def find_network(
    name: str, task: str = "", classes: int | None = None, frames: int | None = None
) -> zoo.NamedNetwork:
    """The network of a name, with the head of `task`, or the trained network at a path.

    By default the task is classification, and a named network keeps its number of classes and of
    frames. Raises ValueError, in one line, also for any of the three beside a path.
    """
    if zoo.names_weights(name):
        options = {"task": task, "classes": classes, "frames": frames}
        if what := next((f"{key} {value}" for key, value in options.items() if value), ""):
            raise ValueError(f"--{what} is for names of networks, {name} has its own: leave it out")
        bundle = load(name)
        head = None if bundle.net.task_head is None else partial(build_head, bundle)
        return zoo.NamedNetwork(name, bundle.net.spec, head)
    if classes is not None and classes < 1:
        raise ValueError(f"--classes {classes}: use 1 or more")
    spec = zoo.spec(name)
    spec = spec if classes is None else replace(spec, classes=classes)
    if frames is not None:
        if not spec.frames or frames < 1:
            raise ValueError(f"--frames {frames} of {name}: use 1 or more, of networks of clips")
        spec = replace(cast(NetSpec, spec), frames=frames)
    kind = find_task(task or "classify").for_classes([*map(str, range(spec.classes))])
    return zoo.NamedNetwork(name, spec, None if type(kind).head is Task.head else kind.head)


def build_head(model: TrainedModel, net: Backbone) -> nn.Module | None:
    """The head of the task of `model` for `net`, with fresh weights."""
    return task_of(model).head(net)
