"""What does decoding at reduced scale change in the accuracy of a network?

    python benchmarks/draft_accuracy.py --out benchmarks/draft_accuracy.json --data FOLDER

A linear classifier on the features of EfficientNet-Lite0's released weights tells intact from
certainly defective solar cells (elpv). The photographs are 300 x 300 pixels, here gray JPEGs of
quality 90, and the network sees 48 x 48: evaluation decodes at half scale only where that leaves 3
times the pixels of the view or more along a side, so that at 64 pixels and more these photographs
are decoded whole. The classifier is fitted to features of whole or of reduced photographs, and
scored on both, for random halves of the photographs. The JSON has the top-1 of each pair and split,
and how many of the predictions differ between the two ways to score. FOLDER is that of
`defaults.py`.
"""

import argparse
import io
import json
import statistics
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from defaults import LITE0, find_file, lite0
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fullstride.data.dataset import DataSet, Images, decode
from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.nets.bundle import Bundle
from fullstride.tasks.classify import Classify
from fullstride.train.batches import BatchOptions
from fullstride.train.scoring import scoring_batches

SIDE, QUALITY = 48, 90
OUTPUT = json_output("a study of decoding at reduced scale", "protocol", "rows")


def photographs(folder: Path) -> DataSet:
    """The certain ones among the solar cells, all as test images."""
    files: dict[str, bytes] = {}
    labels: dict[str, int] = {}
    with zipfile.ZipFile(find_file(folder, "elpv_dataset-*.whl", "PyPI's elpv-dataset")) as wheel:
        lines = wheel.read("elpv_dataset/data/labels.csv").decode().splitlines()
        for name, probability, *_ in map(str.split, lines):
            if float(probability) in (0, 1):
                file = io.BytesIO()
                image = Image.open(io.BytesIO(wheel.read(f"elpv_dataset/data/{name}")))
                image.convert("L").save(file, "JPEG", quality=QUALITY)
                files[name], labels[name] = file.getvalue(), int(float(probability))
    read = partial(read_jpeg, files)
    images = Images(tuple(files), tuple(labels.values()), read, files.__getitem__)
    return DataSet(
        name="elpv",
        where="elpv",
        classes=("intact", "defective"),
        train=images.subset([]),
        val=images.subset([]),
        test=images,
        channels=3,
        mirror=True,
        fingerprint="elpv",
    )


def read_jpeg(files: dict[str, bytes], name: str) -> Image.Image:
    return decode(files[name], 3)


@torch.inference_mode()
def features(data: DataSet, bundle: Bundle, draft: bool) -> np.ndarray:
    """(images, channels): what the classifier of the network gets, from evaluation views."""
    pre = replace(bundle.preprocessing, resolution=SIDE, crop=1.0, draft=draft)
    rows: list[torch.Tensor] = []
    classifier = bundle.net.get_submodule(bundle.net.classifier)
    classifier.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0]))
    bundle.net.eval()
    for x, _, _ in scoring_batches(Classify(), data.test, BatchOptions(pre, "cpu")).epoch(0):
        bundle.net(x)
    return torch.cat(rows).numpy()


def split_rows(
    inputs: dict[str, np.ndarray], labels: np.ndarray, seed: int
) -> Iterator[dict[str, object]]:
    """The scores of the classifiers of one split, fitted to whole or to reduced photographs."""
    order = np.random.default_rng(seed).permutation(len(labels))
    train, test = np.array_split(order, 2)
    for kind, values in inputs.items():
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
        probe.fit(values[train], labels[train])
        guesses = {each: probe.predict(inputs[each][test]) for each in inputs}
        yield {
            "seed": seed,
            "fitted_to": kind,
            **{
                f"top1_{each}": 100 * float((guesses[each] == labels[test]).mean())
                for each in guesses
            },
            "predictions_that_differ": int((guesses["whole"] != guesses["reduced"]).sum()),
            "test_images": len(test),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of defaults.py")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file to write")
    parser.add_argument("--splits", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data, bundle = photographs(args.data), lite0(args.data)
    inputs = {"whole": features(data, bundle, False), "reduced": features(data, bundle, True)}
    labels = np.array(data.test.targets)
    rows = [row for seed in range(args.splits) for row in split_rows(inputs, labels, seed)]
    for kind in inputs:
        own = [row for row in rows if row["fitted_to"] == kind]
        means = {
            name: statistics.mean(row[name] for row in own)
            for name in own[0]
            if name not in ("seed", "fitted_to")
        }
        print(f"fitted to {kind}:", *(f"{name} {mean:.2f}" for name, mean in means.items()))
    content = {
        "protocol": {"side": SIDE, "quality": QUALITY, "images": len(labels), "model": LITE0}
        | {"splits": args.splits},
        "rows": rows,
        "environment": asdict(Environment.here("cpu")),
    }
    with atomic_write(args.out, OUTPUT) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
