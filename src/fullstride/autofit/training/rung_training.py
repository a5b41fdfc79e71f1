"""How does a candidate train in a rung, and how good is it then? One trial for each of both."""

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullstride.autofit.listing.candidates import Candidate
from fullstride.autofit.training.training_times import candidate_recipe
from fullstride.data.dataset import DataSet
from fullstride.search.run_scores import score_run, train_to
from fullstride.search.trials import Study, Trial
from fullstride.tasks import find_task
from fullstride.tasks.task import Metric
from fullstride.train.linear_probe import save_probe
from fullstride.train.prepare import prepare
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.run import train

TRIALS = "trials"  # in the folder of a fit, with a run folder for each candidate
CHECKPOINT_S = 60.0  # of an epoch that is longer, between two checkpoints


@dataclass(frozen=True, kw_only=True)
class RungScore:
    """What a candidate achieves on the minival at the end of a rung."""

    candidate: str  # its name
    rung: int
    epochs: int  # 0: a linear probe
    scores: Mapping[str, float]
    correct: str  # 1 or 0 for each image of the minival, in order; "" without single labels
    seconds: float  # of training in this rung, since the last start


def rung_trial(
    folder: Path,
    candidate: Candidate,
    data: DataSet,
    choice: RecipeChoice,
    rung: int,
    stop: int | None,
    epochs: int,
    workers: int | None,
    *,
    epoch_s: float,
    steps: int,
) -> Trial:
    """The trial of a candidate in a rung, see `train_rung`; it takes so long for an epoch."""
    is_long = epoch_s > 2 * CHECKPOINT_S and steps
    return Trial(
        folder=folder / TRIALS / candidate.name,
        result=folder / "rungs" / str(rung) / f"{candidate.name}.json",
        arguments=dict(
            candidate=candidate,
            data=data,
            choice=choice,
            rung=rung,
            stop=stop,
            epochs=epochs,
            workers=workers,
            every_steps=max(1, round(steps * CHECKPOINT_S / epoch_s)) if is_long else 0,
        ),
    )


def train_rung(
    folder: Path,
    device: str,
    *,
    candidate: Candidate,
    data: DataSet,
    choice: RecipeChoice,
    rung: int,
    stop: int | None,
    epochs: int,
    workers: int | None,
    every_steps: int,
) -> Generator[str, None, RungScore]:
    """Train the run in `folder` until the epoch `stop`, or to its end for None, and score it.

    Until 0, it is the linear probe of the recipe that is scored.
    """
    begin = time.perf_counter()
    named = candidate_recipe(candidate, data, choice, device, epochs, folder)
    settings: dict[str, Any] = dict(weights=candidate.weights, width=candidate.width)
    settings |= dict(depth=candidate.depth, device=device, workers=workers)
    reached = 0
    if stop != 0:
        rows = train(
            folder, candidate.model, data, named, **settings, checkpoint_every_steps=every_steps
        )
        reached = yield from train_to(candidate.name, rows, stop)
    run = prepare(folder, candidate.model, data, named, **settings)
    try:
        if stop == 0:
            save_probe(run)
        scores, correct = score_run(run)
    finally:
        run.close()
    metric = run.metric.text(scores[run.metric.name])
    after = f"after epoch {reached}" if reached else "by a linear probe"
    yield f"{candidate.name}: minival {metric} {after}"
    return RungScore(
        candidate=candidate.name,
        rung=rung,
        epochs=reached,
        scores=scores,
        correct=correct,
        seconds=time.perf_counter() - begin,
    )


STUDY = Study(
    work=train_rung,
    kind=RungScore,
    noun="the score of a rung",
    keys=("candidate", "rung", "scores"),
)


def metric_of(candidate: Candidate, data: DataSet, choice: RecipeChoice, device: str) -> Metric:
    named = candidate_recipe(candidate, data, choice, device)
    return find_task().find_metric(named.recipe.score, len(data.classes))
