"""Does the triplet loss retrieve better the digits of people that were not trained on?

    python benchmarks/retrieval.py --out benchmarks/retrieval.json

genet_tiny is trained for retrieval on the digits at 16 pixels, in batches of 8 images of each of 8
classes, with cross-entropy alone and with the weighted triplet loss beside it. Queries and gallery
are the 500 test images, which other people wrote: classes are known, writers are not. Baselines
are the raw pixels, and the embeddings of the network before training. The JSON has every score, and
the page beside it the means over 3 seeds.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullstride import tasks
from fullstride.io.writing import Output, atomic_write, begins_with, json_output
from fullstride.measure.environment import Environment
from fullstride.tasks.retrieval import METRICS, Retrieval, retrieval_scores
from fullstride.train import prepare, run
from fullstride.train.batches import BatchOptions
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS
from fullstride.train.scoring import score_images

MODEL = "genet_tiny"
RECIPE = replace(DIGITS, epochs=30, warmup_epochs=2, resolution=16, batch_size=64, per_class=8)
ROWS: dict[str, dict[str, Any]] = {"cross-entropy": {}, "with the triplet loss": {"triplet": 0.3}}
TITLE = "# Retrieval of digits by writers that were not trained on"
OUTPUT = json_output("a study of retrieval", "recipe", "changes", "rows")
PAGE = Output("a page of it", ".md", begins_with(TITLE.encode()))


def trained_scores(changes: Mapping[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Test scores of a network that is trained with `changes` of the recipe."""
    task, recipe = Retrieval(), replace(RECIPE, seed=seed, **changes)
    list(run.train(folder, MODEL, task.open_data("digits"), recipe, RunOptions(task=task.name)))
    return named(tasks.load(folder).scores["test"])


def untrained_scores(seed: int) -> dict[str, float]:
    """Those of random weights, whose batch norms have their initial statistics."""
    task, recipe = Retrieval(), replace(RECIPE, seed=seed)
    data = task.open_data("digits")
    net, pre = prepare.initial_network(MODEL, task, data, recipe)
    return named(score_images(net.eval(), task, data.test, BatchOptions(pre, "cpu")).scores)


def pixel_scores() -> dict[str, float]:
    """Those of the 64 pixels of an image as its embedding."""
    images = Retrieval().open_data("digits").test
    pixels = np.stack([np.array(picture, np.float32).ravel() for _, picture in images.readable()])
    return named(retrieval_scores(torch.from_numpy(pixels), torch.tensor(images.targets)))


def named(scores: Mapping[str, float]) -> dict[str, float]:
    return {metric.name: scores[metric.name] for metric in METRICS}


def page(rows: Mapping[str, list[dict[str, float]]]) -> str:
    """The means over seeds, and in how many the triplet loss is better, as Markdown."""
    first, second = (rows[name] for name in ROWS)
    name = METRICS[0].name
    better = sum(b[name] > a[name] for a, b in zip(first, second, strict=True))
    lines = [
        TITLE,
        "",
        f"Means of {len(first)} seeds in percent on the 500 test digits, by "
        "`benchmarks/retrieval.py`.",
        f"{METRICS[0].label} is higher with the triplet loss in {better} of {len(first)} seeds.",
        "",
        f"| embedding | {' | '.join(metric.label for metric in METRICS)} |",
        f"|---{'|---' * len(METRICS)}|",
    ]
    for row, scores in rows.items():
        means = (statistics.mean(each[metric.name] for each in scores) for metric in METRICS)
        lines.append(f"| {row} | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="a folder for the runs, to go on after a stop")
    words = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, float]]] = {
        "raw pixels": [pixel_scores()],
        "random weights": [untrained_scores(seed) for seed in range(words.seeds)],
        **{name: [] for name in ROWS},
    }
    with tempfile.TemporaryDirectory() as scratch:
        runs = words.runs or Path(scratch)
        for seed in range(words.seeds):
            for number, (name, changes) in enumerate(ROWS.items()):
                rows[name].append(trained_scores(changes, seed, runs / f"{number}-{seed}"))
                print(f"seed {seed}, {name}: {rows[name][-1]}", flush=True)
    content = {
        "recipe": asdict(RECIPE),
        "changes": ROWS,
        "rows": rows,
        "environment": asdict(Environment.here("cpu")),
    }
    with atomic_write(words.out, OUTPUT) as temporary:
        temporary.write_text(json.dumps(content, indent=1))
    with atomic_write(words.out.with_suffix(".md"), PAGE) as temporary:
        temporary.write_text(page(rows))
    print(page(rows))


if __name__ == "__main__":
    main()
