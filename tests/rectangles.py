"""A data set of rectangles with exact boxes in COCO's format, for tests of detectors."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"red": (230, 40, 40), "blue": (40, 60, 230)}


def write_rectangles(folder: Path, counts: dict[str, int], side: int = 64) -> Path:
    """`counts` pictures by split, each with one or two rectangles; every fifth has none."""
    (folder / "annotations").mkdir(parents=True)
    for split, count in counts.items():
        (folder / split).mkdir()
        images, annotations = [], []
        for number in range(count):
            rng = np.random.default_rng([len(split), number])
            pixels = rng.integers(90, 150, (side, side, 3)).astype(np.uint8)
            for _ in range(0 if number % 5 == 4 else rng.integers(1, 3)):
                width, height = rng.integers(side // 4, side // 2, 2).tolist()
                x, y = (int(rng.integers(side - each)) for each in (width, height))
                label = int(rng.integers(2))
                pixels[y : y + height, x : x + width] = list(COLOURS.values())[label]
                annotations.append(
                    {
                        "id": len(annotations),
                        "image_id": number,
                        "category_id": label + 1,
                        "bbox": [x, y, width, height],
                        "iscrowd": 0,
                    }
                )
            name = f"{number:03}.png"
            Image.fromarray(pixels).save(folder / split / name)
            images.append({"id": number, "file_name": name, "width": side, "height": side})
        categories = [{"id": i + 1, "name": name} for i, name in enumerate(COLOURS)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return folder
