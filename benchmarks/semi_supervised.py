"""Is a student that also sees images without labels better than its teacher?

    python benchmarks/semi_supervised.py --out benchmarks/semi_supervised.json

The teacher is timm's test_resnet (0.37 M parameters) on 40 labelled digits, four of each class,
which depend on the seed. It labels the other 1,257 digits of the same writers, and a student is
trained on both from random weights: the loss and the batches of Noisy Student, with a ratio of 1.
Scores are top-1 of the 500 test digits, of other people; nothing is chosen by them. The baselines
are a teacher that is trained for as many steps on as many images a step as the student, and the
supervised network with all 1,297 labels. Each row has the mean of 3 seeds, and in how many of them
it is better than the teacher.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from fullstride import tasks
from fullstride.data.dataset import DataSet, open_data
from fullstride.data.readers.splits import SplitRule
from fullstride.data.unlabelled import open_unlabelled
from fullstride.deploy.offline import OfflineSettings, write_outputs
from fullstride.io.writing import Output, atomic_write, begins_with, json_output
from fullstride.measure.environment import Environment
from fullstride.train import run, run_folder
from fullstride.train.recipes.named import DIGITS

MODEL, PER_CLASS, STEPS, BATCH = "timm/test_resnet", 4, 300, 40
RECIPE = replace(
    DIGITS, batch_size=BATCH, resolution=32, lr=0.05, ema_decay=0.99, score_every_epochs=STEPS
)
ROWS = {
    "teacher, 40 labels": "baseline",
    "teacher, twice the images": "as many images as the student sees",
    "student, 40 labels and 1,257 images": "joint training",
    "all 1,297 labels": "what labels would give",
}
OUTPUT = json_output("a study of images without labels", "model", "recipe", "rows")
PAGE = Output("a table of it", ".md", begins_with(b"# Images without labels"))


def pool() -> DataSet:
    """The digits without a validation split: 1,297 for training."""
    return open_data("digits", SplitRule(val=0))


def labelled(seed: int) -> tuple[DataSet, list[int]]:
    """The digits with `PER_CLASS` training images of each class, and the indices of the others."""
    data, rng = pool(), np.random.default_rng(seed)
    labels = np.array(data.train.targets)
    chosen = [rng.permutation(np.flatnonzero(labels == label))[:PER_CLASS] for label in range(10)]
    indices = np.concatenate(chosen)
    others = np.setdiff1d(np.arange(len(labels)), indices).tolist()
    return replace(data, train=data.train.subset(indices.tolist())), others


def top1(folder: Path, data: DataSet, **changes: object) -> float:
    """Test top-1 of a network that is trained in `folder`."""
    list(run.train(folder, MODEL, data, replace(RECIPE, **changes)))
    metadata = json.loads((folder / run_folder.BUNDLE / "bundle.json").read_text())
    return metadata["scores"]["test"]["top1"]


def scores(seed: int, folder: Path, steps: int = STEPS, baselines: bool = True) -> dict[str, float]:
    """The top-1 of each row, in the order of `ROWS`; without `baselines` of teacher and student."""
    few, others = labelled(seed)
    how: dict[str, object] = dict(seed=seed, steps=steps)
    result = [top1(folder / "teacher", few, **how)]
    photos, images = folder / "photos", pool().train
    photos.mkdir()
    for index in others:
        images.picture(index).save(photos / f"{index:04}.png")
    teacher, store = tasks.load(folder / "teacher"), folder / "labels"
    write_outputs(
        "pseudo_labels",
        teacher,
        open_unlabelled(str(photos)),
        store,
        10,
        OfflineSettings(batch=128),
    )
    if baselines:
        result.append(top1(folder / "longer", few, **{**how, "steps": 2 * steps}))
    result.append(top1(folder / "student", few, unlabelled=str(store), **how))
    if baselines:
        result.append(top1(folder / "all", pool(), **how))
    names = list(ROWS) if baselines else [list(ROWS)[0], list(ROWS)[2]]
    return dict(zip(names, result, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    words = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[float]] = {name: [] for name in ROWS}
    begin = time.perf_counter()
    for seed in range(words.seeds):
        with tempfile.TemporaryDirectory() as folder:
            for name, score in scores(seed, Path(folder)).items():
                rows[name].append(score)
                print(f"seed {seed}  {name:40}{score:.1f}", flush=True)
    first = rows[next(iter(ROWS))]
    lines = [
        "# Images without labels",
        "",
        "Top-1 on 500 digits of other writers; `python benchmarks/semi_supervised.py`.",
        "",
        "| training | mean of seeds | by seed | above the teacher |",
        "|---|---|---|---|",
    ]
    for name, values in rows.items():
        better = sum(ours > theirs for ours, theirs in zip(values, first, strict=True))
        each = ", ".join(f"{value:.1f}" for value in values)
        lines.append(
            f"| {name} | {statistics.mean(values):.1f} % | {each} | {better} of {words.seeds} |"
        )
    result = {
        "model": MODEL,
        "recipe": asdict(RECIPE),
        "rows": rows,
        "seconds": time.perf_counter() - begin,
        "environment": asdict(Environment.here(torch.device("cpu"))),
    }
    with atomic_write(words.out, OUTPUT) as temporary:
        temporary.write_text(json.dumps(result, indent=1))
    with atomic_write(words.out.with_suffix(".md"), PAGE) as temporary:
        temporary.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
