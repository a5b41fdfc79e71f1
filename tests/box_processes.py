"""Trains a detector in one process or among several, in float64 with frozen batch norms, and writes
the losses, scores and norms of weights: run by a test."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from detections import write_rectangles
from pixel_processes import FrozenNorms
from two_processes import Doubles, norms

from fullstride.data.loader import Batches, LoaderOptions
from fullstride.data.transforms.crop import Augmentation
from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import find_task
from fullstride.train.compute import init_distributed
from fullstride.train.loop import train_epochs
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import evaluate


def main(out: str) -> None:
    torch.set_num_threads(1)
    pre = Preprocessing(resolution=64, fit="pad")
    options = {"head_width": 16, "head_convs": 1}
    recipe = Recipe(epochs=2, batch_size=8, lr=0.01, warmup_epochs=1, task_options=options)
    with init_distributed(torch.device("cpu")) as (context, _):
        folder = Path(f"{out}-data-{context.rank}")
        write_rectangles(folder, {"train": 16, "val": 5, "test": 1}, 64)
        task = find_task("detect").with_options(recipe)
        data = task.open_data(str(folder))
        task = task.for_data(data)
        process = dict(rank=context.rank, world_size=context.world_size)
        view = task.train_view(pre, Augmentation(), "pillow", ())
        batches = Batches(
            data.train, view, LoaderOptions(batch=8, shuffle=True, **process), collate=task.collate
        )
        torch.manual_seed(0)
        net = FrozenNorms(replace(zoo.spec("resnet_rs_tiny"), classes=len(data.classes)))
        net.task_head = task.head(net)
        epochs = list(train_epochs(net.double(), task, Doubles(batches), recipe, context=context))
        weights = norms(epochs[-1].average)
        torch.manual_seed(1)  # the same in each process; so short a training finds nothing
        torch.nn.init.normal_(epochs[-1].average.task_head.classes.weight, std=0.3)
        tests = Batches(
            data.val, task.test_view(pre), LoaderOptions(batch=2, **process), collate=task.collate
        )
        scores = evaluate(epochs[-1].average, task, Doubles(tests), context)
        if context.is_rank_zero:
            losses = [epoch.loss for epoch in epochs]
            Path(out).write_text(json.dumps([losses, scores, weights]))


if __name__ == "__main__":
    main(sys.argv[1])
