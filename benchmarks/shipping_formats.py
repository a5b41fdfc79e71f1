"""What does each format and precision cost and gain, beside ONNX Runtime in fp32, on this CPU?

    python benchmarks/shipping_formats.py --out benchmarks/shipping_formats.json --files FOLDER

Four networks, one image a call, one thread. All files of a network are timed in turn inside of each
round, and ratios are of the same round. Weights are random, with batch statistics of photographs.
Files are compared with PyTorch on other photographs than those that int8 takes its ranges from.
Formats that are not installed are left out. Networks of --only are added to the file, and of those
in it only rows of --formats are replaced; files of other rows are timed again if they are there.
`--step convert` writes the files alone, and `--step time` times those that are in the folder.
`--only` without a name writes the table alone, with `--page` into a page, at its two comments.
"""

import argparse
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fullstride.data.transforms.crop import to_input
from fullstride.deploy.choose_form import available, with_typical_statistics
from fullstride.deploy.comparison import ComparisonImages, compare
from fullstride.deploy.export import export_job, make_reference, write
from fullstride.deploy.exported import ExportedModule
from fullstride.deploy.formats import FORMATS, open_file
from fullstride.deploy.predict import outputs
from fullstride.deploy.settings import ExportOptions
from fullstride.examples.scenes import load_photographs, photograph_square
from fullstride.io.writing import atomic_write, json_output, remove
from fullstride.measure.bench import BenchOptions, bench
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import THROUGHPUT
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import task_of

OUTPUT = json_output("results of a benchmark", "networks")
NETWORKS = {
    "genet_light": 192,
    "timm/mobilenetv4_conv_small": 224,
    "resnet_rs_50": 160,
    "tresnet_m": 224,
}
REFERENCE = "onnx fp32"
PICTURES, CALIBRATION = 64, 32
BEGIN = "<!-- by benchmarks/shipping_formats.py -->\n"  # of the table in a page
END = "<!-- end -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a JSON file to write or add to")
    parser.add_argument("--files", type=Path, required=True, help="the folder of the files")
    parser.add_argument("--only", nargs="*", default=[*NETWORKS], choices=NETWORKS)
    parser.add_argument("--formats", nargs="*", help="such as ncnn; by default all that run here")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--page", type=Path, help="a page whose table is replaced")
    parser.add_argument("--step", choices=("convert", "time"), help="by default both")
    args = parser.parse_args()
    results = json.loads(args.out.read_text())["networks"] if args.out.exists() else {}
    torch.set_num_threads(1)
    for name in args.only:
        folder = args.files / name.replace("/", "_")
        files = results[name]["files"] if name in results else {}
        if args.step != "time":
            files |= convert(name, args.formats, folder)
        if args.step != "convert":
            measure(name, files, folder, args.rounds)
        results[name] = {"environment": asdict(Environment.here("cpu")), "files": files}
        with atomic_write(args.out, OUTPUT) as beside:
            beside.write_text(json.dumps({"networks": results}, indent=1) + "\n")
    print(table(results))
    if args.page:
        before, _, rest = args.page.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        args.page.write_text(f"{before}{BEGIN}\n{table(results)}\n\n{END}{after}")


def convert(name: str, formats: list[str] | None, folder: Path) -> dict[str, dict[str, Any]]:
    """The file of each format and precision: its size, its agreement, seconds to write it."""
    bundle, side = random_bundle(name), NETWORKS[name]
    images = ComparisonImages(photographs("test", PICTURES, side))
    calibration = photographs("train", CALIBRATION, side)
    reference, task = make_reference(bundle, images, "normalised"), task_of(bundle)
    files: dict[str, dict[str, Any]] = {}
    labels = [each for each in available(None) if formats is None or each[0] in (*formats, "onnx")]
    folder.mkdir(parents=True, exist_ok=True)
    for format, precision in labels:
        label, kind = f"{format} {precision}", FORMATS[format]
        path = folder / f"{format}_{precision}{kind.suffix}"
        remove(path)
        options, began = ExportOptions(format=format, precision=precision), cpu_seconds()
        try:
            job = export_job(bundle, replace(reference, graphs={}), options, calibration)
            write(kind, replace(job, progress=print), path)
        except ValueError as error:
            files[label] = {"error": str(error)}
        else:
            seconds = cpu_seconds() - began
            rows = outputs(kind.open(path, 1), reference.inputs)
            compared = compare(rows, reference.outputs, images.labels, task)
            files[label] = {
                "file": path.name,
                "cpu_seconds": seconds,  # to write it
                "megabytes": size(path) / 1e6,
                "difference": compared.relative_difference,
                "same_class_percent": 100 * compared.same_class / compared.images,
            }
        print(f"{name}: {label}: {files[label]}", flush=True)
    return files


def cpu_seconds() -> float:
    """Of this process and of the converters that have ended."""
    return sum(os.times()[:4])


def measure(name: str, files: dict[str, dict[str, Any]], folder: Path, rounds: int) -> None:
    """Add the speed of each file, and its ratio to that of `REFERENCE`."""
    nets = {
        label: ExportedModule(open_file(folder / row["file"], threads=1, trust=True))
        for label, row in files.items()
        if "file" in row and (folder / row["file"]).exists()
    }
    protocol = replace(THROUGHPUT, batch=1, resolution=NETWORKS[name], rounds=rounds)
    for row in bench(nets, protocol, options=BenchOptions(threads=1, reference=REFERENCE)):
        own = {"ratio": row.ratio, "ms": 1000 / row.images_per_s, "spread": row.spread}
        files[row.name] |= {**own, "runtime": row.runtime}


def random_bundle(name: str) -> Bundle:
    torch.manual_seed(0)
    pre = Preprocessing(resolution=NETWORKS[name], crop=1.0)
    net = zoo.create(name)
    # Of few pictures statistics would be of these alone, and others' activations would grow.
    pixels = np.stack([np.asarray(each) for each in photographs("train", PICTURES, pre.resolution)])
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
    about = next(iter(results.values()))["environment"]
    return "\n".join([*lines, "", f"{about['device']}, one thread, {about['date'][:10]}."])


def cell(row: dict[str, Any] | None) -> str:
    if row is None or "ratio" not in row:
        return "-" if row is None else "not written" if "error" in row else "not timed"
    same, seconds = row["same_class_percent"], row["cpu_seconds"]
    return f"{row['ratio']:.2f} ({same:.0f} %, {row['megabytes']:.0f} MB, {seconds:.0f} s)"


if __name__ == "__main__":
    main()
