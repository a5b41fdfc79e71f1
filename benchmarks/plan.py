"""How long does the plan of a fit take with the default candidates, and which would it train?

    python benchmarks/plan.py --out benchmarks/plan.json
    python benchmarks/plan.py --out benchmarks/plan.json --budget-ms 40 --weights none

A `fit --dry-run` of 300 smooth random pictures in five classes for each budget, in a process of its
own, without formats or candidates being named. The hub is simulated: every released network is
there, with random weights in place of its own, as weights do not change a time. The JSON has the
seconds by the clock, the CPU-seconds and the memory of each plan, the load of the machine before
and after it, the candidates with a measured time, and those that it would train, the most promising
first. `--once` measures files once where rounds spread, as on a machine without other programs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fullstride.cli import main as fullstride
from fullstride.io.writing import atomic_write, json_output
from fullstride.measure import protocols
from fullstride.measure.environment import Environment
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.timm_wrapper import TimmNetwork, timm_spec
from fullstride.nets.weights import hub

OUTPUT = json_output("results of a benchmark", "environment", "plans")
CLASSES, PICTURES, SIDE, CELLS = 5, 60, 300, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file to write or add to")
    parser.add_argument("--budget-ms", type=float, nargs="*", default=[5.0, 10.0, 20.0, 40.0])
    parser.add_argument("--weights", choices=("hub", "none"), default="hub")
    parser.add_argument("--once", action="store_true", help="no second measurement of noisy files")
    parser.add_argument("--fit", type=Path, nargs=2, help="PICTURES and OUT of a plan in here")
    args = parser.parse_args()
    if args.fit:
        pictures, out = args.fit
        plan_here(pictures, out, args.budget_ms[0], args.weights, args.once)
        return
    if not args.out:
        parser.error("--out is missing: give a JSON file")
    plans = json.loads(args.out.read_text())["plans"] if args.out.exists() else {}
    for budget_ms in args.budget_ms:
        how = ["--budget-ms", f"{budget_ms:g}", "--weights", args.weights, *["--once"] * args.once]
        with tempfile.TemporaryDirectory() as scratch:
            pictures, out = Path(scratch, "pictures"), Path(scratch, "fit")
            write_pictures(pictures)
            row = measure(pictures, out, how)
        plans[f"{budget_ms:g} ms, weights {args.weights}"] = row
        print(f"{budget_ms:g} ms: {row}", flush=True)
        with atomic_write(args.out, OUTPUT) as beside:
            result = {"environment": asdict(Environment.here("cpu")), "plans": plans}
            beside.write_text(json.dumps(result, indent=1) + "\n")


def measure(pictures: Path, out: Path, how: list[str]) -> dict[str, Any]:
    """The plan of a fit in another process: what it took and what it found."""
    load, begin = os.getloadavg()[0], time.perf_counter()
    command = [sys.executable, __file__, *how, "--fit", str(pictures), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begin
    if process.returncode:
        raise SystemExit(f"the plan in {out} failed ({process.returncode})")
    times, plan = (json.loads((out / f"{each}.json").read_text())["result"] for each in STAGES)
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,  # with the converters that it started
        "peak_memory_gb": usage.ru_maxrss / 2**20,
        "load": [load, os.getloadavg()[0]],
        "once": "--once" in how,
        "candidates": len({each["candidate"] for each in times}),
        "measured": sorted({each["candidate"] for each in times if is_tried(each)}),
        "trained": plan["candidates"],
    }


STAGES = "times", "plan"


def is_tried(time: dict[str, Any]) -> bool:
    return time["ms"] is not None and not time["left_out"]


def plan_here(pictures: Path, out: Path, budget_ms: float, weights: str, once: bool) -> None:
    hub.is_reachable = lambda *_: True
    zoo.load_released = random_weights
    if once:
        protocols.ATTEMPTS = 1
    sys.argv = ["fullstride", "fit", str(pictures), "--budget-ms", f"{budget_ms:g}", "--dry-run"]
    sys.argv += ["--weights", weights, "--out", str(out)]
    fullstride()


def random_weights(name: str) -> Bundle:
    """A released network, with random weights."""
    model = hub.timm_name(name)
    config = hub.hub_config(model)
    if name.startswith("timm/"):
        net = TimmNetwork(timm_spec(model, classes=config.num_classes))
        pre = hub.hub_preprocessing(model, config)
    else:
        pre = hub.authors_preprocessing(model, config)
        spec = zoo.spec(name.partition(".")[0])
        net = zoo.build(replace(spec, resolution=pre.resolution, classes=config.num_classes))
    return Bundle(
        net=net.eval(),
        name=name,
        classes=zoo.imagenet_words(config.num_classes),
        preprocessing=pre,
        source="random weights",
        licence=config.license or "",
    )


def write_pictures(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(CLASSES * PICTURES):
        path = folder / f"class{number % CLASSES}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        cells = rng.integers(0, 256, (CELLS, CELLS, 3), dtype=np.uint8)
        Image.fromarray(cells).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path)


if __name__ == "__main__":
    main()
