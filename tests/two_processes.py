"""Trains in one process or among several, in float64 with frozen batch norms, and writes the
losses: run by a test."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from fullstride.data.dataset import open_data
from fullstride.data.loader import Batches, LoaderOptions, TestView, TrainView
from fullstride.data.transforms.crop import Augmentation
from fullstride.nets import zoo
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.tasks.multilabel import MultiLabel
from fullstride.train.compute import init_distributed
from fullstride.train.loop import train_epochs
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import evaluate


class FrozenNorms(Network):
    def train(self, mode=True):
        return super().train(False)


class Doubles:
    """The same batches in float64."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def epoch(self, number, start=0):
        for batch in self.batches.epoch(number, start):
            yield batch.x.double(), batch.targets, batch.indices


def norms(net):
    """Of each weight of a network, by its path."""
    return {path: value.norm().item() for path, value in net.named_parameters()}


def trained(recipe, batches, context, task=None):
    torch.manual_seed(0)
    kind = Network if recipe.sync_bn else FrozenNorms
    net = kind(replace(zoo.spec("resnet_rs_tiny"), in_channels=1)).double()
    return list(train_epochs(net, task or Classify(0.1), batches, recipe, context=context))


def main(out: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pre = Preprocessing(resolution=16, mean=(0.0,), std=(1.0,), crop=1.0)
    data = open_data("digits")
    with init_distributed(torch.device("cpu")) as (context, _):
        process = dict(rank=context.rank, world_size=context.world_size)
        images = data.train.subset(range(64))
        batches = Doubles(
            Batches(
                images,
                TrainView(pre, Augmentation(hflip_prob=0)),
                LoaderOptions(batch=16, shuffle=True, **process),
            )
        )
        recipe = Recipe(epochs=3, batch_size=16, lr=0.01, warmup_epochs=1, ema_decay=0.9)
        partly = replace(recipe, freeze_epochs=1.5, freeze_stages=1, layer_decay=0.7)
        in_parts = replace(recipe, grad_accum_steps=4, clip_norm=1.0)
        others = [partly, in_parts]
        *others, epochs = (trained(each, batches, context) for each in (*others, recipe))
        # each digit is a label, and so is the next one
        several = data.with_targets(data.classes, lambda label: (label, (label + 1) % 10))
        labels = MultiLabel().for_data(several)
        batches.batches = Batches(
            several.train.subset(range(64)),
            TrainView(pre, Augmentation(hflip_prob=0)),
            LoaderOptions(batch=16, shuffle=True, **process),
            collate=labels.collate,
        )
        others.append(trained(replace(recipe, loss="focal"), batches, context, labels))
        odd = data.test.subset(range(21))
        score = evaluate(
            epochs[-1].average,
            Classify(),
            Doubles(Batches(odd, TestView(pre), LoaderOptions(batch=8, **process))),
            context,
        )
        view, images = TestView(pre), several.test.subset(range(21))
        batches.batches = Batches(
            images, view, LoaderOptions(batch=8, **process), collate=labels.collate
        )
        of_labels = evaluate(others[-1][-1].average, labels, batches, context)
        score |= {f"labels/{name}": value for name, value in of_labels.items()}
        average = [
            value.double().sum().item()
            for run in (epochs, *others)
            for value in run[-1].average.state_dict().values()
        ]
        losses = [epoch.loss for epoch in sum(others, epochs)]
    if context.is_rank_zero:
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        Path(out).write_text(json.dumps([losses, score, average, threads]))


if __name__ == "__main__":
    main(sys.argv[1])
