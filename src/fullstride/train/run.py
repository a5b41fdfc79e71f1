"""How does a training run go from data and a model's name to a bundle, and resume after a stop?"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fullstride.data.dataset import DataSet
from fullstride.nets.load_options import WeightsKind
from fullstride.tasks.task import Task
from fullstride.train import linear_probe, loop, run_folder, soup
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.finish import finish
from fullstride.train.joint_batches import TrainingBatches
from fullstride.train.plan import TrainingPlan
from fullstride.train.prepare import PreparedRun, prepare
from fullstride.train.recipe import Recipe
from fullstride.train.recipes.choice import NamedRecipe
from fullstride.train.scoring import all_skipped


def train(
    folder: Path,
    model: str,
    data: DataSet,
    recipe: Recipe | NamedRecipe,
    *,
    task: Task | None = None,
    weights: str = "",
    weights_kind: WeightsKind = "averaged",
    width: float = 1.0,
    depth: float = 1.0,
    device: torch.device | str = "cpu",
    workers: int | None = 0,
    checkpoint_every_steps: int = 0,
    teacher_cache: Path | None = None,
    context: DistributedContext = SINGLE_PROCESS,
    announce: Callable[[TrainingPlan], None] = lambda plan: None,
    watch: Callable[[TrainingBatches], loop.BatchSource] = lambda batches: batches,
) -> Generator[dict[str, Any], None, None]:
    """Train `model` on `data` in `folder`; yields the row of each epoch, also of earlier ones.

    `data` is from `task.open_data`; the task is classification if None. `width` and `depth`
    multiply those of `model`. After a stop, the same call resumes from the last checkpoint.
    Checkpoints are written after every epoch that is scored, and within an epoch after every
    `checkpoint_every_steps` steps; also where this generator is closed after an epoch. The weights
    of the epoch with the best minival are saved as a bundle in the folder; with the recipe's
    `early_stop_patience` these are scored on the test images at the end, else the last ones.
    `teacher_cache` is a folder for the probabilities of the teacher. `workers` decode images until
    the run ends; their number is chosen if None. `announce` is called before the first step of a
    run that has not ended; `watch` may wrap the training batches, to show progress.

    Raises ValueError if the folder holds another run.
    """
    if checkpoint_every_steps < 0:
        raise ValueError(
            f"checkpoint_every_steps {checkpoint_every_steps}: use a number of steps, or 0 for "
            "after each epoch only"
        )
    run = prepare(
        folder,
        model,
        data,
        recipe,
        task=task,
        weights=weights,
        weights_kind=weights_kind,
        width=width,
        depth=depth,
        device=device,
        workers=workers,
        teacher_cache=teacher_cache,
        context=context,
    )
    resume = run_folder.load_checkpoint(folder)
    rows = run_folder.read_log(folder, run.metric, resume["epochs"] if resume else 0)
    has_ended = (folder / run_folder.BUNDLE).is_dir()
    if not has_ended:
        announce(run.plan((resume["epochs"], resume["index"]) if resume else (0, 0)))
    yield from rows
    if has_ended:
        return
    if run.recipe.linear_probe and resume is None:
        linear_probe.save_probe(run)
        if run.recipe.frozen_statistics:
            linear_probe.begin_with_probe(run)
    run.net.to(device)
    context.on_rank_zero(soup.check_slots, run)
    try:
        if not run_folder.should_stop_early(rows, run.recipe, run.metric):
            epochs = loop.train_epochs(
                run.net,
                run.task,
                watch(run.batches),
                run.resolved,
                resume,
                teacher=run.teacher,
                checkpoint_every_steps=checkpoint_every_steps,
                context=context,
            )
            yield from saved_epochs(run, epochs, rows)
        finish(run)
    finally:
        run.close()


def saved_epochs(
    run: PreparedRun, epochs: Iterator[loop.Checkpoint], rows: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Score and save each of `epochs`; yields its row of the log, which is added to `rows`.

    Of epochs that share a score, the last one is scored and saved. Where the caller closes this
    generator after another one, that is saved too. Without a minival there are no scores, and no
    best epoch is saved.
    """
    for epoch in epochs:
        if not isinstance(epoch, loop.Epoch):
            run.context.on_rank_zero(run_folder.save_epoch, run.folder, rows, epoch.state)
            continue
        rows.append(unscored_row(run, epoch, rows))
        number, last = rows[-1]["epoch"], rows[-1]["epochs"]
        is_due = number % run.resolved.score_every_epochs == 0 or number == last
        if is_due:
            if run.data.minival:
                score_epoch(run, epoch, rows)
            run.context.on_rank_zero(run_folder.save_epoch, run.folder, rows, epoch.state)
        try:
            yield rows[-1]
        except GeneratorExit:
            if not is_due and not run.context.is_distributed:  # others may not be closed now
                run_folder.save_epoch(run.folder, rows, epoch.state)
            raise
        if run_folder.should_stop_early(rows, run.recipe, run.metric):
            return


def unscored_row(run: PreparedRun, epoch: loop.Epoch, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the log that follows `rows`, without scores."""
    row = {
        "epoch": epoch.number + 1,
        "epochs": math.ceil(run.resolved.epochs),
        "loss": epoch.loss,
        "lr": epoch.lr,
        "images_per_s": epoch.images_per_s,
        "data_share": epoch.data_share,
    }
    return {**row, "skipped": not_logged(all_skipped(run.batches.skipped, run.context), rows)}


def not_logged(skipped: Mapping[str, str], rows: list[dict[str, Any]]) -> dict[str, str]:
    """Those of the unreadable images that no row has."""
    logged = {name for row in rows for name in row["skipped"]}
    return {name: why for name, why in skipped.items() if name not in logged}


def score_epoch(run: PreparedRun, epoch: loop.Epoch, rows: list[dict[str, Any]]) -> None:
    """Add the scores of an epoch to its row, the last one, and save it if it is the best so far.

    Running statistics may be far off at the start of training, so that outputs are not finite. The
    row then says so, and training goes on.
    """
    row = rows[-1]
    try:
        result = run.score(epoch.average, run.data.minival)
    except FloatingPointError as error:
        row["unscored"] = str(error)
        return
    scores = result.scores
    row |= {f"minival/{key}": value for key, value in scores.items() if key != "images"}
    row["skipped"] |= not_logged(result.skipped, rows)
    if run_folder.best_row(rows, run.metric) is row:
        best = run.bundle(epoch.average, {"minival": scores})
        run.context.on_rank_zero(best.save, run.folder / run_folder.BEST)
    if run.recipe.soup:
        run.context.on_rank_zero(soup.save_epoch, run, rows, epoch.average, scores)
