"""How long does each candidate train here? A few of its steps are measured."""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fullstride.autofit.listing.candidates import Candidate
from fullstride.data.dataset import DataSet
from fullstride.outputs import json_output
from fullstride.search.trials import FAILURES, reason
from fullstride.strict_json import from_json, read_json, to_json
from fullstride.train import run_folder
from fullstride.train.batches import recipe_in_epochs
from fullstride.train.precise_statistics import MAX_IMAGES
from fullstride.train.prepare import prepare
from fullstride.train.recipes.choice import NamedRecipe, RecipeChoice, case_of
from fullstride.train.run_times import time_run
from fullstride.writing import atomic_write, scratch_folder

BY_CASE = RecipeChoice()  # the default recipe, by weights and number of images
OUTPUT = json_output("the time of a training", "candidate", "step_s")


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """What the parts of a candidate's training take on one device, in seconds."""

    candidate: str  # its name
    epochs: int = 0  # of its whole recipe
    steps: int = 0  # of an epoch
    step_s: float = 0.0  # a step with its wait for images
    score_every: int = 1  # epochs, of which the last one is scored and saved
    minival_s: float = 0.0  # scoring a network on the minival
    precise_s: float = 0.0  # measuring batch statistics anew, and scoring the network with them
    save_s: float = 0.0  # a checkpoint and a bundle
    start_s: float = 0.0  # building the network and starting workers
    measure_s: float = 0.0  # what this measurement took
    failure: str = ""  # why it cannot train, in one line

    @property
    def epoch_s(self) -> float:
        """An epoch, with its part of the minival and of a checkpoint."""
        return self.steps * self.step_s + (self.minival_s + self.save_s) / self.score_every

    def seconds(self, epochs: float) -> float:
        """So many epochs between a start and the score of a rung, or for 0 a linear probe."""
        if not epochs:
            return self.start_s + self.precise_s  # the same images, once each
        return self.start_s + epochs * self.epoch_s + self.precise_s + 2 * self.minival_s


def candidate_recipe(
    candidate: Candidate,
    data: DataSet,
    choice: RecipeChoice,
    device: str,
    epochs: int | None = None,
    folder: Path | None = None,
) -> NamedRecipe:
    """The recipe that `choice` gives for a candidate, with other `epochs` if they are fewer.

    A run in `folder` keeps its own. On a GPU a batch is computed in the fewest passes that fit.
    """
    changes = {"resolution": candidate.resolution, "fit": candidate.fit} | dict(choice.changes)
    if candidate.teacher:
        changes["teacher"] = candidate.teacher
    if torch.device(device).type == "cuda":
        changes.setdefault("grad_accum_steps", 0)
    case = case_of(data, candidate.weights, candidate.width)
    whole = RecipeChoice(choice.source, changes)
    named = whole.resolve(case)
    if epochs is not None and epochs < epochs_of(named, data):
        whole = RecipeChoice(choice.source, changes | {"epochs": epochs})
        named = whole.resolve(case)
    if folder is not None:
        return run_folder.resolve(whole, folder, data, candidate.weights, candidate.width)
    return named


def epochs_of(named: NamedRecipe, data: DataSet) -> int:
    """Epochs of the recipe on `data`; the last one may be partial."""
    return math.ceil(recipe_in_epochs(data, named.recipe).epochs)


def stored_time(folder: Path, candidate: Candidate) -> TrainingTime | None:
    path = _path(folder, candidate)
    return from_json(TrainingTime, read_json(path), str(path)) if path.exists() else None


def measure_training(
    folder: Path,
    candidate: Candidate,
    data: DataSet,
    choice: RecipeChoice,
    device: str,
    workers: int | None,
) -> TrainingTime:
    """Time a few steps of the real recipe on real batches, and a part of the minival; about 4 s.

    The result is stored in `folder`, but for a candidate that cannot train, which has a `failure`:
    it is tried again by the next call.
    """
    begin = time.perf_counter()
    path = _path(folder, candidate)
    with scratch_folder(path.with_name(candidate.name)) as scratch:
        try:
            times = _measure(scratch / candidate.name, candidate, data, choice, device, workers)
        except FAILURES as error:
            times = TrainingTime(candidate=candidate.name, failure=reason(error, device))
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # the next candidate is another network
    times = replace(times, measure_s=time.perf_counter() - begin)
    if not times.failure:
        with atomic_write(path, OUTPUT) as temporary:
            temporary.write_text(to_json(times))
    return times


def _path(folder: Path, candidate: Candidate) -> Path:
    return folder / "training_times" / f"{candidate.name}.json"


def _measure(
    folder: Path,
    candidate: Candidate,
    data: DataSet,
    choice: RecipeChoice,
    device: str,
    workers: int | None,
) -> TrainingTime:
    begin = time.perf_counter()
    named = candidate_recipe(candidate, data, choice, device)
    run = prepare(
        folder,
        candidate.model,
        data,
        named,
        weights=candidate.weights,
        width=candidate.width,
        depth=candidate.depth,
        device=device,
        workers=workers,
    )
    times = time_run(run, time.perf_counter() - begin)
    for_statistics = min(len(data.train), MAX_IMAGES)
    return TrainingTime(
        candidate=candidate.name,
        epochs=epochs_of(named, data),
        steps=times.steps,
        step_s=times.step_s,
        score_every=times.score_every,
        minival_s=times.image_s * len(data.minival),
        precise_s=times.image_s * (for_statistics + len(data.minival)),
        save_s=times.save_s,
        start_s=times.start_s,
    )
