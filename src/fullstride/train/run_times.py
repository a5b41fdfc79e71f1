"""Times the parts of a run on this device, and chooses how many epochs fit into a given time."""

import math
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fullstride.data.dataset import DataSet
from fullstride.tasks.task import Task
from fullstride.train import linear_probe, precise_statistics, run_folder
from fullstride.train.batches import recipe_in_epochs
from fullstride.train.compute import keep_freed_memory
from fullstride.train.data_bench import endless
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.loop import Learner
from fullstride.train.prepare import PreparedRun, prepare
from fullstride.train.recipes.choice import LENGTHS, NamedRecipe, RecipeChoice
from fullstride.writing import scratch_folder

MEASURE_S, MIN_STEPS = 1.5, 2  # that are timed
WARM_UP_S = 3.0  # until workers have started and kernels are chosen, at most


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """Of one run on its device, in seconds."""

    steps: int  # of an epoch
    score_every: int  # epochs, of which the last one is scored and saved
    step_s: float  # a step with its wait for images
    image_s: float  # an image of the minival
    save_s: float  # a checkpoint and a bundle
    start_s: float  # building the network, starting workers and choosing kernels


def recipe_within(
    choice: RecipeChoice,
    deadline: float | None,
    folder: Path,
    model: str,
    data: DataSet,
    *,
    task: Task,
    weights: str = "",
    width: float = 1.0,
    context: DistributedContext = SINGLE_PROCESS,
    **how: Any,
) -> NamedRecipe:
    """The recipe that `choice` gives, with as many epochs as end by `deadline` where it has more.

    Steps, scores and a checkpoint are measured for about 4 s. What follows from
    the number of epochs, such as the batch and the rate of `finetune`, is chosen for it. A run in
    `folder` that can be resumed keeps its recipe, as it does without a limit (None).

    Args:
        choice: Of the user, without a length.
        deadline: Of the run with its linear probe and its scores, by `time.perf_counter`.
        folder: Of the run, beside which measurements are made.
        model: As for `run.train`, as are `data` and the arguments from `task` on.

    Raises ValueError, in one line, for a length beside the time, for several processes, and where
    not even a tenth of an epoch fits.
    """
    begin = time.perf_counter()
    run_folder.check_folder(folder)
    named = run_folder.resolve(choice, folder, data, weights, width, task)
    if deadline is None or run_folder.resumable_config(folder):
        return named
    if context.is_distributed:
        raise ValueError("a time limit is measured in one process: give --epochs with torchrun")
    if length := next((name for name in LENGTHS if choice.changes.get(name)), None):
        raise ValueError(
            f"{length} {choice.changes[length]:g} and a time both set the length of training: "
            "leave one of them out"
        )
    how |= dict(task=task, weights=weights, width=width)
    with scratch_folder(folder) as scratch:
        run = prepare(scratch / folder.name, model, data, named, **how)
        times = time_run(run, time.perf_counter() - begin)
    train, minival, test = len(data.train), len(data.minival), len(data.test)
    scored = 2 * minival + test
    if run.recipe.linear_probe:
        scored += min(train, linear_probe.MAX_IMAGES) + 2 * minival
    if run.recipe.measures_statistics:
        scored += min(train, precise_statistics.MAX_IMAGES) + minival
    once_s = times.start_s + scored * times.image_s + 3 * times.save_s
    epoch_s = times.steps * times.step_s
    epoch_s += (minival * times.image_s + times.save_s) / times.score_every
    left_s = deadline - time.perf_counter() - once_s
    whole, epochs = recipe_in_epochs(data, named.recipe).epochs, left_s / epoch_s
    if epochs >= whole:
        return named
    if epochs < 0.1:
        more_s = 0.1 * epoch_s - left_s
        raise ValueError(
            "the time is too short: a tenth of an epoch, with its scores, needs "
            f"{math.ceil(more_s / 6) / 10:g} minutes more"
        )
    shorter = replace(choice, changes={**choice.changes, "epochs": math.floor(10 * epochs) / 10})
    return run_folder.resolve(shorter, folder, data, weights, width, task)


def time_run(run: PreparedRun, build_s: float) -> RunTimes:
    """Time a few steps of a run that was prepared in `build_s`, and close it; about 4 s.

    Its folder gets a checkpoint and a bundle, and is no run: use a scratch folder.
    """
    begin = time.perf_counter()
    try:
        run.net.to(run.device).train()
        recipe = replace(run.resolved, freeze_epochs=0.0)  # in which not all parameters train
        learner = Learner(run.net, run.task, recipe, len(run.batches), run.teacher, SINGLE_PROCESS)
        build_s += time.perf_counter() - begin
        step_s, first_s = time_steps(learner, run)
        begin = time.perf_counter()
        run_folder.save_checkpoint(run.folder, learner.state(1, 0, []))
        run.bundle(run.net, {}).save(run.folder / run_folder.BEST)
        save_s = time.perf_counter() - begin
        image_s = time_scoring(run)
    finally:
        run.close()
    start_s = build_s + max(0.0, first_s - step_s)
    return RunTimes(
        steps=len(run.batches),
        score_every=run.resolved.score_every_epochs,
        step_s=step_s,
        image_s=image_s,
        save_s=save_s,
        start_s=start_s,
    )


def time_steps(learner: Learner, run: PreparedRun) -> tuple[float, float]:
    """Seconds of a step with its wait for images, and of the first one.

    Steps are timed once the batches that workers prepared during their start are used up.
    """
    untimed, total = 1 + 2 * run.workers, max(1, learner.divergence.total)
    begin = start = now = time.perf_counter()
    first_s, steps = 0.0, 0
    keeping = keep_freed_memory(learner.device)  # as training does
    with keeping, closing(endless(run.batches, 0)) as batches:
        for number, (x, targets, indices) in enumerate(batches):
            with learner.numerics():
                learner.step(x, targets, number % total, indices).item()  # waits for the device
            now = time.perf_counter()
            first_s = first_s or now - begin
            if start == begin:
                start = now if number + 1 >= untimed or now - begin > WARM_UP_S else begin
                continue
            steps += 1
            if steps >= MIN_STEPS and now - start > MEASURE_S:
                break
    return (now - start) / steps, first_s


@torch.inference_mode()
def time_scoring(run: PreparedRun) -> float:
    """Seconds in which an image of the minival is scored, after the first batch if it has more."""
    assert run.minival is not None
    run.net.eval()
    begin, images, batches = time.perf_counter(), 0, run.minival.epoch(0)
    for number, (x, targets, _) in enumerate(batches):
        run.task.score().update(run.net(x), targets)
        if number == 0 and len(run.minival) > 1:
            begin = time.perf_counter()  # workers have started
            continue
        images += len(x)
        if time.perf_counter() - begin > MEASURE_S / 2:
            break
    batches.close()
    return (time.perf_counter() - begin) / max(1, images)
