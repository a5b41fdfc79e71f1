"""Trains a network of clips in one process or among several, in float64 with frozen batch norms,
and writes the losses and scores: run by a test."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from two_processes import Doubles, FrozenNorms

from fullstride.data.loader import Batches, LoaderOptions
from fullstride.data.readers.splits import SplitRule
from fullstride.data.transforms.crop import Augmentation
from fullstride.examples import write_motion
from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import find_task
from fullstride.train.compute import init_distributed
from fullstride.train.loop import train_epochs
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import evaluate


def main(out: str) -> None:
    torch.set_num_threads(1)
    pre = Preprocessing(resolution=24, frames=4)
    with init_distributed(torch.device("cpu")) as (context, _):
        folder = Path(f"{out}-data-{context.rank}")
        write_motion(folder, {"train": 16, "val": 5, "test": 1}, 24, frames=5)
        recipe = Recipe(epochs=2, batch_size=8, lr=0.01, warmup_epochs=1)
        task = find_task("video").with_options(recipe)
        data = task.open_data(str(folder), SplitRule(keep_duplicates=True))
        process = dict(rank=context.rank, world_size=context.world_size)
        view = task.train_view(pre, Augmentation(hflip_prob=0), "pillow", ())
        batches = Doubles(
            Batches(
                data.train,
                view,
                LoaderOptions(batch=8, shuffle=True, **process),
                collate=task.collate,
            )
        )
        torch.manual_seed(0)
        net = FrozenNorms(replace(zoo.spec("resnet3d_rs_tiny"), classes=4)).double()
        epochs = list(train_epochs(net, task, batches, recipe, context=context))
        tests = Batches(
            data.val, task.test_view(pre), LoaderOptions(batch=2, **process), collate=task.collate
        )
        scores = evaluate(epochs[-1].average, task, Doubles(tests), context)
        if context.is_rank_zero:
            Path(out).write_text(json.dumps([[epoch.loss for epoch in epochs], scores]))


if __name__ == "__main__":
    main(sys.argv[1])
