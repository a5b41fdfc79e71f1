"""Which tasks are there? `TASKS` by name, the name that a run and a bundle record."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from fullstride.nets import zoo
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import Bundle
from fullstride.nets.load_options import BY_DEFAULT, LoadOptions
from fullstride.tasks.classify import Classify
from fullstride.tasks.task import Metric, Task

TASKS: dict[str, type[Task]] = {"classify": Classify}


def find_task(name: str = "classify", temperature: float = 1.0) -> Task:
    """The task `name` with its default options, for a network of a `temperature`.

    Raises ValueError if it is not in `TASKS`.
    """
    if name not in TASKS:
        raise ValueError(f"no task named {name!r}: choose from {', '.join(TASKS)}")
    return TASKS[name]().calibrated(temperature)


def common_metric(models: Iterable[Any]) -> Metric:
    """The metric that all bundles among `models` were chosen by in training.

    It is the task's own where they differ, and for exported files. All are of one task.
    """
    models = list(models)
    recipes = [each.recipe for each in models if isinstance(each, Bundle) and each.recipe]
    names = {str(recipe.get("score", "")) for recipe in recipes}
    return find_task(models[0].task).find_metric(names.pop() if len(names) == 1 else "")


def load(what: str | Path, name: str | None = None, options: LoadOptions = BY_DEFAULT) -> Bundle:
    """`zoo.load`, also of networks that have the head of a task."""
    return zoo.load(what, name, build_head, options)


def build_head(task: str, net: Backbone) -> nn.Module | None:
    """The head of the task named `task` for `net`, with fresh weights."""
    return find_task(task).head(net)
