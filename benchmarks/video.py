"""Does a network of clips see motion? Four directions, and a twin that cannot.

    python benchmarks/video.py --work /tmp/motion --out benchmarks/video_motion.json

Clips of `fullstride.examples.scenes` at 32 pixels, whose test has digits of other writers before
other photographs. No frame tells the four directions apart. resnet3d_rs_tiny and its twin, all of
whose kernels have one frame, are trained from random weights with the same recipe, three seeds
each, by two processes of one thread. Beside the JSON is the table as a page. Seconds are those of
the processors, of training with its videos and of both scores.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fullstride.examples import write_motion
from fullstride.io.writing import Output, atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.spec import NetSpec
from fullstride.tasks import find_task
from fullstride.train import run, run_folder
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import score_bundle

MODEL, TWIN = "resnet3d_rs_tiny", "the twin without kernels over time"
SEEDS = (0, 1, 2)
GOALS = {MODEL: (">=", 90.0), TWIN: ("<=", 55.0)}  # top-1 of each seed
COUNTS = {"train": 800, "val": 40, "test": 400}
SIDE = 32  # pixels
PROCESSES = 2
RECIPE = Recipe(
    epochs=1,
    steps=400,
    batch_size=16,
    optimizer="adamw",
    lr=0.005,
    weight_decay=0.01,
    warmup_epochs=1,
    ema_decay=0.98,
    label_smoothing=0.0,
    scale=(1.0, 1.0),
    ratio=(1.0, 1.0),
    crop=1.0,
    task_options={"frame_stride": 1},
    score_every_epochs=1000,
)
TITLE = "# Motion"
OUTPUT = json_output("a study of motion", "study", "recipe", "rows")
PAGE = Output("a table of motion", ".md", lambda path: path.read_text().startswith(TITLE))


def without_time(spec: NetSpec) -> NetSpec:
    """The network for the same clips with kernels of one frame each: it sees a set of frames."""
    stages = tuple(replace(stage, time_kernel=1) for stage in spec.stages)
    return replace(spec, stages=stages, style=replace(spec.style, time_kernel=1))


def train_one(name: str, seed: int, work: Path, recipe: Recipe) -> dict[str, Any]:
    """A row of the table: one training, scored on the test."""
    torch.set_num_threads(1)
    begin = time.process_time()
    task = find_task("video")
    data = task.open_data(str(work / "clips"))
    model, out = MODEL, work / f"run{[*GOALS].index(name)}{seed}"
    if name == TWIN:
        model = str(work / f"twin{seed}.json")
        Path(model).write_text(without_time(zoo.spec(MODEL)).to_json())
    list(run.train(out, model, data, replace(recipe, seed=seed), RunOptions(task=task.name)))
    bundle = Bundle.load(out / run_folder.BUNDLE)
    top1 = score_bundle(bundle, data.test, "cpu").scores["top1"]
    return {
        "name": name,
        "seed": seed,
        "top1": top1,
        "cpu_s": time.process_time() - begin,
        "parameters": sum(each.numel() for each in bundle.net.parameters()),
    }


def study_rows(
    work: Path, counts: Mapping[str, int] = COUNTS, recipe: Recipe = RECIPE
) -> Iterator[dict[str, Any]]:
    """A row for each network and seed."""
    write_motion(work / "clips", counts, SIDE, as_videos=True)
    cases = [(name, seed) for seed in SEEDS for name in GOALS]
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        for each in [pool.submit(train_one, *case, work, recipe) for case in cases]:
            yield each.result()


def reached(row: Mapping[str, Any]) -> bool:
    sign, goal = GOALS[row["name"]]
    return row["top1"] >= goal if sign == ">=" else row["top1"] <= goal


def page(content: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    recipe, where = content["recipe"], content["environment"]
    lines = [
        TITLE,
        "",
        f"`python benchmarks/video.py`, {where['date'][:10]}, {where['device']}, {PROCESSES} "
        f"processes of one thread, torch {where['torch']}: {content['wall_s']:.0f} s in all, "
        f"{content['cpu_s']:.0f} s of the processors.",
        f"Four directions of motion, {recipe['steps']} steps of {recipe['batch_size']} clips of "
        f"{zoo.spec(MODEL).frames} x {SIDE} x {SIDE} pixels; top-1 on the test in percent. Chance "
        "is 25; 50 is the most that the frames without their order allow.",
        "",
        f"| network | {' | '.join(f'seed {seed}' for seed in SEEDS)} | goal | CPU s a training "
        "| parameters |",
        "|---" * (len(SEEDS) + 4) + "|",
    ]
    for name, (sign, goal) in GOALS.items():
        rows = [row for row in content["rows"] if row["name"] == name]
        if rows:
            values = {row["seed"]: f"{row['top1']:.1f}" for row in rows}
            cells = [values.get(seed, "-") for seed in SEEDS]
            seconds = sum(row["cpu_s"] for row in rows) / len(rows)
            cells += [f"{sign} {goal:.0f}", f"{seconds:.0f}", f"{rows[0]['parameters']:,}"]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="a folder for clips and runs")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    begin, own = time.perf_counter(), time.process_time()
    content: dict[str, Any] = {"study": "motion", "recipe": asdict(RECIPE), "rows": []}
    content["environment"] = asdict(Environment.here("cpu"))
    for row in study_rows(words.work):
        content["rows"].append(row)
        print(f"{row['name']}, seed {row['seed']}: {row['top1']:.1f} %", flush=True)
    content["wall_s"] = time.perf_counter() - begin
    content["cpu_s"] = time.process_time() - own + sum(row["cpu_s"] for row in content["rows"])
    with atomic_write(words.out, OUTPUT) as temporary:
        temporary.write_text(json.dumps(content, indent=1))
    with atomic_write(words.out.with_suffix(".md"), PAGE) as temporary:
        temporary.write_text(page(content))
    print(page(content))
    if missed := [row["name"] for row in content["rows"] if not reached(row)]:
        raise SystemExit(f"the goal is missed {len(missed)} times: {', '.join(missed)}")


if __name__ == "__main__":
    main()
