"""Are networks of this package as fast as timm's on a CPU? Training and inference, both layouts.

    python benchmarks/cpu_parity.py --out benchmarks/cpu_parity.json

Needs a quiet machine and takes some minutes. In every round each network of a pair runs one call
directly after the other, and the ratio is computed within the round: above 1, this package's is
faster. A call has 8 images, on 2 threads, in float32, eager; training steps are complete, with SGD.
Networks are plain: batch norms are not folded. `--quick` uses one thread, since on a busy machine a
thread without a core delays the other.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.bench import BenchOptions, bench
from fullstride.measure.protocols import THROUGHPUT, Measurement, Protocol, spread
from fullstride.measure.workload import Layout
from fullstride.nets import zoo

OUTPUT = json_output("results of a benchmark", "environment", "rows")
PAIRS = {
    "tresnet_m": "timm/tresnet_m",
    "resnet_rs_50": "timm/resnetrs50",
    "genet_large": "timm/gernet_l",
}
THREADS = 2
LAYOUTS: tuple[Layout, ...] = ("nchw", "nhwc")
ONE_CALL = replace(THROUGHPUT, batch=8, round_s=1e-6)
WORKS = (
    replace(ONE_CALL, rounds=15),
    replace(ONE_CALL, work="training", resolution=160, rounds=10),
)
QUICK: dict[str, Any] = dict(batch=2, resolution=64, warmup_s=0.0, rounds=2)


def contests(
    works: tuple[Protocol, ...], threads: int
) -> Iterator[tuple[Measurement, Measurement]]:
    """timm's network and this package's, measured in turn."""
    for name, theirs in PAIRS.items():
        nets = {each: zoo.create(each) for each in (theirs, name)}
        for work in works:
            for layout in LAYOUTS:
                options = BenchOptions(layout=layout, threads=threads, reference=theirs)
                timm, ours = bench(nets, work, options=options)
                yield timm, ours


def row(timm: Measurement, ours: Measurement) -> dict[str, Any]:
    ratios = np.divide(ours.samples, timm.samples)  # of images/s, one for each round
    low, middle, high = np.percentile(ratios, (10, 50, 90))
    assert timm.cpu_ms_per_image is not None
    assert ours.cpu_ms_per_image is not None
    return {
        "network": ours.name,
        "timm": timm.name,
        "work": ours.protocol.work,
        "layout": ours.layout,
        "ratio": float(middle),
        "ratio_p10": float(low),
        "ratio_p90": float(high),
        "ratio_spread": spread(list(ratios)),
        "cpu_time_ratio": timm.cpu_ms_per_image / ours.cpu_ms_per_image,  # of medians
        "images_per_s": ours.images_per_s,
        "timm_images_per_s": timm.images_per_s,
        "protocol": asdict(ours.protocol),
        "samples": ours.samples,  # images/s
        "timm_samples": timm.samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny images and two rounds: shows that it runs"
    )
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args()
    works, threads = WORKS, THREADS
    if args.quick:
        works, threads = tuple(replace(work, **QUICK) for work in WORKS), 1
    rows, environment = [], None
    line = "{:14}{:11}{:8}{:>9}{:>8}{:>7}  {:13}{:>9}".format
    print(line("network", "work", "layout", "images/s", "timm", "ratio", "p10..p90", "CPU time"))
    for timm, ours in contests(works, threads):
        result, environment = row(timm, ours), asdict(ours.environment)
        rows.append(result)
        rates = f"{ours.images_per_s:.1f}", f"{timm.images_per_s:.1f}", f"{result['ratio']:.3f}"
        span = f"{result['ratio_p10']:.3f}..{result['ratio_p90']:.3f}"
        cpu_time = f"{result['cpu_time_ratio']:.3f}"
        print(line(ours.name, result["work"], ours.layout, *rates, span, cpu_time), flush=True)
    if args.out:
        with atomic_write(args.out, OUTPUT) as temporary:
            data = {"environment": environment, "rows": rows}
            temporary.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
