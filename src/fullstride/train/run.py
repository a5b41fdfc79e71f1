"""How does a training run go from data and a model's name to a bundle, and resume after a stop?"""

import math
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from fullstride.data.dataset import DataSet
from fullstride.data.loader import Batches
from fullstride.nets.load_options import WeightsKind
from fullstride.tasks.task import Task
from fullstride.train import loop, run_folder, soup
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.finish import finish
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
    watch: Callable[[Batches], loop.BatchSource] = lambda batches: batches,
) -> Generator[dict[str, Any], None, None]:
    """Train `model` on `data` in `folder`; yields the row of each epoch, also of earlier ones.

    `data` is from `task.open_data`; the task is classification if None. `width` and `depth`
    multiply those of `model`. After a stop, the same call resumes from the last checkpoint.
    Checkpoints are written after every epoch and within an epoch after every
    `checkpoint_every_steps` steps. The weights of the epoch with the best minival are saved as a
    bundle in the folder; with the recipe's `early_stop_patience` these are scored on the test
    images at the end, else the last ones. `teacher_cache` is a folder for the probabilities of the
    teacher. `workers` decode images until the run ends; their number is chosen if None. `announce`
    is called before the first step of a run that has not ended; `watch` may wrap the training
    batches, to show progress.

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

    Without a minival there are no scores, and no best epoch is saved.
    """
    for epoch in epochs:
        if not isinstance(epoch, loop.Epoch):
            run.context.on_rank_zero(run_folder.save_checkpoint, run.folder, epoch.state)
            continue
        scores, skipped = {}, all_skipped(run.batches, run.context)
        if run.data.minival:
            scores, unread, _ = run.score(epoch.average, run.data.minival)
            skipped = unread | skipped
        logged = {name for row in rows for name in row["skipped"]}
        rows.append(
            {
                "epoch": epoch.number + 1,
                "epochs": math.ceil(run.resolved.epochs),
                "loss": epoch.loss,
                "lr": epoch.lr,
                "images_per_s": epoch.images_per_s,
                "data_share": epoch.data_share,
                **{f"minival/{key}": value for key, value in scores.items() if key != "images"},
                "skipped": {name: why for name, why in skipped.items() if name not in logged},
            }
        )
        if scores and run_folder.best_row(rows, run.metric) is rows[-1]:
            best = run.bundle(epoch.average, {"minival": scores})
            run.context.on_rank_zero(best.save, run.folder / run_folder.BEST)
        if run.recipe.soup:
            run.context.on_rank_zero(soup.save_epoch, run, rows, epoch.average, scores)
        run.context.on_rank_zero(run_folder.save_epoch, run.folder, rows, epoch.state)
        yield rows[-1]
        if run_folder.should_stop_early(rows, run.recipe, run.metric):
            return
