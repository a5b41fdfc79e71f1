"""A fit of few digits, run by tests here or as `python cluster_fit.py FOLDER EXECUTOR [dry]`."""

import sys
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


def main(folder: str, executor: str, *dry: str) -> None:
    digits = open_data("digits")
    parts = {"train": 96, "val": 40, "test": 20}
    parts = {name: getattr(digits, name).subset(range(count)) for name, count in parts.items()}
    options = {"device": "cpu", "workers": 0, "trial_cores": 1, "dry_run": bool(dry)}
    options = StudyOptions(executor=executor, **options)
    torch.set_num_threads(1)  # as workers of a cluster have it
    data = replace(digits, **parts)
    for event in run_study(FIT, data, Path(folder), SETTINGS, RECIPE, options):
        print(event.stage, event.line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
