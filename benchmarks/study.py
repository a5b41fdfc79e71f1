"""What does each step of ResNet-RS's additive study add, on a small scale? And each recipe?

    python benchmarks/study.py --out benchmarks/study.json

The first table is the additive study of arXiv:2103.07579 Table 1 on the package's digits; the
second trains one network, resnet_rs_tiny, by each recipe for the same number of epochs. The seed
sets weights, shuffling and augmentation. The JSON has every score, and study.md next to it the
tables. A stopped study resumes; a row whose recipe or network has changed is trained again.

Everything that is not in this list is as in the recipe. The changes are made because the digits are
1,037 images of 8 x 8 pixels:
- The networks are resnet_rs_tiny and variants without ResNet-D and without squeeze-and-excitation.
  All are initialized as in ResNet-RS's code.
- 32 pixels, batches of 64, 16 steps per epoch. 90 epochs in the paper become 24, 350 become 93. In
  the second table every recipe has 93. The warmup keeps its fraction of training.
- The learning rate per image is RATE times the recipe's: with the published rate the first row has
  not converged (94 % on the validation split). RATE was chosen from 1, 4, 8 and 16 by the
  validation split of seed 0 of the first and the last row (at 60 epochs). The recipe `digits` keeps
  its own.
- The span of the weight average is at most 1/11 of training, as that of 0.9999 is in ResNet-RS's
  109,000 steps.
- The weight decay is the published one; in so few steps it has little effect.
- All rows have random crops of 0.6 to 1.3 of an image and no flips; plain SGD has no augmentation.
- GENet's teacher is a resnet_rs_tiny that was trained by the recipe `digits` with another seed.
- The recipe `finetune` starts from random weights, which it is not meant for.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fullstride.data.dataset import DataSet, open_data
from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.nets.blocks import PoolStem, Style
from fullstride.nets.bundle import Bundle
from fullstride.nets.families.resnet_rs import SPECS
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.spec import NetSpec
from fullstride.tasks.classify import Classify
from fullstride.train import loop
from fullstride.train.batches import BatchOptions, training_batches
from fullstride.train.distill import Teacher
from fullstride.train.recipes import papers
from fullstride.train.recipes.named import DIGITS, RECIPES
from fullstride.train.recipes.recipe import Recipe, saved_recipe
from fullstride.train.scoring import score_images

OUTPUT = json_output("results of a benchmark", "environment", "rows")
SHORT, LONG = 24, 93  # epochs, for 90 and 350 in the paper
SIDE, BATCH, RATE = 32, 64, 4.0
SPAN = 1 / 11  # maximum span of the weight average / training
PRE = Preprocessing(resolution=SIDE, mean=(0.0,), std=(1.0,), kernel="bicubic", crop=1.0)

RESNET_D = replace(SPECS["resnet_rs_tiny"], in_channels=1)
SQUEEZED = replace(RESNET_D, stem=PoolStem, style=Style())
RESNET = replace(SQUEEZED, stages=tuple(replace(stage, se=None) for stage in SQUEEZED.stages))

STUDY = "Table 1 of ResNet-RS in miniature"
FAMILIES = "Recipes on one network"
PLAIN = "plain SGD"


@dataclass(frozen=True, kw_only=True)
class Row:
    table: str
    name: str
    network: NetSpec
    recipe: Recipe
    against: str = ""  # name of the row of the same table that it is compared with
    # top-1 on ImageNet in the paper's table, of ResNet-200 at 256 pixels
    published: float | None = None


def miniature(
    recipe: Recipe, *, short_epochs: float, long_epochs: float, rate: float = RATE
) -> Recipe:
    """`recipe` for the digits, with the changes that the module lists.

    Up to 90 epochs become `short_epochs`, more become `long_epochs`.
    """
    epochs = short_epochs if recipe.epochs <= papers.RESNET.epochs else long_epochs
    steps = epochs * (len(open_data("digits").train) // BATCH)
    here = recipe.at_batch(BATCH)
    return replace(
        here,
        epochs=epochs,
        lr=here.lr * rate,
        warmup_epochs=recipe.warmup_epochs * epochs / recipe.epochs,
        ema_decay=min(recipe.ema_decay, max(0.0, 1 - 1 / (SPAN * steps))),
        teacher="digits" if recipe.teacher else "",
        resolution=SIDE,
        crop=PRE.crop,
        fit=PRE.fit,
        scale=(0.6, 1.3),
        hflip_prob=0.0,
    )


def rows(short_epochs: int, long_epochs: int) -> list[Row]:
    additive = (
        ("ResNet", RESNET, papers.RESNET, 79.0),
        ("+ cosine schedule", RESNET, papers.STUDY_COSINE, 79.3),
        ("+ longer training", RESNET, papers.STUDY_LONGER, 78.8),
        ("+ average of weights", RESNET, papers.STUDY_AVERAGE, 79.1),
        ("+ label smoothing", RESNET, papers.STUDY_SMOOTHING, 80.4),
        ("+ stochastic depth", RESNET, papers.STUDY_DROP_PATH, 80.6),
        ("+ RandAugment", RESNET, papers.STUDY_RAND_AUGMENT, 81.0),
        ("+ dropout", RESNET, papers.STUDY_DROPOUT, 80.7),
        ("+ less weight decay", RESNET, papers.STUDY_DECAY, 82.2),
        ("+ squeeze-and-excitation", SQUEEZED, papers.STUDY_DECAY, 82.9),
        ("+ ResNet-D", RESNET_D, papers.STUDY_DECAY, 83.4),
    )
    table, above = [], ""
    for name, network, recipe, published in additive:
        small = miniature(recipe, short_epochs=short_epochs, long_epochs=long_epochs)
        table.append(
            Row(
                table=STUDY,
                name=name,
                network=network,
                recipe=small,
                against=above,
                published=published,
            )
        )
        above = name

    def for_long(recipe: Recipe, rate: float = RATE) -> Recipe:
        return miniature(recipe, short_epochs=long_epochs, long_epochs=long_epochs, rate=rate)

    plain = replace(for_long(papers.RESNET), scale=(1.0, 1.0), ratio=(1.0, 1.0))
    table.append(Row(table=FAMILIES, name=PLAIN, network=RESNET_D, recipe=plain))
    for name in (
        "resnet_rs",
        "tresnet",
        "tresnet_timm",
        "tresnet_transfer",
        "genet",
        "genet_nas",
        "finetune",
    ):
        recipe = for_long(RECIPES[name])
        table.append(Row(table=FAMILIES, name=name, network=RESNET_D, recipe=recipe, against=PLAIN))
    digits = for_long(DIGITS, rate=1.0)
    return [
        *table,
        Row(table=FAMILIES, name="digits", network=RESNET_D, recipe=digits, against=PLAIN),
    ]


def trained(
    network: NetSpec, recipe: Recipe, data: DataSet, teacher: Teacher | None = None
) -> Network:
    """The network with the averaged weights at the end of training."""
    torch.manual_seed(recipe.seed)
    net = Network(network)
    net.regularise(drop_path=recipe.drop_path, by=recipe.drop_path_by, dropout=recipe.dropout)
    task = Classify()
    batches = training_batches(data, task, BatchOptions(PRE), recipe)
    *_, last = loop.train_epochs(net, task, batches, recipe, teacher=teacher)
    net.load_state_dict(last.state["average"])
    return net


def scores(job: tuple[Row, int]) -> tuple[Row, int, dict[str, float]]:
    row, seed = job
    began, data, teacher = time.process_time(), open_data("digits"), None
    recipe = replace(row.recipe, seed=seed)
    if recipe.teacher:
        own = miniature(DIGITS, short_epochs=recipe.epochs, long_epochs=recipe.epochs, rate=1.0)
        net = trained(RESNET_D, replace(own, seed=1000 + seed), data)
        teacher = Teacher(
            Bundle(net=net, name="teacher", classes=data.classes, preprocessing=PRE), PRE
        )
    net = trained(row.network, recipe, data, teacher)
    top1 = {
        part: score_images(net, Classify(), getattr(data, part), BatchOptions(PRE, "cpu"))[0][
            "top1"
        ]
        for part in ("val", "test")
    }
    return row, seed, {**top1, "cpu_s": round(time.process_time() - began, 1)}


def study(
    out: Path, table: Sequence[Row], protocol: dict[str, Any], seeds: int, processes: int
) -> Iterator[str]:
    """Train what `out` does not have, write `out` after each training, and yield a line about it.

    Raises ValueError if `out` is a study with another protocol.
    """
    result: dict[str, Any] = {"protocol": protocol, "environment": asdict(Environment.here())}
    old = json.loads(out.read_text()) if out.exists() else {"protocol": protocol, "rows": []}
    if old["protocol"] != protocol:
        raise ValueError(
            f"{out} is a study with {old['protocol']}, not {protocol}: give another --out"
        )
    old_rows = {row["name"]: row for row in old["rows"]}
    row_scores = {
        row.name: reusable_scores(old_rows[row.name], row, out) if row.name in old_rows else {}
        for row in table
    }
    result["rows"] = [as_json(row, row_scores[row.name]) for row in table]
    jobs = [
        (row, seed)
        for seed in range(seeds)
        for row in table
        if str(seed) not in row_scores[row.name]
    ]
    if not jobs:
        return
    began = time.perf_counter()
    with get_context("spawn").Pool(min(processes, len(jobs)), torch.set_num_threads, (1,)) as pool:
        for done, (row, seed, score) in enumerate(pool.imap_unordered(scores, jobs), 1):
            row_scores[row.name][str(seed)] = {**score, "commit": result["environment"]["commit"]}
            with atomic_write(out, OUTPUT) as temporary:
                temporary.write_text(json.dumps(result, indent=1) + "\n")
            left = (time.perf_counter() - began) / done * (len(jobs) - done) / 60
            yield (
                f"{done} of {len(jobs)}: {row.name}, seed {seed}: validation {score['val']:.1f}, "
                f"test {score['test']:.1f}, {score['cpu_s']:.0f} CPU-s; about {left:.0f} min left"
            )


def reusable_scores(old: dict[str, Any], row: Row, out: Path) -> dict[str, Any]:
    """The scores of `old` if network and recipe are those of `row`, else none.

    A missing field has its default.
    """
    network = NetSpec.from_json(json.dumps(old["network"]))
    same = network == row.network and saved_recipe(old["recipe"], str(out)) == row.recipe
    return old["scores"] if same else {}


def as_json(row: Row, scores: dict[str, Any]) -> dict[str, Any]:
    names = dict(table=row.table, name=row.name, against=row.against, published=row.published)
    network = json.loads(row.network.to_json())
    return {**names, "network": network, "recipe": asdict(row.recipe), "scores": scores}


@dataclass(frozen=True)
class Summary:
    mean: float
    deviation: float | None  # None: there is only one seed

    @classmethod
    def of(cls, scores: dict[str, Any], part: str) -> "Summary":
        values = [score[part] for score in scores.values()]
        return cls(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f" ± {self.deviation:.2f}")


def difference(row: Summary, other: Summary) -> str:
    """Difference of the means; "(worse)" if `row` is worse by more than the seeds' deviation."""
    change = f"{row.mean - other.mean:+.2f}"
    if row.deviation is None or other.deviation is None:
        return change
    return (
        f"{change} (worse)"
        if other.mean - row.mean > math.hypot(row.deviation, other.deviation)
        else change
    )


def tables(result: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    lines = []
    for table, reference in ((STUDY, "the row above"), (FAMILIES, PLAIN)):
        done = [row for row in result["rows"] if row["table"] == table and row["scores"]]
        test = {row["name"]: Summary.of(row["scores"], "test") for row in done}
        head = ["", "val", "test", f"test, to {reference}"]
        cells = []
        for row in done:
            other = test.get(row["against"])
            change = difference(test[row["name"]], other) if other else ""
            cells.append(
                [
                    row["name"],
                    str(Summary.of(row["scores"], "val")),
                    str(test[row["name"]]),
                    change,
                ]
            )
        if table == STUDY:
            head.append("published, ResNet-200 on ImageNet")
            cells = [
                [*each, f"{row['published']:.1f}"] for each, row in zip(cells, done, strict=True)
            ]
        if done:
            lines += [f"## {table}", "", *aligned([head, *cells]), ""]
    seeds = {seed for row in result["rows"] for seed in row["scores"]}
    protocol, environment = result["protocol"], result["environment"]
    return "\n".join(
        [
            *lines,
            f"Top-1 in percent, mean ± standard deviation over {len(seeds)} seeds, on",
            f"{protocol['val']} digits (validation) and on {protocol['test']} of other writers",
            f"(test). Epochs: {protocol['short_epochs']} for 90 in the paper,",
            f"{protocol['long_epochs']} for 350. Worse: by more than the root of the sum of the",
            "variances. The published column is of another network on other images: compare the",
            "signs of the differences, not their size.",
            f"{environment['device']}, torch {environment['torch']}, one thread per run,",
            f"{environment['date']}.",
        ]
    )


def aligned(table: list[list[str]]) -> list[str]:
    """Lines of a Markdown table; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table = [table[0], ["-" * width for width in widths], *table[1:]]
    return ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in table]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write or to resume")
    parser.add_argument(
        "--table", type=Path, help="print the tables of this JSON file without training"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--processes", type=int, default=2, help="concurrent training runs, of one thread each"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed, 1 epoch for short runs and 2 for long ones",
    )
    args = parser.parse_args(words)
    if args.table:
        print(tables(json.loads(args.table.read_text())))
        return
    if not args.out or args.seeds < 1 or args.processes < 1:
        parser.error(
            "give --out FILE.json or --table FILE.json, and 1 or more --seeds and --processes"
        )
    torch.set_num_threads(1)
    short, long = (1, 2) if args.quick else (SHORT, LONG)
    data = open_data("digits")
    protocol = {
        "short_epochs": short,
        "long_epochs": long,
        **{part: len(getattr(data, part)) for part in ("train", "val", "test")},
    }
    for line in study(
        args.out, rows(short, long), protocol, 1 if args.quick else args.seeds, args.processes
    ):
        print(line, flush=True)
    text = tables(json.loads(args.out.read_text()))
    args.out.with_suffix(".md").write_text(text + "\n")
    print("\n" + text)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"study.py: {error}")
