"""How long do the parts of a run take here? A few steps and a part of the minival are measured."""

import time
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from fullstride.train import run_folder
from fullstride.train.data_bench import endless
from fullstride.train.distributed import SINGLE_PROCESS
from fullstride.train.loop import Learner
from fullstride.train.prepare import PreparedRun

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
    with closing(endless(run.batches, 0)) as batches:
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
