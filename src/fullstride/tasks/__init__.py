"""Which tasks are there? `TASKS` by name, the name that a run and a bundle record."""

from pathlib import Path

from torch import nn

from fullstride.nets import zoo
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import Bundle
from fullstride.nets.load_options import BY_DEFAULT, LoadOptions
from fullstride.tasks.classify import Classify
from fullstride.tasks.task import Task

TASKS: dict[str, type[Task]] = {"classify": Classify}


def find_task(name: str = "classify", temperature: float = 1.0) -> Task:
    """The task `name` with its default options, for a network of a `temperature`.

    Raises ValueError if it is not in `TASKS`.
    """
    if name not in TASKS:
        raise ValueError(f"no task named {name!r}: choose from {', '.join(TASKS)}")
    return TASKS[name]().calibrated(temperature)


def load(what: str | Path, name: str | None = None, options: LoadOptions = BY_DEFAULT) -> Bundle:
    """`zoo.load`, also of networks that have the head of a task."""
    return zoo.load(what, name, build_head, options)


def build_head(task: str, net: Backbone) -> nn.Module | None:
    """The head of the task named `task` for `net`, with fresh weights."""
    return find_task(task).head(net)
