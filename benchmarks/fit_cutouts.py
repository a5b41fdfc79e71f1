"""Writes photographs with cut-out stamps on them, and their boxes and masks, in COCO's format.

The stamps are the PNG files of Debian's package tuxpaint-stamps-default, most of them photographs
of animals, food, plants and vehicles; those of the test are of other things than those of the
training, before other photographs, which scikit-image and scikit-learn bring. Nothing of them is a
part of the project.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from fullstride.examples.scenes import (
    SPLITS,
    TEST_PHOTOGRAPHS,
    TRAINING_PHOTOGRAPHS,
    load_photographs,
)

CLASSES = ("animals", "food", "plants", "vehicles")
SIDE = 160  # pixels of a picture
SIZES = (0.25, 0.6)  # of a stamp's longer side, as shares of the picture's
MOST = 3  # stamps of a picture
MIN_VISIBLE = 0.6  # of a stamp's pixels that later ones leave visible
WITH_CLASSES = ("chelsea", "coffee", "flower.jpg", "rocket", "stereo_motorcycle")  # no background
SHARES = {"train": 0.6, "val": 0.15, "test": 0.25}  # of the stamps of a class


class Stamp(NamedTuple):
    image: Image.Image  # RGBA
    label: int  # index of `CLASSES`


def read_stamps(source: Path) -> dict[str, list[Stamp]]:
    """The stamps of each split; a thing is in one split. Raises ValueError without any."""
    roots = [path for path in sorted(source.rglob("stamps")) if (path / "animals").is_dir()]
    if not roots:
        raise ValueError(f"{source} has no stamps: get Debian's tuxpaint-stamps-default")
    splits: dict[str, list[Stamp]] = {split: [] for split in SPLITS}
    for label, name in enumerate(CLASSES):
        paths = sorted((roots[0] / name).rglob("*.png"))
        ends = np.cumsum([round(SHARES[split] * len(paths)) for split in SPLITS])[:-1]
        parts = np.split(np.random.default_rng(0).permutation(len(paths)), ends)
        for split, chosen in zip(SPLITS, parts, strict=True):
            for index in chosen:
                with Image.open(paths[index]) as file:
                    image = file.convert("RGBA")
                image = image.crop(image.getchannel("A").getbbox())
                image.thumbnail((SIDE, SIDE))
                splits[split].append(Stamp(image, label))
    return splits


def backgrounds(split: str) -> list[np.ndarray]:
    """The photographs of a split that show nothing of the classes."""
    names = TEST_PHOTOGRAPHS if split == "test" else TRAINING_PHOTOGRAPHS
    pairs = zip(names, load_photographs(split), strict=True)
    return [pixels for name, pixels in pairs if name not in WITH_CLASSES]


def picture(
    rng: np.random.Generator, stamps: list[Stamp], photographs: list[np.ndarray]
) -> tuple[Image.Image, np.ndarray, list[int]]:
    """A picture, the number of the stamp that each pixel shows, 0 for none, and their labels."""
    photograph = Image.fromarray(photographs[rng.integers(len(photographs))])
    cut = round(min(photograph.size) * rng.uniform(0.4, 1))
    left, top = rng.integers(0, np.array(photograph.size) - cut + 1)
    canvas = photograph.resize((SIDE, SIDE), box=(left, top, left + cut, top + cut))
    mask, labels = np.zeros((SIDE, SIDE), np.uint8), []
    for _ in range(rng.integers(1, MOST + 1)):
        stamp = stamps[rng.integers(len(stamps))]
        image = stamp.image
        scale = rng.uniform(*SIZES) * SIDE / max(image.size)
        image = image.resize(np.maximum(1, np.rint(np.multiply(image.size, scale))).astype(int))
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x, y = (int(rng.integers(0, SIDE - length + 1)) for length in image.size)
        covered = np.zeros_like(mask, bool)
        covered[y : y + image.height, x : x + image.width] = np.asarray(image)[..., 3] > 127
        after = np.where(covered, len(labels) + 1, mask)
        whole = np.bincount(mask.ravel(), minlength=MOST + 1)
        left_of_it = np.bincount(after.ravel(), minlength=MOST + 1)
        if not covered.any() or any(left_of_it[1:] < MIN_VISIBLE * whole[1:]):
            continue
        canvas.paste(image, (x, y), image)
        mask, labels = after.astype(np.uint8), [*labels, stamp.label]
    return canvas, mask, labels


def write_cutouts(source: Path, folder: Path, counts: Mapping[str, int], seed: int = 0) -> None:
    """Write SPLIT/00000.jpg and so on, and annotations/instances_SPLIT.json, if not there yet."""
    if folder.is_dir():
        return
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    (part / "annotations").mkdir(parents=True)
    stamps = read_stamps(source)
    for split, count in counts.items():
        (part / split).mkdir()
        photographs = backgrounds(split)
        images: list[dict[str, Any]] = []
        boxes: list[dict[str, Any]] = []
        for number in range(count):
            rng = np.random.default_rng([seed, SPLITS.index(split), number])
            canvas, mask, labels = picture(rng, stamps[split], photographs)
            name = f"{number:05}.jpg"
            canvas.save(part / split / name, quality=95)
            images.append({"id": number, "file_name": name, "width": SIDE, "height": SIDE})
            for index, label in enumerate(labels, 1):
                boxes.append({"id": len(boxes) + 1, "image_id": number, **box_of(mask == index)})
                boxes[-1]["category_id"] = label + 1
        content = {
            "images": images,
            "annotations": boxes,
            "categories": [{"id": id, "name": name} for id, name in enumerate(CLASSES, 1)],
        }
        (part / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    part.rename(folder)


def box_of(mask: np.ndarray) -> dict[str, Any]:
    """The box of the pixels of a mask, and their number."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    size = columns[-1] + 1 - columns[0], rows[-1] + 1 - rows[0]
    return {"bbox": [int(each) for each in (columns[0], rows[0], *size)], "area": int(mask.sum())}
