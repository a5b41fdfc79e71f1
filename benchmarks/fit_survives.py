"""Does a fit that is killed at random moments end as one that was left alone?

    python benchmarks/fit_survives.py --out benchmarks/fit_survives.json

A fit of the digits runs to its end. A second one has the same measured times, and is killed by
SIGKILL at random moments, each time a few seconds after its start, and started again by the same
command. Then it runs to its end. Both must have the same plan, the same scores of all rungs, the
same finalists, and weights of the same bits; no file of a trial or a rung that has ended may be
written again. The JSON has the kills with what had ended before each, and the comparisons.
"""

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fullstride.measure.environment import Environment
from fullstride.outputs import json_output
from fullstride.writing import atomic_write

OUTPUT = json_output("results of a benchmark", "environment", "kills", "same")
COMMAND = ["fit", "digits", "--budget-ms", "50", "--weights", "none", "--hours", "0.05"]
COMMAND += ["--candidates", "genet_tiny", "resnet_rs_tiny", "tresnet_tiny", "--resolutions", "32"]
MEASURED = ("times", "training_times")  # folders of times, which differ from one fit to the next
ONCE = ("times/*.json", "training_times/*.json", "rungs/*/*.json", "trials/*/bundle/*")
START_S = 12.0  # imports and the stages that are read


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "fullstride", *COMMAND, "--out", str(out)]


def ended(folder: Path) -> dict[str, float]:
    """The files that must be written once, with the time of their last change."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime
        for pattern in ONCE
        for path in sorted(folder.glob(pattern))
    }


def killed(out: Path, seconds: float) -> dict[str, Any]:
    """Start the fit, kill it after `seconds`, and return what had ended before and after."""
    before = ended(out)
    process = subprocess.Popen(command(out), stdout=subprocess.PIPE, text=True)
    try:
        printed, _ = process.communicate(timeout=seconds)
        return {"ended_by_itself": True, "code": process.returncode, "rewritten": []}
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        printed, _ = process.communicate()
    after = ended(out)
    return {
        "seconds": round(seconds, 2),
        "last_line": (printed.splitlines() or [""])[-1],
        "ended_files": len(after),
        "rewritten": [name for name in before if after.get(name) != before[name]],
    }


def digests(folder: Path) -> dict[str, str]:
    """Of the weights of all trials, the scores of all rungs and the plan."""
    patterns = ("trials/*/bundle/weights.safetensors", "plan.json", "outcome.json")
    return {
        str(path.relative_to(folder)): digest(path)
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
    }


def digest(path: Path) -> str:
    """A hash of the bytes, but for the seconds that training took."""
    content = path.read_bytes()
    if path.name == "outcome.json":
        result = json.loads(content)["result"]
        for score in result["scores"]:
            score.pop("seconds")
        content = json.dumps(result).encode()
    return hashlib.sha256(content).hexdigest()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        alone, other = Path(temporary) / "alone", Path(temporary) / "killed"
        began = time.perf_counter()
        subprocess.run(command(alone), check=True)
        seconds = time.perf_counter() - began
        kills = []
        for number in range(args.kills):
            span = 2 * max(0.0, seconds - START_S) / args.kills
            kills.append(killed(other, START_S + draw.uniform(0, span)))
            print(f"kill {number + 1}: {kills[-1]}", flush=True)
            if number == 0:  # the settings are there: from here on the times are the same
                for name in MEASURED:
                    shutil.copytree(alone / name, other / name, dirs_exist_ok=True)
                shutil.copy(alone / "times.json", other / "times.json")
                shutil.copy(alone / "plan.json", other / "plan.json")
        before = ended(other)
        subprocess.run(command(other), check=True)
        after = ended(other)
        result = {
            "environment": asdict(Environment.here()),
            "command": " ".join(COMMAND),
            "seconds_alone": round(seconds, 1),
            "kills": kills,
            "rewritten_at_the_end": [name for name in before if after[name] != before[name]],
            "same": digests(alone) == digests(other),
            "digests": digests(alone),
        }
    with atomic_write(args.out, OUTPUT) as beside:
        beside.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{args.kills} kills; the same bits: {result['same']}")


if __name__ == "__main__":
    main()
