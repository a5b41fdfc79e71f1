"""What is in a scene? Handwritten digits pasted on photographs, with exact boxes, masks and labels.

    python benchmarks/task_scenes.py SCENES --count 1000 --side 64

The pixels are real: the digits of the package, whose test was written by other people, and
photographs of scikit-learn and matplotlib. The scenes of the test have other digits and other
photographs than those of the training; the digits of "val" are the minival's. A scene is a
function of (seed, split, number). SCENES is read as it is by `open_labels`; for detection,
`annotations/instances_SPLIT.json` has the boxes and the masks of what is visible in COCO's format.
"""

import argparse
import csv
import json
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.cbook
import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image

from fullstride.data.dataset import open_data

SPLITS = {"train": "train", "val": "minival", "test": "test"}  # -> of the digits
COUNTS = {"train": 1000, "val": 200, "test": 500}
MIN_VISIBLE = 0.7  # of a digit's pixels that later ones leave visible
MIN_CONTRAST = 60  # grey levels between a digit and what is below it in the mean
TRIES = 20  # of placing a digit


class Digits(NamedTuple):
    images: np.ndarray  # uint8 (N, 8, 8)
    labels: np.ndarray  # int (N,)


class Look(NamedTuple):
    """How many digits a scene has, how large they are, and how clear."""

    most: int = 4  # digits; all numbers from 0 are equally frequent
    sides: tuple[float, float] = (0.22, 0.5)  # of a digit, as shares of the scene's
    is_plain: bool = False  # white digits on a photograph of half its brightness


LOOK = Look()


class Scene(NamedTuple):
    image: np.ndarray  # uint8 (side, side, 3)
    boxes: np.ndarray  # int (n, 4): left, top, right, bottom of the visible pixels; right exclusive
    labels: np.ndarray  # int (n,): which digit
    mask: np.ndarray  # uint8 (side, side): 1 + the number of the digit on top, 0: none


@cache
def load_digits(split: str) -> Digits:
    images = getattr(open_data("digits"), SPLITS[split])
    pictures = [np.asarray(images.picture(index)) for index in range(len(images))]
    return Digits(np.stack(pictures), np.array(images.targets))


@cache
def load_textures(split: str) -> tuple[np.ndarray, ...]:
    """Photographs (H, W, 3) uint8; those of the test are not those of the training."""
    if split == "test":
        return (load_sample_image("flower.jpg"),)
    portrait = matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    with Image.open(portrait) as image:
        return load_sample_image("china.jpg"), np.asarray(image.convert("RGB"))


def scene(
    rng: np.random.Generator,
    digits: Digits,
    textures: Sequence[np.ndarray],
    side: int,
    look: Look = LOOK,
) -> Scene:
    """A square of a photograph with digits of random number, size, place and colour."""
    image = _background(rng, textures, side) * np.float32(0.5 if look.is_plain else 1)
    mask, labels = np.zeros((side, side), np.uint8), []
    smallest, largest = (round(share * side) for share in look.sides)
    for _ in range(rng.integers(look.most + 1)):
        index, colour = rng.integers(len(digits.labels)), _colour(rng, look)
        for _ in range(TRIES):
            size = int(rng.integers(smallest, largest + 1))
            top, left = rng.integers(0, side - size + 1, 2)
            place = (slice(top, top + size), slice(left, left + size))
            picture = Image.fromarray(digits.images[index])
            alpha = np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC)) / 255
            covered = np.where(alpha > 0.5, len(labels) + 1, mask[place])
            if abs(colour.mean() - image[place][alpha > 0.5].mean()) < MIN_CONTRAST:
                colour = _colour(rng, look)
            elif _leaves_visible(mask, mask[place], covered):
                image[place] += alpha[..., None] * (colour - image[place])
                mask[place] = covered
                labels.append(int(digits.labels[index]))
                break
    boxes = [_box(mask == number) for number in range(1, len(labels) + 1)]
    shape = (len(labels), 4)
    return Scene(image.astype(np.uint8), np.reshape(boxes, shape).astype(int), _int(labels), mask)


def _colour(rng: np.random.Generator, look: Look) -> np.ndarray:
    return np.full(3, 255) if look.is_plain else rng.integers(0, 256, 3)


def _int(values: Sequence[int]) -> np.ndarray:
    return np.array(values, int)


def _background(rng: np.random.Generator, textures: Sequence[np.ndarray], side: int) -> np.ndarray:
    """A random square of a random photograph, in one of eight orientations."""
    texture = textures[rng.integers(len(textures))]
    height, width = texture.shape[:2]
    size = int(rng.integers(min(height, width) // 4, min(height, width)))
    top, left = rng.integers(height - size + 1), rng.integers(width - size + 1)
    square = Image.fromarray(texture[top : top + size, left : left + size])
    pixels = np.asarray(square.resize((side, side), Image.Resampling.BILINEAR))
    pixels = np.rot90(pixels, rng.integers(4))
    return pixels[:, ::-1] if rng.integers(2) else pixels


def _leaves_visible(mask: np.ndarray, before: np.ndarray, after: np.ndarray) -> bool:
    """Whether all digits that are in a place `before` keep enough of their visible pixels."""
    for number in np.unique(before[before > 0]):
        lost = (before == number).sum() - (after == number).sum()
        if lost > (1 - MIN_VISIBLE) * (mask == number).sum():
            return False
    return True


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1


def split_scene(number: int, side: int, seed: int, split: str, look: Look = LOOK) -> Scene:
    """Scene `number` of a split."""
    rng = np.random.default_rng([seed, [*SPLITS].index(split), number])
    return scene(rng, load_digits(split), load_textures(split), side, look)


def write_scenes(
    folder: Path, count: int, side: int, seed: int, split: str, look: Look = LOOK
) -> None:
    """Write `split`/00000.png and so on, `split`/labels.csv, and annotations in COCO's format.

    The masks are uncompressed run lengths down the columns, beginning with zeros.
    """
    (folder / split).mkdir(parents=True, exist_ok=True)
    (folder / "annotations").mkdir(exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    rows = [("path", "labels")]
    for number in range(count):
        each, name = split_scene(number, side, seed, split, look), f"{number:05}.png"
        Image.fromarray(each.image).save(folder / split / name)
        rows.append((name, ";".join(map(str, sorted({*each.labels.tolist()})))))
        images.append({"id": number, "file_name": name, "width": side, "height": side})
        for index, (label, box) in enumerate(zip(each.labels, each.boxes.tolist(), strict=True)):
            visible = each.mask == index + 1
            left, top, right, bottom = box
            annotations.append(
                {
                    "id": len(annotations),
                    "image_id": number,
                    "category_id": int(label),
                    "bbox": [left, top, right - left, bottom - top],
                    "area": int(visible.sum()),
                    "iscrowd": 0,
                    "segmentation": {"counts": run_lengths(visible), "size": [side, side]},
                }
            )
    with (folder / split / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    categories = [{"id": digit, "name": str(digit)} for digit in range(10)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def run_lengths(mask: np.ndarray) -> list[int]:
    """The lengths of runs of zeros and ones in turn, down the columns of a mask (H, W)."""
    runs = [(value, len([*run])) for value, run in groupby(mask.T.ravel().tolist())]
    return [0] * bool(runs and runs[0][0]) + [length for _, length in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=COUNTS["train"], help="for training")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    for split, count in COUNTS.items():
        count = round(count * words.count / COUNTS["train"])
        write_scenes(words.folder, count, words.side, words.seed, split)


if __name__ == "__main__":
    main()
