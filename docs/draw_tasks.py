"""Trains the small networks of three pages of docs/tasks, and draws what they predict.

    python docs/draw_tasks.py [multilabel retrieval video] [--out docs/tasks]

The pictures are the first ones of the test. Pages of boxes, masks and depths have what
`predict --draw` writes.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import fullstride
from fullstride import tasks
from fullstride.examples import Look, split_clip, write_motion, write_scenes
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.scoring import BatchOptions, score_images

SIDE, STRIP = 168, 26  # pixels of a picture, and of the line of text below it
COUNTS = {"train": 2000, "val": 100, "test": 4}
Row = Sequence[tuple[np.ndarray, str]]  # pictures, uint8 (H, W) or (H, W, 3), each with a text


def drawn(rows: Sequence[Row]) -> Image.Image:
    """Pictures in rows, each with its text below in white on black."""
    sheet = Image.new("RGB", (SIDE * len(rows[0]), (SIDE + STRIP) * len(rows)))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for y, row in enumerate(rows):
        for x, (pixels, text) in enumerate(row):
            at = SIDE * x, (SIDE + STRIP) * y
            picture = Image.fromarray(pixels).convert("RGB")
            sheet.paste(picture.resize((SIDE, SIDE), Image.Resampling.NEAREST), at)
            draw.text((at[0] + 6, at[1] + SIDE + 4), text, "white", font)
    return sheet


def train(data: Path | str, model: str, folder: Path, task: str, **recipe: Any) -> Any:
    """The bundle of a training on one thread, and a line of its scores."""
    torch.set_num_threads(1)
    options = RunOptions(task=task)
    bundle = fullstride.train_network(data, model, folder / task, options=options, **recipe)
    print(task, bundle.scores["test"])
    return tasks.load(folder / task)


def multilabel(folder: Path) -> Sequence[Row]:
    """Four scenes with up to two digits, and the labels that reach their thresholds."""
    look = Look(most=2, sides=(0.5, 0.75), is_plain=True)
    write_scenes(folder / "scenes", COUNTS | {"test": 200}, 32, look=look)
    crop = dict(scale=(1.0, 1.0))  # a crop would cut digits off
    bundle = train(
        folder / "scenes", "genet_tiny", folder, "multilabel", epochs=30, batch_size=32, **crop
    )
    paths = sorted((folder / "scenes/test").glob("*.png"))[:4]
    found = fullstride.predict(bundle, paths)
    return [[(np.asarray(Image.open(row.path)), row.guesses_text) for row in found]]


def retrieval(folder: Path) -> Sequence[Row]:
    """Three digits by writers of the test, each beside the three nearest by other writers."""
    bundle = train("digits", "genet_tiny", folder, "retrieval", epochs=20)
    images = fullstride.open_data("digits").test
    how = BatchOptions(bundle.preprocessing, "cpu")
    score: Any = score_images(bundle.net.eval(), tasks.task_of(bundle), images, how).score
    embeddings_nd = torch.cat(score.embeddings).double()
    rows = []
    for query in (0, 120, 240):
        distance_n = torch.cdist(embeddings_nd[[query]], embeddings_nd)[0]
        near = [int(index) for index in distance_n.argsort() if abs(int(index) - query) > 60][:3]
        texts = ["query", *(f"distance {distance_n[index]:.2f}" for index in near)]
        pictures = (np.asarray(images.picture(index)) for index in (query, *near))
        rows.append([*zip(pictures, texts, strict=True)])
    return rows


def video(folder: Path) -> Sequence[Row]:
    """Four frames of two clips, and the direction that the network sees in all of their frames."""
    write_motion(folder / "motion", {"train": 800, "val": 100, "test": 100})
    bundle = train(folder / "motion", "resnet3d_rs_tiny", folder, "video", steps=400, batch_size=16)
    clips = [split_clip(number, 32, 0, "test").pixels for number in (0, 3)]
    rows = []
    for clip, row in zip(clips, fullstride.predict(bundle, clips, top=1), strict=True):
        frames = (0, 2, 4, 6)
        texts = [row.guesses_text, *(f"frame {number}" for number in frames[1:])]
        rows.append([*zip((clip[number] for number in frames), texts, strict=True)])
    return rows


PICTURES: dict[str, Callable[[Path], Sequence[Row]]] = {
    each.__name__: each for each in (multilabel, retrieval, video)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], default=[*PICTURES])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tasks")
    words = parser.parse_args()
    for name in words.names:
        with TemporaryDirectory() as folder:
            picture = drawn(PICTURES[name](Path(folder)))
        picture.quantize(128).save(words.out / f"{name}.png", optimize=True)
