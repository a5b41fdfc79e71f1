"""How much faster are exported files than timm in PyTorch, on this CPU?

    python benchmarks/shipping.py --out benchmarks/shipping.json

Takes about half an hour on an idle machine. TResNet-M, ResNet-RS-50 and GENet-large at 224 pixels,
batches of 1 and 16, on 2 threads. Each file is measured in turn with the reference, timm's network
of the same name in eager float32, NCHW. Weights are random, with realistic batch-norm statistics;
int8 takes its ranges from smooth random pictures. So the times are those of trained networks, but
accuracies are not: shipping_digits.py measures them. The last line has the time and the peak memory
of one export.
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
from fullstride.deploy.settings import ExportOptions
from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.bench import BenchOptions, bench
from fullstride.measure.protocols import THROUGHPUT, Measurement
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle

OUTPUT = json_output("results of a benchmark", "environment", "rows")
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
    parser.add_argument("--files", nargs="*", help="such as openvino-int8; by default all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--one-export", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    if args.one_export:
        print(json.dumps(one_export(args.one_export)))
        return
    rows: list[Measurement] = []
    files = [each for each in FILES if not args.files or "-".join(each) in args.files]
    print(f"{'network':14}{'file':16}{'batch':>6}{'ms/image':>10}{'spread':>8}{'times timm':>12}")
    for name in [args.only] if args.only else PAIRS:
        for row in measure(name, files, args.rounds):
            rows.append(row)
            speed = f"{1000 / row.images_per_s:>10.2f}{row.spread:>8.2f}{row.ratio:>12.2f}"
            print(f"{name:14}{row.name:16}{row.protocol.batch:>6}{speed}", flush=True)
    whole = subprocess.run(
        [sys.executable, __file__, "--one-export", "tresnet_m"],
        capture_output=True,
        text=True,
        check=True,
    )
    one = json.loads(whole.stdout.splitlines()[-1])
    print(f"export of tresnet_m to ONNX: {one['seconds']:.1f} s, {one['peak_memory_gib']:.2f} GiB")
    if args.out:
        with atomic_write(args.out, OUTPUT) as beside:
            results = {
                "export": one,
                "rows": [{**asdict(row), "environment": None} for row in rows],
            }
            environment = asdict(rows[0].environment)
            beside.write_text(json.dumps({"environment": environment, **results}, indent=1) + "\n")


def measure(name: str, files: list[tuple[str, Precision]], rounds: int) -> Iterator[Measurement]:
    """timm's network and each file, measured in turn. A row is named after its file or network."""
    bundle = random_bundle(name)
    with TemporaryDirectory() as scratch:
        nets: dict[str, nn.Module] = {PAIRS[name]: zoo.create(PAIRS[name])}
        for format, precision in files:
            label = f"{format} {precision}"
            path = Path(scratch) / f"{format}_{precision}{FORMATS[format].suffix}"
            export_random(bundle, path, format, precision)
            nets[label] = ExportedModule(open_file(path, threads=THREADS, trust=True))
        for batch in BATCHES:
            protocol = replace(THROUGHPUT, batch=batch, resolution=SIDE, rounds=rounds)
            options = BenchOptions(threads=THREADS, reference=PAIRS[name])
            yield from bench(nets, protocol, options=options)


def random_bundle(name: str) -> Bundle:
    """A network with weights of both signs in its batch norms, and statistics of random images."""
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
        net.eval(),
        name=name,
        classes=tuple(map(str, range(net.spec.classes))),
        preprocessing=pre,
        source="random weights",
    )


def export_random(
    bundle: Bundle, path: Path, format: str, precision: Precision, device: str = "cpu"
) -> None:
    """Without a limit on the drop of top-1, which means nothing for random weights."""
    pictures = smooth_pictures(48)
    export(
        bundle,
        path,
        ComparisonImages(pictures[:16]),
        ExportOptions(
            format=format, precision=precision, max_drop=100, device=device, threads=THREADS
        ),
        calibration=pictures[16:] if precision == "int8" else (),
    )


def smooth_pictures(count: int) -> list[Image.Image]:
    """Noise with more power in low frequencies, as in photographs."""
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
        export_random(bundle, Path(scratch) / "net.onnx", "onnx", "fp32")
        seconds = time.perf_counter() - began
    (kib,) = (
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if "VmHWM" in line
    )
    # getrusage would count the memory of the parent process.
    return {"seconds": seconds, "peak_memory_gib": int(kib) / 2**20}


if __name__ == "__main__":
    main()
