"""Does the triplet loss retrieve better the digits of people that were not trained on?

    python benchmarks/retrieval.py --out benchmarks/retrieval.json

genet_tiny is trained for retrieval on the digits at 16 pixels, in batches of 8 images of each of 8
classes, with cross-entropy alone and with the weighted triplet loss beside it. Queries are the 500
test images, which other people wrote: classes are known, writers are not. The digits are in the
order of the forms that people filled in, see `forms`, and the gallery of a query is the digits on
other forms: on its own form, the nearest in pixels is mostly the same digit by the same hand.
Baselines are the raw pixels, and the embeddings of the network before training. The JSON has every
score, also those with the whole test as the gallery, and the page beside it the means over 3 seeds.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullstride import tasks
from fullstride.data.dataset import Images
from fullstride.io.writing import Output, atomic_write, begins_with, json_output
from fullstride.measure.environment import Environment
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.retrieval import METRICS, Retrieval, RetrievalScore, retrieval_scores
from fullstride.tasks.task import Task
from fullstride.train import prepare, run
from fullstride.train.batches import BatchOptions
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS
from fullstride.train.scoring import score_images

MODEL = "genet_tiny"
RECIPE = replace(DIGITS, epochs=30, warmup_epochs=2, resolution=16, batch_size=64, per_class=8)
ROWS: dict[str, dict[str, Any]] = {"cross-entropy": {}, "with the triplet loss": {"triplet": 0.3}}
TITLE = "# Retrieval of digits by writers that were not trained on"
WHOLE = "_whole"  # ends the names of scores whose gallery has the query's own form
SAME_FORM = "same_form"  # percent of images whose nearest one of the whole gallery is on their form
Scores = dict[str, float]
OUTPUT = json_output("a study of retrieval", "recipe", "changes", "rows")
PAGE = Output("a page of it", ".md", begins_with(TITLE.encode()))


def forms(labels: Sequence[int]) -> Tensor:
    """The number of the form that each digit is on: labels (N,) -> (N,).

    All people wrote the same digits: 0 to 9 three times, and then about a hundred in an order that
    repeats in the labels. So a form begins at 0 1 2 3 4 5, if that is not in the 30 labels before.
    """
    tens = [i for i in range(len(labels)) if [*labels[i : i + 6]] == [0, 1, 2, 3, 4, 5]]
    begins = [i for i, before in zip(tens, [-inf, *tens], strict=False) if i - before > 30]
    return torch.searchsorted(torch.tensor(begins), torch.arange(len(labels)), right=True)


def scores_of(embeddings_nd: Tensor, labels_n: Tensor) -> dict[str, float]:
    """Scores of test embeddings, and what the own form of a query would add to them."""
    forms_n = forms(labels_n.tolist())
    whole = retrieval_scores(embeddings_nd, labels_n)
    distances_nn = torch.cdist(embeddings_nd.double(), embeddings_nd.double())
    nearest_n = distances_nn.fill_diagonal_(inf).argmin(1)
    return {
        **retrieval_scores(embeddings_nd, labels_n, forms_n),
        **{name + WHOLE: score for name, score in whole.items()},
        SAME_FORM: 100 * (forms_n[nearest_n] == forms_n).double().mean().item(),
    }


def same_form_by_chance(labels_n: Tensor) -> float:
    """`SAME_FORM` in percent if the nearest image were any other image of its class."""
    forms_n = forms(labels_n.tolist())
    others_nn = (labels_n[:, None] == labels_n).fill_diagonal_(False)
    same_nn = others_nn & (forms_n[:, None] == forms_n)
    return 100 * (same_nn.sum(1) / others_nn.sum(1)).mean().item()


def network_scores(net: nn.Module, task: Task, images: Images, pre: Preprocessing) -> Scores:
    score = score_images(net.eval(), task, images, BatchOptions(pre, "cpu")).score
    assert isinstance(score, RetrievalScore)
    return scores_of(torch.cat(score.embeddings), torch.cat(score.labels))


def trained_scores(changes: Mapping[str, Any], seed: int, folder: Path) -> Scores:
    """Test scores of a network that is trained with `changes` of the recipe."""
    task, recipe = Retrieval(), replace(RECIPE, seed=seed, **changes)
    data = task.open_data("digits")
    list(run.train(folder, MODEL, data, recipe, RunOptions(task=task.name)))
    bundle = tasks.load(folder)
    return network_scores(bundle.net, tasks.task_of(bundle), data.test, bundle.preprocessing)


def untrained_scores(seed: int) -> Scores:
    """Those of random weights, whose batch norms have their initial statistics."""
    task, recipe = Retrieval(), replace(RECIPE, seed=seed)
    data = task.open_data("digits")
    net, pre = prepare.initial_network(MODEL, task, data, recipe)
    return network_scores(net, task, data.test, pre)


def pixels_of_test() -> tuple[Tensor, Tensor]:
    """The 64 pixels of each test image as its embedding, and its label: (500, 64), (500,)."""
    images = Retrieval().open_data("digits").test
    pixels = np.stack([np.array(picture, np.float32).ravel() for _, picture in images.readable()])
    return torch.from_numpy(pixels), torch.tensor(images.targets)


def page(rows: Mapping[str, list[Scores]], chance: float) -> str:
    """The means over seeds, and in how many the triplet loss is better, as Markdown."""
    first, second = (rows[name] for name in ROWS)
    name = METRICS[0].name
    better = sum(b[name] > a[name] for a, b in zip(first, second, strict=True))
    whole = f"{METRICS[0].label}, whole gallery"
    columns = {metric.name: metric.label for metric in METRICS}
    columns |= {name + WHOLE: whole, SAME_FORM: "nearest on the own form"}
    lines = [
        TITLE,
        "",
        f"Means of {len(first)} seeds in percent on the 500 test digits, by "
        "`benchmarks/retrieval.py`.",
        "The gallery of a query is the digits on forms other than its own, so of other writers.",
        f"{METRICS[0].label} is higher with the triplet loss in {better} of {len(first)} seeds.",
        "",
        "The last two columns have all other 499 digits as the gallery, with the query's own form.",
        f"By chance, {chance:.1f} % of the nearest digits of a class would be on that form.",
        "",
        f"| embedding | {' | '.join(columns.values())} |",
        f"|---{'|---' * len(columns)}|",
    ]
    for row, scores in rows.items():
        means = (statistics.mean(each[column] for each in scores) for column in columns)
        lines.append(f"| {row} | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="a folder for the runs, to go on after a stop")
    words = parser.parse_args()
    torch.set_num_threads(1)
    pixels_nd, labels_n = pixels_of_test()
    chance = same_form_by_chance(labels_n)
    rows: dict[str, list[Scores]] = {
        "raw pixels": [scores_of(pixels_nd, labels_n)],
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
        "same_form_by_chance": chance,
        "environment": asdict(Environment.here("cpu")),
    }
    with atomic_write(words.out, OUTPUT) as temporary:
        temporary.write_text(json.dumps(content, indent=1))
    with atomic_write(words.out.with_suffix(".md"), PAGE) as temporary:
        temporary.write_text(page(rows, chance))
    print(page(rows, chance))


if __name__ == "__main__":
    main()
