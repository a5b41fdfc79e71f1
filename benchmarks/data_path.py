"""How many training images per CPU-second do Pillow and OpenCV bring, compared with torchvision?

    python benchmarks/data_path.py --out benchmarks/data_path.json

From the bytes of a JPEG in memory to 224 x 224 pixels: decoding, random resized crop, flip, and in
half of the table RandAugment(2, 9). One thread; the pipelines alternate in every round, so that a
busy moment affects all of them. CPU-seconds are user and system time of the process. Images are
500 x 375 pixels at quality 95, crops of scikit-learn's two photographs with noise that makes the
files about as large as those of ImageNet.

RandAugment is that of each library: torchvision has 14 operations at magnitude 9 of 30, fullstride
16 at 9 of 10.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torchvision import transforms

from fullstride.data.readers.decode import decode
from fullstride.data.transforms.crop import Augmentation, train_view
from fullstride.data.transforms.opencv import fast_train_view
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import spread
from fullstride.nets.preprocessing import Preprocessing

SIZE, QUALITY, NOISE = (500, 375), 95, 4.0
PRE = Preprocessing(resolution=224)
PARTS = {
    "crop, flip": Augmentation(),
    "crop, flip, RandAugment": Augmentation(rand_layers=2, rand_magnitude=9),
}
BASELINE = "torchvision"
PACKAGES = ("pillow", "torchvision", "opencv-python-headless", "simplejpeg", "numpy")
Pipeline = Callable[[bytes, int], np.ndarray]  # from a file and a seed to pixels


def files(count: int) -> list[bytes]:
    photos = [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
    jpegs = []
    for number in range(count):
        rng = np.random.default_rng(number)
        pixels = photos[number % len(photos)]
        share = rng.uniform(0.6, 0.85)  # of each side of the photograph, 640 x 427
        w, h = int(share * pixels.shape[1]), int(share * pixels.shape[0])
        x, y = rng.integers(pixels.shape[1] - w), rng.integers(pixels.shape[0] - h)
        part = Image.fromarray(pixels[y : y + h, x : x + w]).resize(SIZE, Image.Resampling.BICUBIC)
        noisy = np.asarray(part) + rng.normal(0, NOISE, (SIZE[1], SIZE[0], 3))
        file = BytesIO()
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
        jpegs.append(file.getvalue())
    return jpegs


def torchvision_pipeline(augmentation: Augmentation) -> Pipeline:
    steps = [transforms.RandomResizedCrop(PRE.resolution), transforms.RandomHorizontalFlip()]
    if augmentation.rand_layers:
        steps.append(
            transforms.RandAugment(augmentation.rand_layers, int(augmentation.rand_magnitude))
        )
    view = transforms.Compose(steps)
    return lambda file, seed: np.asarray(view(Image.open(BytesIO(file)).convert("RGB")))


def pipelines(augmentation: Augmentation) -> dict[str, Pipeline]:
    return {
        BASELINE: torchvision_pipeline(augmentation),
        "fullstride, pillow": lambda file, seed: train_view(
            decode(file, 3), PRE, augmentation, np.random.default_rng([0, 0, seed])
        ),
        "fullstride, opencv": lambda file, seed: fast_train_view(
            file, PRE, augmentation, np.random.default_rng([0, 0, seed])
        ),
    }


def rate(pipeline: Pipeline, jpegs: list[bytes], first: int) -> float:
    """Images per CPU-second."""
    start = time.process_time()
    for number, file in enumerate(jpegs):
        pixels = pipeline(file, first + number)
        assert pixels.shape == (PRE.resolution, PRE.resolution, 3)
    return len(jpegs) / (time.process_time() - start)


def measure(images: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """The rates of each round, by part and by pipeline, after a round of warmup."""
    jpegs = files(images)
    by_part = {part: pipelines(augmentation) for part, augmentation in PARTS.items()}
    rates = {part: {name: [] for name in each} for part, each in by_part.items()}
    for number in range(rounds + 1):
        for part, each in by_part.items():
            for name, pipeline in each.items():
                images_per_s = rate(pipeline, jpegs, number * images)
                if number:
                    rates[part][name].append(images_per_s)
    return rates


def summary(rates: dict[str, dict[str, list[float]]]) -> list[dict[str, object]]:
    """Medians, and ratios to torchvision within a round, which a busy moment does not change."""
    rows = []
    for part, each in rates.items():
        for name, values in each.items():
            ratios = [ours / theirs for ours, theirs in zip(values, each[BASELINE], strict=True)]
            rows.append(
                {
                    "pipeline": name,
                    "does": part,
                    "images_per_cpu_s": round(statistics.median(values), 1),
                    "spread": round(spread(values), 3),  # (p90 - p10) / median
                    "ratio": round(statistics.median(ratios), 3),  # to torchvision
                    "ratio_least": round(min(ratios), 3),
                    "ratio_most": round(max(ratios), 3),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=100, help="files, each used once a round")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = summary(measure(args.images, args.rounds))
    print(f"{'':26}{'images/CPU-s':>14}{'spread':>9}{'ratio':>8}   least..most")
    for row in rows:
        print(
            f"{row['pipeline']:26}{row['images_per_cpu_s']:>14}{row['spread']:>9.1%}"
            f"{row['ratio']:>8.2f}   {row['ratio_least']:.2f}..{row['ratio_most']:.2f}"
            f"   {row['does']}"
        )
    protocol = {
        "images": args.images,
        "rounds": args.rounds,
        "size": SIZE,
        "quality": QUALITY,
        "noise": NOISE,
    }
    protocol["file_bytes_mean"] = round(statistics.mean(len(file) for file in files(args.images)))
    packages = {name: version(name) for name in PACKAGES}
    result = {
        "protocol": protocol,
        "environment": asdict(Environment.here()),
        "packages": packages,
        "rows": rows,
    }
    print("\n" + ", ".join(f"{name} {each}" for name, each in packages.items()))
    kilobytes = protocol["file_bytes_mean"] / 1000
    print(f"{result['environment']['device']}, one thread, files of {kilobytes:.0f} kB")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
