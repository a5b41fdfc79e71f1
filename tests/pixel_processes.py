"""Trains a segmentation and a depth network in one process or among several, in float64 with
frozen batch norms, and writes the losses, scores and norms of weights: run by a test."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from pixels import write_pictures
from two_processes import Doubles, norms

from fullstride.data.loader import Batches, LoaderOptions
from fullstride.data.transforms.crop import Augmentation
from fullstride.nets import zoo
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import find_task
from fullstride.train.compute import init_distributed
from fullstride.train.loop import train_epochs
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import evaluate


class FrozenNorms(Network):
    """All batch norms evaluate, while the head returns what it does in training."""

    def train(self, mode=True):
        super().train(False)
        self.task_head.training = mode
        return self


def main(out: str) -> None:
    torch.set_num_threads(1)
    pre = Preprocessing(resolution=32, fit="pad")
    with init_distributed(torch.device("cpu")) as (context, _):
        folder = Path(f"{out}-data-{context.rank}")
        write_pictures(folder, {"train": 16, "val": 5, "test": 1}, (32, 24))
        results = []
        for name in ("segment", "depth"):
            recipe = Recipe(epochs=2, batch_size=8, lr=0.01, warmup_epochs=1)
            recipe = recipe.with_task_options({"head_width": 8})
            task = find_task(name).with_options(recipe)
            data = task.open_data(str(folder))
            task = task.for_data(data)
            process = dict(rank=context.rank, world_size=context.world_size)
            # pictures of other sizes in the view have other numbers of pixels that count
            view = replace(task, jitter=(0.5, 1.5)).train_view(pre, Augmentation(), "pillow", ())
            batches = Batches(
                data.train,
                view,
                LoaderOptions(batch=8, shuffle=True, **process),
                collate=task.collate,
            )
            torch.manual_seed(0)
            net = FrozenNorms(replace(zoo.spec("resnet_rs_tiny"), classes=len(data.classes)))
            net.task_head = task.head(net)
            epochs = list(
                train_epochs(net.double(), task, Doubles(batches), recipe, context=context)
            )
            tests = Batches(
                data.val,
                task.test_view(pre),
                LoaderOptions(batch=2, **process),
                collate=task.collate,
            )
            scores = evaluate(epochs[-1].average, task, Doubles(tests), context)
            losses = [epoch.loss for epoch in epochs]
            results.append([losses, scores, norms(epochs[-1].average)])
        if context.is_rank_zero:
            Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
