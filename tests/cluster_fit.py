"""The trainings of a fit of few digits, run by tests here or on a cluster."""

import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch

from fullstride.autofit.fit import FIT
from fullstride.autofit.settings import FitSettings
from fullstride.data.dataset import open_data
from fullstride.study.driver import run_study
from fullstride.study.settings import StudyOptions
from fullstride.train.recipes.choice import RecipeChoice

SETTINGS = FitSettings(
    budget_ms=1000,
    weights="none",
    candidates=("genet_tiny", "resnet_rs_tiny"),
    resolutions=(12, 16),
    formats=("onnx",),
    precisions=("fp32",),
)
RECIPE = RecipeChoice(changes={"epochs": 3.0, "batch_size": 16})


def train(folder: Path, executor: str, dry_run: bool = False) -> None:
    """A fit up to its trainings: what follows is the same wherever they ran."""
    digits = open_data("digits")
    parts = {"train": 96, "val": 40, "test": 20}
    parts = {name: getattr(digits, name).subset(range(count)) for name, count in parts.items()}
    options = {"device": "cpu", "workers": 0, "trial_cores": 1, "dry_run": dry_run}
    options = StudyOptions(executor=executor, **options)
    torch.set_num_threads(1)  # as workers of a cluster have it
    data = replace(digits, **parts)
    for event in run_study(FIT, data, folder, SETTINGS, RECIPE, options):
        print(event.stage, event.line, flush=True)
        if event.stage == "training" and event.result is not None:
            return


def train_on_ray(
    _: Callable[[str], object], folder: Path, environment: Mapping[str, str], log: Path
) -> None:
    """The same in a process of its own, with its output in `log`."""
    os.environ.update(environment)
    with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            train(folder, "ray")
        except Exception:
            traceback.print_exc()
            raise
