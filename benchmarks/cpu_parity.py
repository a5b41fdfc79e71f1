"""Are our networks as fast as timm's on a CPU? Training steps and inference, eager, in both memory layouts.

    python benchmarks/cpu_parity.py --out benchmarks/cpu_parity.json

For a machine with nothing else to do, on which it takes some minutes. Of each pair both do one call in every round, one
right after the other, and the ratio is taken within the round: above 1 ours is faster. Every call is of 8 images, on 2
threads, in float32; a training step is whole, with SGD. Networks are as `zoo.create` gives them: not lean, not folded.
`--quick` takes one thread, since on a busy machine one that waits for a core holds up the other.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.measure.bench import bench
from fullstride.measure.protocols import THROUGHPUT, Measurement, Protocol
from fullstride.measure.timing import spread
from fullstride.measure.workload import Layout
from fullstride.nets import zoo
from fullstride.storage import atomic_write

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
    """timm's and ours, measured in turn."""
    for name, theirs in PAIRS.items():
        nets = {each: zoo.create(each) for each in (theirs, name)}
        for work in works:
            for layout in LAYOUTS:
                timm, ours = bench(nets, work, layout=layout, threads=threads, reference=theirs)
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
    asked = parser.parse_args()
    works, threads = (
        (tuple(replace(work, **QUICK) for work in WORKS), 1) if asked.quick else (WORKS, THREADS)
    )
    rows, environment = [], None
    print(
        f"{'network':14}{'work':11}{'layout':8}{'images/s':>9}{'timm':>8}{'ratio':>7}   p10..p90     of CPU time"
    )
    for timm, ours in contests(works, threads):
        one, environment = row(timm, ours), asdict(ours.environment)
        rows.append(one)
        print(
            f"{ours.name:14}{one['work']:11}{ours.layout:8}{ours.images_per_s:>9.1f}{timm.images_per_s:>8.1f}"
            f"{one['ratio']:>7.3f}   {one['ratio_p10']:.3f}..{one['ratio_p90']:.3f} {one['cpu_time_ratio']:>8.3f}",
            flush=True,
        )
    if asked.out:
        with atomic_write(asked.out) as beside:
            beside.write_text(
                json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
