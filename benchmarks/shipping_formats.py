"""What does each format and precision cost and gain, beside ONNX Runtime in fp32, on this CPU?

    python benchmarks/shipping_formats.py --out benchmarks/shipping_formats.json

Four networks, one image a call, one thread. All files of a network are timed in turn inside of each
round, and ratios are of the same round. Weights are random, with batch statistics of photographs.
Files are compared with PyTorch on other photographs than those that int8 takes its ranges from.
Formats that are not installed are left out. Networks of --only are added to the file, or replaced.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from fullstride.data.transforms.crop import to_input
from fullstride.deploy.choose_form import available, with_typical_statistics
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export, make_reference
from fullstride.deploy.exported import ExportedModule
from fullstride.deploy.formats import FORMATS, open_file
from fullstride.deploy.settings import ExportOptions
from fullstride.examples.scenes import load_photographs, photograph_square
from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.bench import BenchOptions, bench
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import THROUGHPUT
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing

OUTPUT = json_output("results of a benchmark", "networks")
NETWORKS = {
    "genet_light": 192,
    "timm/mobilenetv4_conv_small": 224,
    "resnet_rs_50": 160,
    "tresnet_m": 224,
}
REFERENCE = "onnx fp32"
PICTURES, CALIBRATION = 64, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a JSON file to write or add to")
    parser.add_argument("--only", nargs="*", default=[*NETWORKS], choices=NETWORKS)
    parser.add_argument("--formats", nargs="*", help="such as ncnn; by default all that run here")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--table", action="store_true", help="print the table of --out alone")
    args = parser.parse_args()
    results = json.loads(args.out.read_text())["networks"] if args.out.exists() else {}
    torch.set_num_threads(1)
    for name in [] if args.table else args.only:
        results[name] = {
            "environment": asdict(Environment.here("cpu")),
            "files": measure(name, args.formats, args.rounds),
        }
        with atomic_write(args.out, OUTPUT) as beside:
            beside.write_text(json.dumps({"networks": results}, indent=1) + "\n")
    print(table(results))


def measure(name: str, formats: list[str] | None, rounds: int) -> dict[str, dict[str, Any]]:
    """The file of each format and precision: its size, agreement, and speed beside `REFERENCE`."""
    bundle, side = random_bundle(name), NETWORKS[name]
    images = ComparisonImages(photographs("test", PICTURES, side))
    reference = make_reference(bundle, images, "normalised")
    files, nets = {}, {}
    labels = [each for each in available(None) if formats is None or each[0] in (*formats, "onnx")]
    with TemporaryDirectory() as scratch:
        for format, precision in labels:
            label = f"{format} {precision}"
            path = Path(scratch) / f"{format}_{precision}{FORMATS[format].suffix}"
            options = ExportOptions(format=format, precision=precision, max_drop=100, threads=1)
            began = time.perf_counter()
            try:
                result = export(
                    bundle,
                    path,
                    images,
                    options,
                    calibration=photographs("train", CALIBRATION, side),
                    reference=replace(reference, graphs={}),
                )
            except ValueError as error:
                files[label] = {"error": str(error)}
                print(f"{name}: {label}: {error}", flush=True)
                continue
            compared = result.comparison
            files[label] = {
                "seconds": time.perf_counter() - began,  # with the comparison
                "megabytes": size(path) / 1e6,
                "difference": compared.relative_difference,
                "same_class_percent": 100 * compared.same_class / compared.images,
            }
            print(f"{name}: {label}: {files[label]}", flush=True)
            nets[label] = ExportedModule(open_file(path, threads=1, trust=True))
        protocol = replace(THROUGHPUT, batch=1, resolution=side, rounds=rounds)
        for row in bench(nets, protocol, options=BenchOptions(threads=1, reference=REFERENCE)):
            own = {"ratio": row.ratio, "ms": 1000 / row.images_per_s, "spread": row.spread}
            files[row.name] |= {**own, "runtime": row.runtime}
    return files


def random_bundle(name: str) -> Bundle:
    torch.manual_seed(0)
    pre = Preprocessing(resolution=NETWORKS[name], crop=1.0)
    net = zoo.create(name)
    pixels = np.stack([np.asarray(each) for each in photographs("train", 8, pre.resolution)])
    with_typical_statistics(net, to_input(torch.from_numpy(pixels), pre))
    with torch.inference_mode():
        (classes,) = net(torch.zeros(1, 3, pre.resolution, pre.resolution)).shape[1:]
    return Bundle(
        net,
        name=name,
        classes=tuple(map(str, range(classes))),
        preprocessing=pre,
        source="random weights",
    )


def photographs(split: str, count: int, side: int) -> list[Image.Image]:
    rng, whole = np.random.default_rng(0), load_photographs(split)
    squares = (photograph_square(rng, whole, side) for _ in range(count))
    return [Image.fromarray(np.ascontiguousarray(each)) for each in squares]


def size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(each.stat().st_size for each in files if each.is_file())


def table(results: dict[str, Any]) -> str:
    """A row for each file: its speed beside the reference, the same classes, and seconds."""
    labels = dict.fromkeys(label for each in results.values() for label in each["files"])
    heads = [f"{name.removeprefix('timm/')}, {NETWORKS[name]}" for name in results]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for label in labels:
        cells = [cell(each["files"].get(label)) for each in results.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    for each in results.values():
        about = each["environment"]
        lines.append(f"\n{about['device']}, {about['date']}")
        break
    return "\n".join(lines)


def cell(row: dict[str, Any] | None) -> str:
    if row is None or "error" in row:
        return "-" if row is None else "not written"
    same, seconds = row["same_class_percent"], row["seconds"]
    return f"{row['ratio']:.2f} ({same:.0f} %, {row['megabytes']:.0f} MB, {seconds:.0f} s)"


if __name__ == "__main__":
    main()
