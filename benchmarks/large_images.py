"""What does decoding at reduced scale save for large photographs, and what does it change?

    python benchmarks/large_images.py --out benchmarks/large_images.json

Four things, for photographs of 12 megapixels (4000 x 3000 at quality 90, scikit-learn's two,
enlarged, with grain of 4 levels):

- images per CPU-second from the bytes of a JPEG to a training crop and to the view of evaluation,
  at 224 pixels, whole and at reduced scale. The pipelines alternate in every round; one thread.
- the same with Pillow's cache of memory blocks, `Image.core.set_blocks_max(16)`.
- the PSNR of the view at reduced scale to that of the whole image, beside that of a bicubic to a
  bilinear kernel; also for the photographs repeated 6 times along each side, whose details are as
  small as pixels.
- top-1 of a small network on large photographs by both ways. It tells 24 parts of the photographs
  apart, is trained on small JPEGs of them, and tested on others, enlarged to 12 megapixels.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

import fullstride
from fullstride.data.transforms.crop import Augmentation, test_view, train_view
from fullstride.data.transforms.opencv import fast_train_view
from fullstride.deploy.predict import probabilities
from fullstride.measure.environment import Environment
from fullstride.nets.preprocessing import Preprocessing

WIDTH, HEIGHT, QUALITY, GRAIN = 4000, 3000, 90, 4.0
WHOLE = Preprocessing(resolution=224)
DRAFT = replace(WHOLE, draft=True)
PHOTOS = ("china.jpg", "flower.jpg")
BLOCKS = 16
PACKAGES = ("pillow", "opencv-python-headless", "simplejpeg", "numpy")
# parts of the photographs: rows, columns, and the share of a part that a picture shows
ROWS, COLUMNS, SHARE = 3, 4, 0.7
SMALL, EPOCHS, PER_CLASS = 96, 30, 20
View = Callable[[bytes, int], np.ndarray]  # from a file and a seed to pixels


def jpeg(picture: Image.Image, size: tuple[int, int], seed: int, grain: float = GRAIN) -> bytes:
    pixels = np.asarray(picture.resize(size, Image.Resampling.BICUBIC))
    noise = np.random.default_rng(seed).normal(0, grain, pixels.shape)
    file = BytesIO()
    noisy = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    Image.fromarray(noisy).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def photographs(count: int) -> list[bytes]:
    """Their sides differ by some pixels, so that most are odd."""
    pictures = [Image.fromarray(load_sample_image(name)) for name in PHOTOS]
    return [
        jpeg(pictures[number % 2], (WIDTH - number, HEIGHT - number), number)
        for number in range(count)
    ]


def repeated(count: int) -> list[bytes]:
    photos = [np.tile(load_sample_image(name), (6, 6, 1)) for name in PHOTOS]
    files = []
    for number in range(count):
        picture = Image.fromarray(photos[number % 2])
        files.append(jpeg(picture, (picture.width - number, picture.height - number), number, 0))
    return files


def training(view: Callable[..., np.ndarray], pre: Preprocessing) -> View:
    return lambda file, seed: view(file, pre, Augmentation(), np.random.default_rng([0, 0, seed]))


VIEWS: dict[str, View] = {
    "training, pillow, whole": training(train_view, WHOLE),
    "training, pillow, reduced": training(train_view, DRAFT),
    "training, opencv": training(fast_train_view, DRAFT),
    "evaluation, pillow, whole": lambda file, seed: test_view(file, WHOLE),
    "evaluation, pillow, reduced": lambda file, seed: test_view(file, DRAFT),
}


def rates(files: list[bytes], rounds: int) -> dict[str, list[float]]:
    """Images per CPU-second of each round, after one of warmup."""
    measured: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for blocks in (0, BLOCKS):
            Image.core.set_blocks_max(blocks)
            for name, view in VIEWS.items():
                start = time.process_time()
                for index, file in enumerate(files):
                    view(file, number * len(files) + index)
                rate = len(files) / (time.process_time() - start)
                if number:
                    row = f"{name}, {BLOCKS} blocks" if blocks else name
                    measured.setdefault(row, []).append(rate)
    Image.core.set_blocks_max(0)
    Image.core.clear_cache()
    return measured


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    error = float(np.square(one.astype(float) - other).mean())
    return 10 * np.log10(255**2 / error) if error else 99.0


def distances(files: list[bytes], seeds: int) -> list[dict[str, object]]:
    """PSNR of views at reduced scale to those of whole images; least and mean."""
    rows = []
    for side in (224, 112):
        for kernel, other_kernel in (("bilinear", "bicubic"), ("bicubic", "bilinear")):
            pre = replace(WHOLE, kernel=kernel, resolution=side)
            draft, other = replace(pre, draft=True), replace(pre, kernel=other_kernel)
            pairs = {"training": [], "evaluation": [], "training, other kernel": []}
            for file in files:
                pairs["evaluation"].append(psnr(test_view(file, draft), test_view(file, pre)))
                for seed in range(seeds):
                    exact, ours, theirs = (
                        training(train_view, each)(file, seed) for each in (pre, draft, other)
                    )
                    pairs["training"].append(psnr(ours, exact))
                    pairs["training, other kernel"].append(psnr(theirs, exact))
            rows += [
                {
                    "view": name,
                    "kernel": kernel,
                    "side": side,
                    "psnr_mean": round(statistics.mean(values), 1),
                    "psnr_least": round(min(values), 1),
                }
                for name, values in pairs.items()
            ]
    return rows


def parts() -> list[Image.Image]:
    """The classes: parts of the photographs."""
    tiles = []
    for name in PHOTOS:
        photo = Image.fromarray(load_sample_image(name))
        w, h = photo.width // COLUMNS, photo.height // ROWS
        tiles += [
            photo.crop((x * w, y * h, (x + 1) * w, (y + 1) * h))
            for y in range(ROWS)
            for x in range(COLUMNS)
        ]
    return tiles


def picture_of(part: Image.Image, rng: np.random.Generator) -> Image.Image:
    w, h = (round(SHARE * side) for side in part.size)
    x, y = int(rng.integers(part.width - w)), int(rng.integers(part.height - h))
    return part.crop((x, y, x + w, y + h))


def top1(images: int) -> dict[str, object]:
    """Scores on large photographs by both ways, and how many predictions differ."""
    tiles, rng = parts(), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for label, tile in enumerate(tiles):
            (Path(folder) / "data" / f"{label:02}").mkdir(parents=True)
            for number in range(PER_CLASS):
                picture = picture_of(tile, rng)
                file = jpeg(picture, (SMALL, SMALL), number, grain=25)
                (Path(folder) / "data" / f"{label:02}" / f"{number}.jpg").write_bytes(file)
        bundle = fullstride.train_network(
            f"{folder}/data",
            "genet_tiny",
            out=f"{folder}/run",
            recipe="finetune",
            epochs=EPOCHS,
            batch=32,
            lr=0.1,
            resolution=48,
        )
    hits, differ = {"whole": 0, "reduced": 0}, 0
    for number in range(images):
        label = number % len(tiles)
        file = jpeg(picture_of(tiles[label], rng), (WIDTH, HEIGHT), number, grain=15)
        pre = bundle.preprocessing
        views = [test_view(file, replace(pre, draft=draft)) for draft in (False, True)]
        guesses = probabilities(bundle, views).argmax(1).tolist()
        for name, guess in zip(hits, guesses, strict=True):
            hits[name] += bundle.classes[guess] == f"{label:02}"
        differ += guesses[0] != guesses[1]
    scores = {f"top1_{name}": round(100 * count / images, 2) for name, count in hits.items()}
    return {"images": images, **scores, "predictions_that_differ": differ}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=6, help="photographs of the timings")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=4, help="training crops of a photograph")
    parser.add_argument("--scored", type=int, default=240, help="photographs that are classified")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    files = photographs(args.images)
    measured = rates(files, args.rounds)
    timings = [
        {
            "view": name,
            "images_per_cpu_s": round(statistics.median(values), 1),
            "least": round(min(values), 1),
            "most": round(max(values), 1),
        }
        for name, values in measured.items()
    ]
    result = {
        "protocol": {name: getattr(args, name) for name in ("images", "rounds", "seeds", "scored")}
        | {"size": (WIDTH, HEIGHT), "quality": QUALITY, "grain": GRAIN}
        | {"file_bytes_mean": round(statistics.mean(map(len, files)))},
        "environment": asdict(Environment.here()),
        "packages": {name: version(name) for name in PACKAGES},
        "timings": timings,
        "psnr": distances(files, args.seeds),
        "psnr_repeated": distances(repeated(2), args.seeds),
        "top1": top1(args.scored),
    }
    for name in ("timings", "psnr", "psnr_repeated", "top1"):
        rows = result[name] if isinstance(result[name], list) else [result[name]]
        print(*map(json.dumps, rows), sep="\n")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
