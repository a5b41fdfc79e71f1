"""Does a fit that is killed at random moments end as one that was left alone?

    python benchmarks/fit_survives.py --out benchmarks/fit_survives.json
    python benchmarks/fit_survives.py --teacher --kills 6 --out benchmarks/fit_survives_teacher.json

A first fit of the digits shows when each file is complete. A second one is killed by SIGKILL at
random moments, uniform over the time of the first one: as soon as it has as many complete files as
the first one had at the moment, and after the rest of the time. The same command then goes on. A
third fit, left alone, has the measured times of the second one, which decide between candidates
and differ from run to run. The second and the third must have the same plan, scores, finalists and
files, bit for bit, and no file that was complete may be written again. The JSON has each kill with
the files that were complete, and the comparisons.

With `--teacher` the fit has hours, and of its two networks the better one is beyond the budget, so
that it trains as a teacher, and the other once more as its student. The moments are uniform over
these two trainings and what follows. `ships` is the network that shipped, the student or not.
"""

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fullstride import zoo
from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.environment import Environment

OUTPUT = json_output("results of a benchmark", "environment", "kills", "same")
FIT = ["fit", "digits", "--weights", "none", "--formats", "onnx", "--device", "cpu"]
COMMAND = [*FIT, "--budget-ms", "50", "--epochs", "6", "--precisions", "fp32", "int8"]
COMMAND += ["--candidates", "genet_tiny", "resnet_rs_tiny", "--resolutions", "16", "24"]
# Of a network of 0.06 ms here and one of 1 ms.
TEACHING = [*FIT, "--budget-ms", "0.25", "--hours", "10", "--precisions", "fp32"]
# What is complete once it is there. ship/times.json has a second measurement where the first one
# is in doubt, and seconds.json grows.
ONCE = ("*.json", "times/*.json", "training_times/*.json", "rungs/*/*.json", "ship/*.json")
ONCE += ("trials/*/scores.json", "trials/*/bundle/*", "model.onnx")
GROWING = ("seconds.json", "ship/times.json", "fit.json")
# Times that are measured, the settings, and their results as they are compared.
MEASURED = ("fit_config.json", "times", "training_times", "ship/times.json")
RESULTS = ("times.json", "plan.json", "training.json", "teaching.json", "shipping.json")
RESULTS += ("rungs/*/*.json",)
RESULTS += ("trials/*/bundle/weights.safetensors", "ship/*.onnx", "ship/test.json", "model.onnx")
VARYING = ("seconds", "environment")  # fields of results
POLL_S = 0.02


def start(folder: Path, command: Sequence[str] = COMMAND) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "fullstride", *command, "--out", str(folder)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def with_teacher(folder: Path, epochs: int) -> list[str]:
    """The command of a fit with a teacher; its networks are written to `folder`."""
    spec = zoo.spec("genet_tiny")
    words = [*TEACHING, "--epochs", str(epochs), "--candidates"]
    for name, width, side in (("small", 0.25, 12), ("large", 2.0, 32)):
        path = folder / f"{name}.json"
        path.write_text(replace(spec.scaled(width=width), resolution=side).to_json())
        words.append(str(path))
    return words


def complete_files(folder: Path) -> dict[str, int]:
    """The files that must not be written again, with the time of their last change."""
    names = {
        path.relative_to(folder).as_posix(): path.stat().st_mtime_ns
        for pattern in ONCE
        for path in folder.glob(pattern)
    }
    return {name: when for name, when in sorted(names.items()) if name not in GROWING}


def left_alone(folder: Path, command: Sequence[str] = COMMAND) -> list[float]:
    """Run a fit to its end; seconds after the first file at which each further one was complete."""
    process, moments = start(folder, command), list[float]()
    while process.poll() is None:
        new = len(complete_files(folder)) - len(moments)
        moments += [time.perf_counter()] * new
        time.sleep(POLL_S)
    fail_on_error(process)
    return [moment - moments[0] for moment in moments]


def seconds_until(folder: Path, name: str) -> float:
    """Seconds after the first file at which a file was complete."""
    times = complete_files(folder)
    return (times[name] - min(times.values())) / 1e9


def fail_on_error(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the fit ended with code {process.returncode}: {errors}")


def kill_at(
    folder: Path, moment: float, moments: Sequence[float], command: Sequence[str] = COMMAND
) -> dict[str, Any]:
    """Go on with the fit until `moment` of the first one, whose files were complete at `moments`.

    Returns the files at the kill that are incomplete or that were written again.
    """
    count = sum(each <= moment for each in moments)
    rest_s = moment - moments[count - 1]
    before = complete_files(folder)
    process = start(folder, command)
    while process.poll() is None and len(complete_files(folder)) < count:
        time.sleep(POLL_S)
    try:
        process.wait(rest_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    else:
        fail_on_error(process)
    after = complete_files(folder)
    return {
        "moment_s": round(moment, 2),
        "killed": process.returncode != 0,
        "stage": stage_of(folder),
        "complete_files": len(after),
        "written_again": [name for name in before if after.get(name) != before[name]],
    }


def stage_of(folder: Path) -> str:
    """The first stage without a result."""
    stages = ["data", "candidates", "times", "plan", "training", "shipping"]
    if json.loads((folder / "fit_config.json").read_text())["settings"]["hours"]:
        stages.insert(-1, "teaching")
    return next((name for name in stages if not (folder / f"{name}.json").exists()), "results")


def digests(folder: Path) -> dict[str, str]:
    """Hashes of all results, of JSON without what varies from run to run or by the folder."""
    return {
        path.relative_to(folder).as_posix(): digest(path, folder)
        for pattern in RESULTS
        for path in sorted(folder.glob(pattern))
        if path.relative_to(folder).as_posix() not in GROWING
    }


def digest(path: Path, folder: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".json":
        content = json.dumps(without_varying(json.loads(content))).encode()
        content = content.replace(str(folder.resolve()).encode(), b"FOLDER")  # of a teacher
    return hashlib.sha256(content).hexdigest()


def without_varying(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_varying(each) for key, each in value.items() if key not in VARYING}
    return [without_varying(each) for each in value] if isinstance(value, list) else value


def copy_measured(folder: Path, other: Path) -> None:
    """Give a fit that has not begun the settings and the measured times of another one."""
    for name in MEASURED:
        source, target = folder / name, other / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--teacher", action="store_true", help="a fit that trains a teacher")
    parser.add_argument("--epochs", type=int, default=4, help="of each training with a teacher")
    args = parser.parse_args(words)
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        first, second, third = (Path(temporary) / name for name in ("first", "second", "third"))
        command = with_teacher(Path(temporary), args.epochs) if args.teacher else COMMAND
        moments = left_alone(first, command)
        print(f"alone: {len(moments)} files in {moments[-1]:.1f} s", flush=True)
        kills = []
        begin = seconds_until(first, "training.json") if args.teacher else 0.0
        for moment in sorted(draw.uniform(begin, moments[-1]) for _ in range(args.kills)):
            kills.append(kill_at(second, moment, moments, command))
            print(kills[-1], flush=True)
        before = complete_files(second)
        fail_on_error(start(second, command))
        after = complete_files(second)
        copy_measured(second, third)
        fail_on_error(start(third, command))
        killed, alone = digests(second), digests(third)
        shipment = json.loads((third / "fit.json").read_text())["shipment"]
        ships = shipment["files"][shipment["best"]]["candidate"]
    different = sorted(name for name in {*killed, *alone} if killed.get(name) != alone.get(name))
    again = [name for name in before if after[name] != before[name]]
    result = {
        "environment": asdict(Environment.here()),
        "command": " ".join(command).replace(f"{temporary}/", ""),
        "seconds": round(moments[-1], 1),
        "ships": ships,
        "kills": kills,
        "written_again": [name for kill in kills for name in kill["written_again"]] + again,
        "same": not different,
        "different": different,
        "digests": alone,
    }
    with atomic_write(args.out, OUTPUT) as beside:
        beside.write_text(json.dumps(result, indent=1) + "\n")
    count = sum(kill["killed"] for kill in kills)
    print(f"{count} kills; the same bits: {result['same']}; again: {result['written_again']}")


if __name__ == "__main__":
    main()
