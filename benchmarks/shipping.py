"""How much faster do exported files answer than timm in PyTorch? Each file on this CPU, in turn with timm's network.

    python benchmarks/shipping.py --out benchmarks/shipping.json

For a machine with nothing else to do, on which it takes about half an hour. TResNet-M, ResNet-RS-50 and GENet-large at
224 pixels, batches of 1 and 16, on 2 threads. Reference is timm's network of the same name in eager float32, NCHW.
Weights are random, with batch-norm statistics of real size; int8 takes its ranges from smooth random pictures. So the
times are those of trained networks and the answers are not: what precision costs is measured on trained networks.
The last lines say what one export takes: seconds, and the most memory that its process had.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from torch import nn

from fullstride.deploy.export import ComparisonImages, export
from fullstride.deploy.exported import ExportedModule, Precision
from fullstride.deploy.formats import FORMATS, open_file
from fullstride.measure.bench import bench
from fullstride.measure.protocols import THROUGHPUT, Measurement
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.storage import atomic_write

PAIRS = {
    "tresnet_m": "timm/tresnet_m",
    "resnet_rs_50": "timm/resnetrs50",
    "genet_large": "timm/gernet_l",
}
SIDE, BATCHES, THREADS = 224, (1, 16), 2
FILES: tuple[tuple[str, Precision], ...] = (
    ("openvino", "fp32"),
    ("openvino", "bf16"),
    ("openvino", "int8"),
    ("onnx", "fp32"),
    ("onnx", "int8"),
    ("aoti", "fp32"),
    ("aoti", "bf16"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--only", help="one of the networks")
    parser.add_argument("--files", nargs="*", help="such as openvino-int8; all where not given")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--one-export", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    if asked.one_export:
        print(json.dumps(one_export(asked.one_export)))
        return
    rows: list[Measurement] = []
    files = [each for each in FILES if not asked.files or "-".join(each) in asked.files]
    print(f"{'network':14}{'file':16}{'batch':>6}{'ms/image':>10}{'spread':>8}{'times timm':>12}")
    for name in [asked.only] if asked.only else PAIRS:
        for row in contest(name, files, asked.rounds):
            rows.append(row)
            speed = f"{1000 / row.images_per_s:>10.2f}{row.spread:>8.2f}{row.ratio:>12.2f}"
            print(f"{name:14}{row.name:16}{row.protocol.batch:>6}{speed}", flush=True)
    whole = subprocess.run(
        [sys.executable, __file__, "--one-export", "tresnet_m"],
        capture_output=True,
        text=True,
        check=True,
    )
    took = json.loads(whole.stdout.splitlines()[-1])
    print(
        f"export of tresnet_m to ONNX: {took['seconds']:.1f} s, {took['peak_memory_gib']:.2f} GiB"
    )
    if asked.out:
        with atomic_write(asked.out) as beside:
            found = {"export": took, "rows": [{**asdict(row), "environment": None} for row in rows]}
            environment = asdict(rows[0].environment)
            beside.write_text(json.dumps({"environment": environment, **found}, indent=1) + "\n")


def contest(name: str, files: list[tuple[str, Precision]], rounds: int) -> Iterator[Measurement]:
    """timm's network, and each file of ours, measured in turn. A row is named by its file, and timm's by itself."""
    bundle = random_bundle(name)
    with TemporaryDirectory() as scratch:
        nets: dict[str, nn.Module] = {PAIRS[name]: zoo.create(PAIRS[name])}
        for format, precision in files:
            label = f"{format} {precision}"
            path = Path(scratch) / f"{format}_{precision}{FORMATS[format].suffix}"
            ship(bundle, path, format, precision)
            nets[label] = ExportedModule(open_file(path, threads=THREADS, trust=True))
        for batch in BATCHES:
            protocol = replace(THROUGHPUT, batch=batch, resolution=SIDE, rounds=rounds)
            yield from bench(nets, protocol, threads=THREADS, reference=PAIRS[name])


def random_bundle(name: str) -> Bundle:
    """A network whose gains are of both signs and whose statistics are those of what passes through it."""
    torch.manual_seed(0)
    net = zoo.create(name, resolution=SIDE)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.uniform_(0.5, 1.5).mul_(torch.randn_like(norm.weight).sign())
            norm.bias.uniform_(-0.5, 0.5)
        for _ in range(3):
            net.train()(torch.randn(8, 3, 128, 128))
    pre = zoo.family_preprocessing(net.spec)
    return Bundle(
        net.eval(), name, tuple(map(str, range(net.spec.classes))), pre, source="random weights"
    )


def ship(bundle: Bundle, path: Path, format: str, precision: Precision) -> None:
    """Without a limit on top-1: of random weights it says nothing."""
    pictures = smooth_pictures(48)
    export(
        bundle,
        path,
        ComparisonImages(pictures[:16]),
        format=format,
        precision=precision,
        calibration=pictures[16:] if precision == "int8" else (),
        max_drop=100,
        threads=THREADS,
    )


def smooth_pictures(count: int) -> list[Image.Image]:
    """Noise that is stronger the coarser it is, as in photographs."""
    rng = np.random.default_rng(0)
    frequencies = np.hypot(*np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE)))
    frequencies[0, 0] = 1 / SIDE
    pictures = []
    for _ in range(count):
        waves = np.fft.fft2(rng.standard_normal((3, SIDE, SIDE))) / frequencies
        values = np.fft.ifft2(waves).real
        values = (values - values.mean()) / values.std() * 60 + 128
        pictures.append(Image.fromarray(values.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)))
    return pictures


def one_export(name: str) -> dict[str, float]:
    bundle = random_bundle(name)
    with TemporaryDirectory() as scratch:
        began = time.perf_counter()
        ship(bundle, Path(scratch) / "net.onnx", "onnx", "fp32")
        seconds = time.perf_counter() - began
    (kib,) = (
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if "VmHWM" in line
    )
    return {
        "seconds": seconds,
        "peak_memory_gib": int(kib) / 2**20,
    }  # getrusage would count the parent's memory


if __name__ == "__main__":
    main()
