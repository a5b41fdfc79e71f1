"""Writes the pictures of benchmarks/finetune.py as folders train/, val/ and test/, by class.

All networks and peers read the same PNG files. The pictures come from the sources that
`finetune.py --help` names; nothing of them is a part of the project.
"""

import io
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from defaults import balanced, digits, fashion, find_file
from PIL import Image

ELPV_SIDE, STAMP_SIDE = 150, 140  # pixels of the stored pictures of solar cells and stamps
LEVELS = (0.0, 1 / 3, 2 / 3, 1.0)  # probabilities of a defect, as elpv-dataset rounds them
THEMES = ("animals", "clothes", "food", "household", "vehicles", "town", "plants", "seasonal")
DRAWN_THEMES = THEMES[:5]  # those with photographs and drawings of things

Pictures = list[Image.Image]
Part = tuple[Pictures, list[str]]  # pictures, and the class of each


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One set of training images, and how long a network may train on it."""

    name: str
    side: int  # pixels at which networks train
    minutes: float  # of one core, for the default
    source: Callable[[Path, int], tuple[Part, Part]]  # (data, seed) -> training and test
    seeds: int = 3
    has_shift: bool = False  # whether the test images are of another kind

    def write(self, data: Path, seed: int, work: Path) -> Path:
        """The folder with train/, val/ and test/; val/ has a sixth of the training images."""
        folder = work / f"{self.name}-{seed}"
        if folder.is_dir():
            return folder
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        (pictures, labels), (others, answers) = self.source(data, seed)
        order = np.random.default_rng([seed, 1]).permutation(len(labels))
        ranked = sorted(order, key=lambda i: rank_in_class(labels, order)[i])
        val = {*ranked[-max(len(labels) // 6, 1) :]}
        for index, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
            save(picture, part / ("val" if index in val else "train") / label / f"{index:05}.png")
        for index, (picture, label) in enumerate(zip(others, answers, strict=True)):
            save(picture, part / "test" / label / f"{index:05}.png")
        part.rename(folder)
        return folder


def rank_in_class(labels: list[str], order: np.ndarray) -> dict[int, float]:
    """The place of each picture among those of its class, as a share of them."""
    counts: dict[str, int] = {}
    places = {}
    for index in order:
        counts[labels[index]] = counts.get(labels[index], 0) + 1
        places[index] = counts[labels[index]]
    return {index: place / counts[labels[index]] for index, place in places.items()}


def save(picture: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.convert("RGB").save(path, compress_level=1)


def images_of(pixels: np.ndarray, labels: np.ndarray) -> Part:
    return [Image.fromarray(each) for each in pixels], [str(label) for label in labels]


def from_fashion(count: int, tests: int) -> Callable[[Path, int], tuple[Part, Part]]:
    def source(data: Path, seed: int) -> tuple[Part, Part]:
        (x, y), (others, answers), _ = fashion(data)
        chosen = balanced(y, count, seed)
        return images_of(x[chosen], y[chosen]), images_of(others[:tests], answers[:tests])

    return source


def from_digits(count: int) -> Callable[[Path, int], tuple[Part, Part]]:
    def source(data: Path, seed: int) -> tuple[Part, Part]:
        (x, y), (others, answers), _ = digits(data)
        chosen = balanced(y, count, seed)
        return images_of(x[chosen], y[chosen]), images_of(others, answers)

    return source


@cache
def solar_cells(data: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """elpv's photographs (N, H, W), the probability of a defect, and the type of each cell."""
    with zipfile.ZipFile(find_file(data, "elpv_dataset-*.whl", "PyPI's elpv-dataset")) as wheel:
        lines = wheel.read("elpv_dataset/data/labels.csv").decode().splitlines()
        names, probabilities, types = zip(*(line.split()[:3] for line in lines), strict=True)

        def pixels(name: str) -> np.ndarray:
            image = Image.open(io.BytesIO(wheel.read(f"elpv_dataset/data/{name}"))).convert("L")
            return np.asarray(image.resize((ELPV_SIDE, ELPV_SIDE), Image.Resampling.BICUBIC))

        x = np.stack([pixels(name) for name in names])
    return x, np.array(probabilities, float), np.array(types)


def defects(count: int) -> Callable[[Path, int], tuple[Part, Part]]:
    """Cells that are certainly intact or certainly defective; always the same 1,000 to test."""

    def source(data: Path, seed: int) -> tuple[Part, Part]:
        x, p, _ = solar_cells(data)
        certain = np.flatnonzero((p == 0) | (p == 1))
        order = np.random.default_rng(0).permutation(certain)
        test, rest = order[:1000], order[1000:]
        names = np.where(p == 1, "defective", "intact")
        chosen = rest[balanced(names[rest], count, seed)]
        return images_of(x[chosen], names[chosen]), images_of(x[test], names[test])

    return source


def levels(data: Path, seed: int) -> tuple[Part, Part]:
    """All cells by the four probabilities of a defect; always the same 1,000 to test."""
    x, p, _ = solar_cells(data)
    names = np.array([f"{min(LEVELS, key=lambda level: abs(level - each)):.2f}" for each in p])
    order = np.random.default_rng(0).permutation(len(p))
    return images_of(x[order[1000:]], names[order[1000:]]), images_of(
        x[order[:1000]], names[order[:1000]]
    )


def other_cells(data: Path, seed: int) -> tuple[Part, Part]:
    """Polycrystalline cells for training, monocrystalline ones for the test."""
    x, p, types = solar_cells(data)
    names = np.where(p > 0.5, "defective", "intact")
    train, test = types == "poly", types == "mono"
    return images_of(x[train], names[train]), images_of(x[test], names[test])


@cache
def stamps(data: Path) -> tuple[Pictures, list[str], list[bool]]:
    """tuxpaint's stamps on white squares, the theme of each, and whether it is a drawing."""
    import resvg_py

    roots = [path for path in sorted(data.rglob("stamps")) if (path / "animals").is_dir()]
    if not roots:
        raise ValueError(f"{data} has no stamps: get Debian's tuxpaint-stamps-default, see --help")
    pictures, names, drawn = [], [], []
    for path in sorted([*roots[0].rglob("*.png"), *roots[0].rglob("*.svg")]):
        parts = path.relative_to(roots[0]).parts
        if parts[0] not in THEMES or {"flags", "roadsigns"} & {*parts}:
            continue
        if path.suffix == ".svg":
            try:
                drawing = resvg_py.svg_to_bytes(svg_path=str(path), width=2 * STAMP_SIDE)
            except ValueError:  # some state no size
                continue
            image = Image.open(io.BytesIO(bytes(drawing)))
        else:
            image = Image.open(path)
        pictures.append(on_white(image.convert("RGBA")))
        names.append(parts[0])
        drawn.append("cartoon" in parts or path.suffix == ".svg")
    return pictures, names, drawn


def on_white(image: Image.Image) -> Image.Image:
    image.thumbnail((2 * STAMP_SIDE, 2 * STAMP_SIDE))
    side = max(image.size)
    square = Image.new("RGBA", (side, side), "white")
    square.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square.convert("RGB").resize((STAMP_SIDE, STAMP_SIDE), Image.Resampling.BICUBIC)


def themes(data: Path, seed: int) -> tuple[Part, Part]:
    """Stamps by theme; always the same 250 to test."""
    pictures, names, _ = stamps(data)
    order = np.random.default_rng(0).permutation(len(names))
    return some(pictures, names, order[250:]), some(pictures, names, order[:250])


def drawings(data: Path, seed: int) -> tuple[Part, Part]:
    """Photographs of stamps for training, drawings of the same themes for the test."""
    pictures, names, drawn = stamps(data)
    things = [index for index, name in enumerate(names) if name in DRAWN_THEMES]
    photographs = np.array([index for index in things if not drawn[index]])
    return some(pictures, names, photographs), some(
        pictures, names, np.array([index for index in things if drawn[index]])
    )


def some(pictures: Pictures, names: list[str], chosen: np.ndarray) -> Part:
    return [pictures[index] for index in chosen], [names[index] for index in chosen]


CELLS = (
    Cell(name="fashion_60", side=64, minutes=1, source=from_fashion(72, 1000)),
    Cell(name="digits_100", side=64, minutes=1, source=from_digits(120)),
    Cell(name="drawings", side=96, minutes=1.25, source=drawings, has_shift=True),
    Cell(name="defect_250", side=96, minutes=1.5, source=defects(300)),
    Cell(name="themes", side=96, minutes=1.5, source=themes),
    Cell(name="fashion_1000", side=64, minutes=2, source=from_fashion(1200, 1000), seeds=1),
    Cell(name="other_cells", side=96, minutes=3, source=other_cells, has_shift=True),
    Cell(name="levels", side=96, minutes=3, source=levels, seeds=1),
    Cell(name="fashion_10000", side=64, minutes=4, source=from_fashion(12_000, 2000), seeds=1),
)
