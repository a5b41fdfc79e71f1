"""What do kernels, fused networks and the papers' tables do on this GPU? All measurements at once.

    python benchmarks/gpu.py --out benchmarks/results_gpu --commit $(git rev-parse --short HEAD)

Needs torch, timm, triton, torchvision, rich, safetensors and numpy, and pytest for one part; the
package need not be installed. Each part is a process of its own with a time limit; errors are
recorded and stop nothing else. The last lines are the gate of docs/internals/fused.md. `--device
cpu --tiny` tests the script itself.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS = ROOT / "src", ROOT / "tests" / "nets" / "fused"
sys.path[:0] = [str(SOURCE), str(TESTS)]

import torch  # noqa: E402
from gpu_parts import digits, gate, kernels, training  # noqa: E402
from gpu_parts.settings import TIME_SHARE, Result, Settings, Work  # noqa: E402

from fullstride.measure.environment import Environment, choose_device  # noqa: E402
from fullstride.papers.suite import reason  # noqa: E402

LINES, WIDTH = 100, 240  # of the summary

# Name -> its work, and its default minutes.
PARTS: dict[str, tuple[Callable[[Settings], Iterator[Work]], float]] = {
    "correctness": (kernels.correctness, 4),
    "bandwidth": (kernels.bandwidth, 3),
    "speed": (training.speed, 15),
    "batches": (training.batches, 7),
    "papers": (digits.papers, 8),
    "training": (digits.training, 3.5),
}


def run_part(part: str, settings: Settings, commit: str = "", match: str = "") -> None:
    """Run one part in this process. Its file is written again after every result."""
    environment = Environment.here(settings.device)
    environment = asdict(replace(environment, commit=commit or environment.commit))
    results: list[Result] = []
    deadline = time.monotonic() + TIME_SHARE * settings.seconds
    for name, work in PARTS[part][0](settings):
        if match not in name:
            continue
        start = time.monotonic()
        result: Result = {"error": "not started: the time of the part is over"}
        if start <= deadline:
            try:
                result = work()
            except Exception as error:
                result = {"error": reason(error)}
                error.__traceback__ = None  # it refers to maps
        if settings.gpu:
            with suppress(RuntimeError):  # after an illegal access every later call raises it
                torch.cuda.empty_cache()
        duration = round(time.monotonic() - start, 1)
        results.append({"name": name, **result, "seconds": duration})
        write(
            settings.out / f"{part}.json",
            {"part": part, "environment": environment, "results": results},
        )
        print(line(part, results[-1]), flush=True)


def line(part: str, result: Result) -> str:
    sign = ("ok   " if result["ok"] else "BAD  ") if "ok" in result else "     "
    error = result.get("error")
    text = f"error: {error}" if isinstance(error, str) else result["summary"]
    return f"{sign}{part}: {result['name']}: {text}"[:WIDTH]


def write(path: Path, data: Any) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(data, indent=1, default=str) + "\n")
    temporary.replace(path)


def read(path: Path) -> list[Result]:
    """The results of a part; [] where it wrote none."""
    return json.loads(path.read_text())["results"] if path.exists() else []


def start_part(part: str, arguments: Sequence[str], seconds: float) -> str | None:
    """Run the part in a process group of its own; returns why it was ended, if it was."""
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, "--only", part, "--minutes", str(seconds / 60), *arguments]
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"ended after its {seconds / 60:g} minutes"
    return f"exit code {code}" if code else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, help="of each part, instead of its default")
    default = os.environ.get("OUT") or ROOT / "benchmarks" / "results_gpu"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--commit", default="", help="for a copy without git's history")
    parser.add_argument("--match", default="", help="only work with this in its name")
    parser.add_argument("--tiny", action="store_true", help="tiny networks and maps, for a test")
    parser.add_argument("--only", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        device, out = choose_device(args.device), Path(args.out)
    except ValueError as error:
        parser.error(str(error))
    if device.type == "cpu" and not args.tiny:
        parser.error("no GPU is present: add --device cpu --tiny to test the script itself")
    out.mkdir(parents=True, exist_ok=True)
    if args.only:
        settings = Settings(device=device, tiny=args.tiny, out=out, seconds=60 * args.minutes)
        run_part(args.only, settings, args.commit, args.match)
        return
    arguments = ["--device", str(device), "--out", str(out)]
    arguments += ["--commit", args.commit, "--match", args.match] + ["--tiny"] * args.tiny
    ends: dict[str, str | None] = {}
    summary: list[str] = []
    for part in args.parts:
        (out / f"{part}.json").unlink(missing_ok=True)
        ends[part] = start_part(part, arguments, 60 * (args.minutes or PARTS[part][1]))
        summary += [line(part, result) for result in read(out / f"{part}.json")]
        summary += [f"BAD  {part}: {ends[part]}"] if ends[part] else []
        write(out / "summary.json", {"ends": ends, "lines": summary})
    measured = [{r["name"]: r for r in read(out / f"{part}.json")} for part in ("speed", "batches")]
    verdicts = gate.verdicts(*measured)
    write(out / "summary.json", {"ends": ends, "lines": summary, "gate": verdicts})
    print("\n".join(["", *summary[: LINES - 1 - len(verdicts)], *verdicts]))


if __name__ == "__main__":
    main()
