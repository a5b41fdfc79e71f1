"""Measures what waits for a GPU, in the order of its value, within given minutes.

    make gpu MINUTES=30

Each part is a process with a share of the minutes that are left. Its file in benchmarks/gpu is
written after every result, and docs/reproduce/gpu.md, the page with goals and published figures,
after every part. The same command goes on with what is missing or failed; without its file a part
is measured again. Without a GPU everything runs on tiny networks and goes to runs/gpu, not to the
page. The package need not be installed.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
sys.path[:0] = [str(SOURCE)]

import torch  # noqa: E402
from gpu_parts import answers, digits, gradients, page, training  # noqa: E402
from gpu_parts.settings import TIME_SHARE, Result, Settings, Work, read  # noqa: E402

from fullstride.io.writing import atomic_write, check_output  # noqa: E402
from fullstride.measure.environment import Environment, choose_device  # noqa: E402
from fullstride.papers.lines import DECISIVE_FIELDS  # noqa: E402
from fullstride.papers.suite import check_alive, reason  # noqa: E402

WIDTH = 240  # of a line
ALIKE = {*DECISIVE_FIELDS} - {"commit"}  # a result of an earlier commit stays, until it is removed

# Name -> its work, and its share of the minutes. The first ones are worth most.
PARTS: dict[str, tuple[Callable[[Settings], Iterator[Work]], float]] = {
    "correctness": (gradients.correctness, 3),
    "speed": (training.speed, 9),
    "batches": (training.batches, 4),
    "shipping": (answers.shipping, 5),
    "profile": (answers.profile, 3),
    "papers": (digits.papers, 3),
    "training": (digits.training, 3),
}


def run_part(part: str, settings: Settings, commit: str = "") -> None:
    """Run what has no result yet, and then what failed. The file is written after every result."""
    environment = Environment.here(settings.device)
    environment = asdict(replace(environment, commit=commit or environment.commit))
    path = settings.out / f"{part}.json"
    before = read(path)
    alike = all(before["environment"].get(name) == environment[name] for name in ALIKE)
    results: dict[str, Result] = before["results"] if alike else {}
    works = dict(PARTS[part][0](settings))
    deadline = time.monotonic() + TIME_SHARE * settings.seconds

    def write() -> None:
        data = {"environment": environment, "planned": [*works], "results": results}
        with atomic_write(path, page.JSON) as beside:
            beside.write_text(page.to_json(data))

    write()
    todo = [name for name in works if "error" in results.get(name, {"error": ""})]
    for name in sorted(todo, key=lambda name: name in results):
        start = time.monotonic()
        if start > deadline:
            return
        try:
            result = works[name]()
        except Exception as error:
            result = {"error": reason(error)}
            error.__traceback__ = None  # it refers to maps
        note = {key: environment[key] for key in ("date", "commit")}
        results[name] = {**result, **note, "seconds": round(time.monotonic() - start, 1)}
        write()
        print(f"{part}: {name}: {page.line(results[name])}"[:WIDTH], flush=True)
        if settings.gpu:
            with suppress(RuntimeError):  # after an illegal access every later call raises it
                torch.cuda.empty_cache()
            check_alive(settings.device)


def start_part(part: str, arguments: Sequence[str], seconds: float) -> str | None:
    """Run the part in a process group of its own; returns why it was ended, if it was."""
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, "--only", part, "--minutes", str(seconds / 60), *arguments]
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"ended after its {seconds / 60:.2g} minutes"
    finally:  # also where this process is interrupted
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"exit code {code}" if code else None


def run_parts(parts: Sequence[str], arguments: Sequence[str], minutes: float) -> Iterator[str]:
    """Run each in its share of what is left of the minutes. Yields why a part was ended."""
    deadline = time.monotonic() + 60 * minutes
    for number, part in enumerate(parts):
        shares = [PARTS[each][1] for each in parts[number:]]
        left_s = max(1.0, deadline - time.monotonic())
        end = start_part(part, arguments, left_s * shares[0] / sum(shares))
        yield f"{part}: {end}" if end else ""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, help="a folder for the files and the page")
    parser.add_argument("--commit", default="", help="for a copy without git's history")
    parser.add_argument("--only", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    try:
        device = choose_device(args.device)
        gpu = device.type == "cuda"
        out = args.out or (page.FOLDER if gpu else ROOT / "runs" / "gpu")
        source, written = (out, out / page.PAGE.name) if args.out else (page.FOLDER, page.PAGE)
        check_output(written, page.MARKDOWN)
        for part in PARTS:
            check_output(out / f"{part}.json", page.JSON)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: use a number above 0")
    if args.only:
        settings = Settings(device=device, out=out, seconds=60 * args.minutes)
        try:
            run_part(args.only, settings, args.commit)
        except OSError as error:
            sys.exit(f"{args.only}: {error}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not gpu:
        print("no GPU is here: everything runs on tiny networks, on the CPU")
    arguments = ["--device", str(device), "--out", str(out), "--commit", args.commit]
    for end in run_parts(args.parts, arguments, args.minutes):
        with atomic_write(written, page.MARKDOWN) as beside:
            beside.write_text(page.page(source, PARTS))
        print(end, end="\n" if end else "", flush=True)
    print(*page.ending(out, PARTS, gpu), f"the page of {source} is {written}", sep="\n")


if __name__ == "__main__":
    main()
