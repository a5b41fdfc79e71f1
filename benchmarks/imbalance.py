"""What do class weights, balanced sampling and focal loss bring where classes are unbalanced?

    python benchmarks/imbalance.py --out benchmarks/imbalance.json

The classes of the digits have 100 to 2 training images, a factor of 50 in equal steps of the
logarithm; which class is rare, and which of its images are left, depends on the seed. genet_tiny is
trained from scratch by the recipe `digits` at 32 pixels, with a batch of 32 for 60 epochs. Scores
are of the 500 test digits, of which each class has about 50; macro-F1 is the mean of the classes'
F1. The JSON has every score, and the printed table the means of 3 seeds and in how many seeds a row
is better than the first one.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from fullstride.data.dataset import DataSet, open_data
from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.train import run, run_folder
from fullstride.train.recipes.named import DIGITS

RATIO, MOST = 50, 100
RECIPE = replace(DIGITS, epochs=60, resolution=32, batch_size=32, lr=0.15)
ROWS = {
    "as they are": {},
    "balanced_sampling 0.5": {"balanced_sampling": 0.5},
    "balanced_sampling 1": {"balanced_sampling": 1.0},
    "class_weights sqrt": {"class_weights": "sqrt"},
    "class_weights balanced": {"class_weights": "balanced"},
    "loss focal": {"loss": "focal"},
    "loss bce": {"loss": "bce"},
}
SCORES = ("macro_f1", "balanced_accuracy", "top1")
OUTPUT = json_output("a study of unbalanced classes", "ratio", "recipe", "rows")


def unbalanced(seed: int) -> DataSet:
    """The digits with `MOST` to `MOST` / `RATIO` training images of a class."""
    data, rng = open_data("digits"), np.random.default_rng(seed)
    labels = np.array(data.train.targets)
    counts = np.rint(MOST * RATIO ** -np.linspace(0, 1, 10)).astype(int)[rng.permutation(10)]
    chosen = [
        rng.permutation(np.flatnonzero(labels == label))[:count]
        for label, count in enumerate(counts)
    ]
    return replace(data, train=data.train.subset(np.concatenate(chosen).tolist()))


def scores_of(changes: dict[str, object], seed: int) -> dict[str, float]:
    """Test scores of a network that is trained with `changes` of the recipe."""
    with tempfile.TemporaryDirectory() as folder:
        path, recipe = Path(folder) / "run", replace(RECIPE, seed=seed, **changes)
        list(run.train(path, "genet_tiny", unbalanced(seed), recipe))
        metadata = json.loads((path / run_folder.BUNDLE / "bundle.json").read_text())
    return {name: metadata["scores"]["test"][name] for name in SCORES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    words = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    for name, changes in ROWS.items():
        for seed in range(words.seeds):
            rows[name].append(scores_of(changes, seed))
        first = rows["as they are"]
        better = sum(a["macro_f1"] > b["macro_f1"] for a, b in zip(rows[name], first, strict=True))
        means = [statistics.mean(score[each] for score in rows[name]) for each in SCORES]
        values = "  ".join(f"{each} {mean:.1f}" for each, mean in zip(SCORES, means, strict=True))
        print(f"{name:24}{values}  better in {better} of {words.seeds}", flush=True)
    content = {
        "ratio": RATIO,
        "recipe": asdict(RECIPE),
        "rows": rows,
        "environment": asdict(Environment.here("cpu")),
    }
    with atomic_write(words.out, OUTPUT) as temporary:
        temporary.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
