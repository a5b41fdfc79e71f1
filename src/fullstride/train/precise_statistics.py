"""Do batch statistics of the images as they are evaluated suit the final weights better?

In training, running statistics are those of augmented images in small batches. Measured anew with
the final weights, on training images in evaluation views, they are closer to what evaluation meets
("precise BN": arXiv:2105.07576, section 3; of other resolutions: arXiv:1906.06423).
"""

import copy
from collections.abc import Collection
from dataclasses import replace

import torch

from fullstride.console import print_note
from fullstride.data.dataset import Images
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.task import Task
from fullstride.train.compute import numerics
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.minival_comparison import FinalNetwork
from fullstride.train.optimizer import frozen_names
from fullstride.train.prepare import PreparedRun
from fullstride.train.running_statistics import BATCH_NORM
from fullstride.train.scoring import scoring_batches

MAX_IMAGES = 64 * 128


def better_statistics(run: PreparedRun, final: FinalNetwork) -> FinalNetwork:
    """`final`; or a copy with precise statistics if its minival score is better.

    Without a minival, or statistics that training changes, it is `final`.
    """
    if not run.data.minival or not batch_norms(final.net, frozen_names(final.net, run.recipe)):
        return final
    net = of_run(run, final.net)
    precise = replace(final, net=net, scores=run.minival_scores(net))
    if not precise.is_better(final, run.metric):
        return final
    if run.context.is_rank_zero:
        print_note(
            "the batch statistics are measured anew on training images without augmentation: "
            f"minival {precise.described(run.metric)}, before {final.described(run.metric)}"
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
