"""Do batch statistics of the images as they are evaluated suit the final weights better?

In training, running statistics are those of augmented images in small batches. Measured anew with
the final weights, on training images in evaluation views, they are closer to what evaluation meets
("precise BN": arXiv:2105.07576, section 3; of other resolutions: arXiv:1906.06423).
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fullstride.data.dataset import Images
from fullstride.io.console import print_note
from fullstride.io.writing import check_output
from fullstride.nets import fused_form
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import OUTPUT, Bundle, read_metadata
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import build_head
from fullstride.tasks.task import Task
from fullstride.train import run_folder
from fullstride.train.compute import SINGLE_PROCESS, DistributedContext, numerics
from fullstride.train.loop import BATCH_NORM
from fullstride.train.optimizer import frozen_names
from fullstride.train.prepare import PreparedRun
from fullstride.train.scoring import FinalNetwork, averaged, quality, scoring_batches

MAX_IMAGES = 64 * 128


def better_statistics(run: PreparedRun, final: FinalNetwork) -> FinalNetwork:
    """`final`; or a copy with precise statistics if its validation score is better.

    Without a validation split, or statistics that training changes, it is `final`.
    """
    if not run.data.val or not batch_norms(final.net, frozen_names(final.net, run.recipe)):
        return final
    net = of_run(run, final.net)
    precise = replace(final, net=net, scores=run.val_scores(net))
    if not precise.is_better(final, run.metric):
        return final
    if run.context.is_rank_zero:
        print_note(
            "the batch statistics are measured anew on training images without augmentation: "
            f"validation {precise.described(run.metric)}, before {final.described(run.metric)}"
        )
    return precise


def of_run(run: PreparedRun, net: Backbone) -> Backbone:
    """A copy of `net` whose batch statistics are those of the run's training images."""
    how, frozen = (run.pre, run.device, run.workers, run.context), frozen_names(net, run.recipe)
    return with_precise_statistics(net, run.task, run.data.train, *how, frozen=frozen)


@torch.no_grad()
def with_precise_statistics(
    net: Backbone,
    task: Task,
    images: Images,
    pre: Preprocessing,
    device: torch.device | str,
    workers: int = 0,
    context: DistributedContext = SINGLE_PROCESS,
    *,
    frozen: Collection[str] = (),
) -> Backbone:
    """A copy of `net` whose batch statistics are the means over batches of `images`.

    These are all images or `MAX_IMAGES`, in evaluation views and whole batches. Statistics of norms
    with `frozen` parameters stay as they are.
    """
    precise = copy.deepcopy(net).eval()
    norms = batch_norms(precise, frozen)
    number = min(len(images), MAX_IMAGES)
    number -= number % task.scoring_batch if number > task.scoring_batch else 0
    some = images.subset([index * len(images) // number for index in range(number)])
    batches = scoring_batches(task, some, pre, device, workers, context)
    momenta = [norm.momentum for norm in norms]
    try:
        with numerics(tf32=False, benchmark=False, deterministic=False):
            for index, (x, _, _) in enumerate(batches.epoch(0)):
                if len(x) < 2:  # which have no variance where a map has one pixel
                    continue
                for norm in norms:
                    for value in () if index else (norm.running_mean, norm.running_var):
                        if value is not None:
                            value.zero_()  # 0 x a value that is not finite would be none
                    norm.train().momentum = 1 / (index + 1)
                precise(x)
    finally:
        batches.close()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    context.sync_buffers(precise)
    return precise.eval()


def batch_norms(net: Backbone, frozen: Collection[str] = ()) -> list[BATCH_NORM]:
    """The batch norms of `net` with no parameter among the `frozen` ones."""
    return [
        module
        for name, module in net.named_modules()
        if isinstance(module, BATCH_NORM)
        and not any(f"{name}.{part}" in frozen for part, _ in module.named_parameters())
    ]


# Is an average of several epochs better than the last one? Greedy soups, chosen by the validation
# split.
#
# Source: model soups, arXiv:2203.05482, of epochs of one run. Batch statistics are averaged as the
# weights are, and with the recipe's `precise_bn` measured for each average.


SOUP = "soup"  # the folder of the ingredients in that of a run
EPOCH = "epoch"  # of an ingredient, among its scores


def check_slots(run: PreparedRun) -> None:
    """Raise ValueError if something else is where epochs will be saved; writes nothing."""
    for slot in slots(run):
        check_output(slot, OUTPUT)


def save_epoch(
    run: PreparedRun, rows: list[dict[str, Any]], average: Backbone, scores: Mapping[str, float]
) -> None:
    """Save the network of the last of `rows` if it is among the best of them.

    It takes the place of one that no longer is. This is done before the log has the row: after a
    stop between the two the epoch is trained again, with the same result.
    """
    count, epoch = run.recipe.soup, rows[-1]["epoch"]
    best = {row["epoch"] for row in run_folder.best_rows(rows, run.metric, count)}
    if epoch in best:
        held = {slot: saved_scores(slot).get(EPOCH) for slot in slots(run)}
        slot = next(
            slot for slot, other in held.items() if other == epoch or other not in best - {epoch}
        )
        run.bundle(average, {"val": {**scores, EPOCH: epoch}}).save(slot)


def better_average(run: PreparedRun, final: FinalNetwork) -> FinalNetwork:
    """`final`; or an average of epochs whose validation score is better.

    The epochs are tried from the best one on; each stays in the average if that is better with it.
    """
    candidates = [
        (quality(scores, run.metric), -int(scores[EPOCH]), slot)
        for slot in slots(run)
        if (scores := saved_scores(slot))
    ]
    best, states = None, []
    for _, minus_epoch, slot in sorted(candidates, reverse=True):
        state = Bundle.load(slot, build_head).net.state_dict()
        net = copy.deepcopy(fused_form.unpadded(final.net, run.spec))
        net.load_state_dict(averaged([*states, state]))
        if run.recipe.measures_statistics:
            net = of_run(run, net)
        is_saved = not states and not run.recipe.measures_statistics  # whose scores are known
        scores = saved_scores(slot) if is_saved else run.val_scores(net)
        trial = FinalNetwork(net, scores, (*(best.epochs if best else ()), -minus_epoch))
        if best is None or trial.is_better(best, run.metric):
            best, states = trial, [*states, state]
    is_better = best and len(states) > 1 and best.is_better(final, run.metric)
    if run.context.is_rank_zero:
        alone = f"the final weights ({final.described(run.metric)})"
        print_note(
            f"the bundle is the average of epochs {', '.join(map(str, sorted(best.epochs)))}, on "
            f"the validation split {best.described(run.metric)}, and not {alone}"
            if best and is_better
            else f"no average of epochs is better on the validation split than {alone}"
        )
    return replace(best, epochs=tuple(sorted(best.epochs))) if best and is_better else final


def slots(run: PreparedRun) -> list[Path]:
    return [run.folder / SOUP / str(number) for number in range(1, run.recipe.soup + 1)]


def saved_scores(slot: Path) -> Mapping[str, float]:
    """The epoch and the validation scores of the network in `slot`; empty where there is none."""
    return read_metadata(slot).scores["val"] if slot.is_dir() else {}
