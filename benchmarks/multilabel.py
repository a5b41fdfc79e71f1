"""Which digits are in a scene? The mAP of the task multilabel against baselines.

    python benchmarks/multilabel.py --out benchmarks/multilabel.json

Scenes of `fullstride.examples` at 32 pixels have up to 2 white digits on a dark photograph. The
500 scenes of the test have digits of other writers, and other photographs. genet_tiny is trained
from scratch with binary cross-entropy and with the asymmetric loss; the classifier is trained for
as many steps, by softmax, on the scenes that show one digit alone. Constant scores have the base
rate as their mAP: the share of the scenes with a label, in the mean of the labels. Each seed draws
other scenes and other weights; the table has the means of the seeds and their standard deviations.
The JSON is written after each row and has all scores; beside it is the table as a page.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullstride.data.dataset import DataSet
from fullstride.deploy.predict import inputs, logits
from fullstride.examples import Look, write_scenes
from fullstride.io.writing import Output, atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.nets.bundle import Bundle
from fullstride.tasks import find_task
from fullstride.tasks.multilabel import MultiLabelScore
from fullstride.train import run, run_folder
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.recipe import Recipe

FEW_LARGE = Look(most=2, sides=(0.5, 0.75), is_plain=True)
SIDE, MODEL = 32, "genet_tiny"
COUNTS = {"train": 2000, "val": 150, "test": 500}
RECIPE = Recipe(
    epochs=10,
    batch_size=32,
    lr=0.1,
    resolution=SIDE,
    weight_decay=1e-4,
    warmup_epochs=1,
    ema_decay=0.99,
    scale=(1.0, 1.0),  # a crop would cut digits off
)
ASYMMETRIC = {
    "loss": "focal",
    "focal_gamma": 0.0,
    "task_options": {"focal_gamma_negative": 4.0, "focal_shift": 0.05},
}
ROWS: Mapping[str, dict[str, Any]] = {
    "binary cross-entropy": {},
    "asymmetric loss": ASYMMETRIC,
}
CLASSIFIER, BASE = "classifier of one digit", "base rate (constant scores)"
SCORES = ("map", "cf1", "of1", "mean_f1")
OUTPUT = json_output("a study of several labels", "recipe", "base_rate", "rows")
PAGE = Output("a table of several labels", ".md", lambda path: TITLE in path.read_text())
TITLE = "# Which digits are in a scene"


@dataclass(frozen=True)
class Plan:
    """The size of the study."""

    counts: Mapping[str, int]
    recipe: Recipe
    look: Look = FEW_LARGE


def scenes(folder: Path, plan: Plan, seed: int) -> DataSet:
    write_scenes(folder, plan.counts, SIDE, seed, look=plan.look)
    # mirrored digits are other signs
    return replace(find_task("multilabel").open_data(str(folder)), mirror=False)


def base_rate(data: DataSet) -> float:
    """The mAP in percent of equal scores for all images of the test."""
    labels = [label for target in data.test.targets for label in target]
    return 100 * len(labels) / len(data.test) / len(data.classes)


def multilabel_scores(data: DataSet, recipe: Recipe, folder: Path) -> dict[str, float]:
    list(run.train(folder, MODEL, data, recipe, RunOptions(task="multilabel")))
    content = json.loads((folder / run_folder.BUNDLE / "bundle.json").read_text())
    return {name: content["scores"]["test"][name] for name in SCORES}


def classifier_scores(data: DataSet, recipe: Recipe, folder: Path) -> dict[str, float]:
    """Of the softmax of a classifier, where a class is predicted from a probability of 0.5 on."""
    alone = replace(data, train=with_one(data.train), val=with_one(data.val))
    alone = replace(alone, test=with_one(data.test)).with_targets(data.classes, lambda t: t[0])
    epochs = round(recipe.epochs * len(data.train) / len(alone.train))
    list(run.train(folder, MODEL, alone, replace(recipe, epochs=epochs)))
    bundle = Bundle.load(folder / run_folder.BUNDLE)
    _, pictures = zip(*data.test.readable(), strict=True)
    outputs = logits(bundle, list(inputs("normalised", bundle.preprocessing, pictures)))
    score = MultiLabelScore()
    has_nk = torch.zeros(len(data.test), len(data.classes))
    for row, target in zip(has_nk, data.test.targets, strict=True):
        row[list(target)] = 1
    score.update(torch.as_tensor(outputs).double().softmax(1).logit(eps=1e-12), has_nk)
    return {name: score.compute()[name] for name in SCORES}


def with_one(images: Any) -> Any:
    """Those with one label."""
    return images.subset(i for i, target in enumerate(images.targets) if len(target) == 1)


def study(plan: Plan, seeds: int, folder: Path) -> Any:
    """Yields the results so far, after each training."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in (*ROWS, CLASSIFIER)}
    rates: list[float] = []
    for seed in range(seeds):
        data = scenes(folder / f"scenes{seed}", plan, seed)
        rates.append(base_rate(data))
        for name in rows:
            recipe = replace(plan.recipe, seed=seed, **ROWS.get(name, {}))
            train = classifier_scores if name == CLASSIFIER else multilabel_scores
            rows[name].append(train(data, recipe, folder / f"{name} {seed}"))
            yield {"recipe": asdict(plan.recipe), "base_rate": rates, "rows": rows}


def page(content: Mapping[str, Any]) -> str:
    """The table as Markdown, with the means of the seeds and their standard deviations."""
    rates = content["base_rate"]
    lines = [TITLE, "", (__doc__ or "").split("\n\n")[2].strip(), ""]
    lines += ["| scores, % | mAP | CF1 | OF1 | mean F1 | seeds |", "|---|---|---|---|---|---|"]
    lines += [f"| {BASE} | {mean_and_deviation(rates)} | - | - | - | {len(rates)} |"]
    for name, scores in content["rows"].items():
        if scores:
            values = (mean_and_deviation([each[key] for each in scores]) for key in SCORES)
            lines.append(f"| {name} | {' | '.join(values)} | {len(scores)} |")
    return "\n".join(lines) + "\n"


def mean_and_deviation(values: Sequence[float]) -> str:
    """For example "39.4 ± 1.2"; the mean alone of one value."""
    deviation = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    words = parser.parse_args()
    torch.set_num_threads(1)
    environment = asdict(Environment.here("cpu"))  # of the code that is loaded now
    with tempfile.TemporaryDirectory() as folder:
        for content in study(Plan(COUNTS, RECIPE), words.seeds, Path(folder)):
            content = {**content, "environment": environment}
            with atomic_write(words.out, OUTPUT) as temporary:
                temporary.write_text(json.dumps(content, indent=1))
            with atomic_write(words.out.with_suffix(".md"), PAGE) as temporary:
                temporary.write_text(page(content))
            print(page(content).partition("| scores")[2], flush=True)


if __name__ == "__main__":
    main()
