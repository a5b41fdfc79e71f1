"""What does decoding at reduced scale save for large photographs, and what does it change?

    python benchmarks/large_images.py --out benchmarks/large_images.json

Three things, for photographs of 12 megapixels (4000 x 3000 at quality 90, scikit-learn's two,
enlarged, with grain of 4 levels):

- images per CPU-second from the bytes of a JPEG to a training crop and to the view of evaluation,
  at 224 pixels, whole and at reduced scale. The pipelines alternate in every round; one thread.
- the same with Pillow's cache of memory blocks, `Image.core.set_blocks_max(16)`.
- the PSNR of the view at reduced scale to that of the whole image, beside that of a bicubic to a
  bilinear kernel; also for the photographs repeated 6 times along each side, whose details are as
  small as pixels.
"""

import argparse
import json
import statistics
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

from fullstride.data.transforms.crop import Augmentation, test_view, train_view
from fullstride.data.transforms.opencv import fast_train_view
from fullstride.measure.environment import Environment
from fullstride.nets.preprocessing import Preprocessing

WIDTH, HEIGHT, QUALITY, GRAIN = 4000, 3000, 90, 4.0
WHOLE = Preprocessing(resolution=224)
DRAFT = replace(WHOLE, draft=True)
PHOTOS = ("china.jpg", "flower.jpg")
BLOCKS = 16
PACKAGES = ("pillow", "opencv-python-headless", "simplejpeg", "numpy")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=6, help="photographs of the timings")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=4, help="training crops of a photograph")
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
        "protocol": {name: getattr(args, name) for name in ("images", "rounds", "seeds")}
        | {"size": (WIDTH, HEIGHT), "quality": QUALITY, "grain": GRAIN}
        | {"file_bytes_mean": round(statistics.mean(map(len, files)))},
        "environment": asdict(Environment.here()),
        "packages": {name: version(name) for name in PACKAGES},
        "timings": timings,
        "psnr": distances(files, args.seeds),
        "psnr_repeated": distances(repeated(2), args.seeds),
    }
    for name in ("timings", "psnr", "psnr_repeated"):
        print(*map(json.dumps, result[name]), sep="\n")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
