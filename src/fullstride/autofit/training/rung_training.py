"""How does a candidate train in a rung, and how good is it then? One trial for each of both."""

import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fullstride.autofit.listing.candidates import Candidate
from fullstride.autofit.training.training_times import candidate_recipe
from fullstride.data.dataset import DataSet
from fullstride.nets.bundle import Bundle
from fullstride.search.trials import Study, Trial
from fullstride.tasks import build_head, find_task
from fullstride.tasks.task import Metric, Score
from fullstride.train import run_folder
from fullstride.train.distributed import SINGLE_PROCESS
from fullstride.train.finish import final_network
from fullstride.train.minival_comparison import quality
from fullstride.train.optimizer import frozen_names
from fullstride.train.precise_statistics import batch_norms, of_run
from fullstride.train.prepare import PreparedRun, prepare
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.run import train
from fullstride.train.scoring import count, finite_scores

TRIALS = "trials"  # in the folder of a fit, with a run folder for each candidate
LINE_S = 10.0  # between two lines on a training
CHECKPOINT_S = 60.0  # of an epoch that is longer, between two checkpoints


@dataclass(frozen=True, kw_only=True)
class RungScore:
    """What a candidate achieves on the minival at the end of a rung."""

    candidate: str  # its name
    rung: int
    epochs: int
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
    """Train the run in `folder` until the epoch `stop`, or to its end for None, and score it."""
    begin = time.perf_counter()
    named = candidate_recipe(candidate, data, choice, device, epochs, folder)
    settings: dict[str, Any] = dict(weights=candidate.weights, width=candidate.width)
    settings |= dict(depth=candidate.depth, device=device, workers=workers)
    rows = train(
        folder, candidate.model, data, named, **settings, checkpoint_every_steps=every_steps
    )
    reached, shown = 0, begin
    with closing(rows):
        for row in rows:
            reached = row["epoch"]
            if time.perf_counter() - shown > LINE_S:
                shown = time.perf_counter()
                yield f"{candidate.name}: epoch {reached} of {row['epochs']}"
            if stop is not None and reached >= stop:
                break
    run = prepare(folder, candidate.model, data, named, **settings)
    try:
        scores, correct = score_trial(run)
    finally:
        run.close()
    metric = run.metric.text(scores[run.metric.name])
    yield f"{candidate.name}: minival {metric} after epoch {reached}"
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


def score_trial(run: PreparedRun) -> tuple[Mapping[str, float], str]:
    """The scores on the minival of the network that `run` would have if it ended now.

    And for each image 1 if it is classified correctly, else 0.
    """
    path = run.folder / run_folder.BUNDLE
    if path.is_dir():
        bundle = Bundle.load(path, build_head)
        task = run.task.calibrated(bundle.temperature)
        return score_images_of(run, CorrectImages(task.score()), bundle.net.to(run.device))
    nets = [final_network(run).net.to(run.device)]
    # Running statistics of few steps are far off, whether the recipe ends with precise ones or not.
    if batch_norms(nets[0], frozen_names(nets[0], run.recipe)):
        nets += [of_run(run, nets[0])]
    results, failure = [], None
    for net in nets:
        try:
            results.append(score_images_of(run, CorrectImages(run.task.score()), net))
        except FloatingPointError as error:
            failure = error
    if failure is not None and not results:
        raise failure
    return max(results, key=lambda result: quality(result[0], run.metric))


class CorrectImages:
    """A score that also notes which images are classified correctly."""

    def __init__(self, score: Score):
        self.score = score
        self.correct: list[bool] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.score.update(outputs, targets)
        self.correct += (outputs.argmax(1) == targets).tolist()

    def merge(self, other: "CorrectImages") -> None:
        self.score.merge(other.score)
        self.correct += other.correct

    def compute(self) -> dict[str, float]:
        return self.score.compute()


def score_images_of(
    run: PreparedRun, score: CorrectImages, net: Any
) -> tuple[dict[str, float], str]:
    """The scores of `net` on the minival of `run`. Unreadable images are not correct."""
    assert run.minival is not None
    scores = finite_scores(*count(net, score, run.minival, SINGLE_PROCESS))
    correct = iter(score.correct)
    names, skipped = run.data.minival.names, run.minival.skipped
    return scores, "".join(str(int(name not in skipped and next(correct))) for name in names)


def metric_of(candidate: Candidate, data: DataSet, choice: RecipeChoice, device: str) -> Metric:
    named = candidate_recipe(candidate, data, choice, device)
    return find_task().find_metric(named.recipe.score, len(data.classes))
