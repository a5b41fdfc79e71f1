"""Do batch statistics of the images as they are evaluated suit the final weights better?

In training, running statistics are those of augmented images in small batches. Measured anew with
the final weights, on training images in evaluation views, they are closer to what evaluation meets
("precise BN": arXiv:2105.07576, section 3; of other resolutions: arXiv:1906.06423).
"""

import copy
from collections.abc import Collection

import torch

from fullstride.console import print_note
from fullstride.data.dataset import Images
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.task import Task
from fullstride.train.compute import numerics
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.optimizer import frozen_names
from fullstride.train.prepare import PreparedRun
from fullstride.train.running_statistics import BATCH_NORM
from fullstride.train.scoring import BATCH, scoring_batches
from fullstride.train.soup import described, quality

MAX_IMAGES = 64 * BATCH


def better_statistics(run: PreparedRun, net: Backbone) -> Backbone:
    """`net`, the final network; or a copy with precise statistics if its minival score is better.

    Without a minival, or statistics that training changes, it is `net`.
    """
    frozen = frozen_names(net, run.recipe)
    if not run.data.minival or not batch_norms(net, frozen):
        return net
    how = run.pre, run.device, run.workers, run.context
    precise = with_precise_statistics(net, run.task, run.data.train, *how, frozen=frozen)
    before, after = (run.score(each, run.data.minival).scores for each in (net, precise))
    is_better = quality(after, run.metric) > quality(before, run.metric)
    if is_better and run.context.is_rank_zero:
        print_note(
            "the batch statistics are measured anew on training images without augmentation: "
            f"minival {described(after, run.metric)}, before {described(before, run.metric)}"
        )
    return precise if is_better else net


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
    number -= number % BATCH if number > BATCH else 0
    some = images.subset([index * len(images) // number for index in range(number)])
    batches = scoring_batches(task, some, pre, device, workers, context)
    momenta = [norm.momentum for norm in norms]
    try:
        with numerics(tf32=False, benchmark=False, deterministic=False):
            for index, (x, _, _) in enumerate(batches.epoch(0)):
                if len(x) < 2:  # which have no variance where a map has one pixel
                    continue
                for norm in norms:
                    norm.train().momentum = 1 / (index + 1)
                precise(x)
    finally:
        batches.close()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    context.sync_buffers(precise)
    return precise.eval()


def batch_norms(net: Backbone, frozen: Collection[str] = ()) -> list[BATCH_NORM]:
    """The batch norms of `net` whose gain is not among the `frozen` parameters."""
    return [
        module
        for name, module in net.named_modules()
        if isinstance(module, BATCH_NORM) and f"{name}.weight" not in frozen
    ]
