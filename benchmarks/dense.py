"""Do detection, segmentation and depth learn what a constant cannot say? Four tables.

    python benchmarks/dense.py detection --work /tmp/scenes --out benchmarks/dense_detection.json
    python benchmarks/dense.py segmentation|depth|stereo --work FOLDER --out FILE.json [--peers]

Scenes of `fullstride.examples` at 96 pixels, whose test has digits of other writers and other
photographs. Networks are trained from random weights, each in less than five minutes on two cores.
`stereo` has the one photograph of scikit-image whose depth was measured: its left half is trained
on, its right half is the test. `--peers` adds networks of torchvision and of
segmentation_models_pytorch over the same backbone: same batches, as many steps.
Beside the JSON is the table as a page, with the means and the standard deviations of the seeds,
each of which draws other scenes and other weights. Seconds are those of the processor, of training
with its images, in one thread.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dense_peers import BACKBONE, peers, train_peer
from PIL import Image
from torch import Tensor, nn

from fullstride.data.dataset import DataSet
from fullstride.examples import Look, write_scenes
from fullstride.io.writing import Output, atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import build_head, find_task, task_of
from fullstride.tasks.task import Task
from fullstride.train import run, run_folder
from fullstride.train.batches import BatchOptions
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import score_images

MODELS = (f"timm/{BACKBONE}",)
SIDE = 96  # pixels
WINDOW = 250  # pixels of the stereo picture's 741, over its whole height
COUNTS = {"train": 2000, "val": 50, "test": 300}
LOOK = Look(most=3, sides=(0.25, 0.65))
RECIPE = Recipe(
    epochs=1,
    steps=600,
    batch_size=16,
    lr=0.1,
    weight_decay=1e-4,
    warmup_epochs=0.5,
    ema_decay=0.99,
    clip_norm=10.0,
    resolution=SIDE,
    task_options={"head_width": 32},
    score_every_epochs=1000,
)
TITLE = "# Dense tasks: "
OUTPUT = json_output("a study of a dense task", "study", "recipe", "rows")
PAGE = Output("a table of a dense task", ".md", lambda path: path.read_text().startswith(TITLE))


@dataclass(frozen=True)
class Study:
    """What is trained on which data, and what it must achieve."""

    task: str
    columns: Mapping[str, str]  # of the table, by score
    goal: tuple[str, float, str]  # score, and points of it above the row of that name
    write: Callable[[Path, int], None]  # the data of a seed
    recipe: Recipe = RECIPE
    models: tuple[str, ...] = MODELS


def scenes(kind: str, one_class: bool = True) -> Callable[[Path, int], None]:
    return lambda folder, seed: write_scenes(
        folder, COUNTS, SIDE, seed, kind, look=LOOK, one_class=one_class
    )


def write_stereo(folder: Path, seed: int) -> None:
    """Windows of scikit-image's motorcycle: left half for training, right half for the test.

    They are the same for every seed.

    Source of the camera's numbers: the documentation of `skimage.data.stereo_motorcycle`.
    """
    from skimage.data import stereo_motorcycle

    picture, _, disparity = stereo_motorcycle()
    metres = 0.193001 * 994.978 / (disparity + 31.086)
    millimetres = np.where(np.isfinite(disparity), np.round(1000 * metres), 0).astype(np.uint16)
    middle, last = picture.shape[1] // 2, picture.shape[1] - WINDOW
    lefts = {
        "train": range(0, middle - WINDOW + 1, 8),
        "val": [(middle - WINDOW) // 2],  # trained on too: nothing is chosen by it
        "test": [middle, last],
    }
    for split, starts in lefts.items():
        for left in starts:
            for kind, pixels in (("images", picture), ("depth", millimetres)):
                path = folder / kind / split / f"{left:03}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels[:, left : left + WINDOW]).save(path)


DEPTH_COLUMNS = {"delta1": "delta1", "delta2": "delta2", "mae": "error, m"}
STUDIES = {
    "detection": Study(
        "detect",
        {"ap50": "AP50", "ap": "AP"},
        ("ap50", 60.0, "no boxes"),
        scenes("digits"),
        replace(RECIPE, task_options={"head_width": 64}, lr=0.02, steps=400),
    ),
    "segmentation": Study(
        "segment",
        {"digit_iou": "digit IoU", "miou": "mIoU", "pixel_accuracy": "pixel accuracy"},
        ("digit_iou", 60.0, "all background"),
        scenes("digits"),
    ),
    "depth": Study("depth", DEPTH_COLUMNS, ("delta1", 12.0, "median of the row"), scenes("floor")),
    "stereo": Study(
        "depth",
        DEPTH_COLUMNS,
        ("delta1", 0.0, "median of the row"),
        write_stereo,
        replace(RECIPE, resolution=128, steps=400, batch_size=8),
    ),
}


def scores(net: nn.Module, task: Task, data: DataSet, pre: Preprocessing) -> dict[str, float]:
    """What `net` achieves on the test, with the IoU of each class as CLASS_iou."""
    evaluation = score_images(net, task, data.test, BatchOptions(pre, "cpu"))
    result = dict(evaluation.scores)
    for row in evaluation.score.by_class(data.classes):
        if (iou := getattr(row, "iou", None)) is not None:
            result[f"{row.name}_iou"] = iou
    return result


class Constant(nn.Module):
    """The same output for every image."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        return self.output.expand(len(x), *self.output.shape)


def baselines(task: Task, data: DataSet, pre: Preprocessing) -> dict[str, dict[str, float]]:
    """The scores of what does not look at the picture, by the names of their rows."""
    if task.name == "detect":
        boxes = [box for target in data.train.targets for box in target.boxes]
        nothing = torch.tensor([0.0, 0, 0, 0, 0, -1]).repeat(100, 1)
        mean = nothing.clone()
        mean[0] = torch.tensor([*np.mean(boxes, 0), 1, 0])
        outputs = {"no boxes": nothing, "the mean box of the training": mean}
    elif task.name == "segment":
        background = torch.zeros(len(data.classes), pre.resolution, pre.resolution)
        background[0] = 1
        outputs = {"all background": background}
    else:
        outputs = {"median": torch.full((1, pre.resolution, pre.resolution), task.constant)}
    rows = {name: scores(Constant(each), task, data, pre) for name, each in outputs.items()}
    if task.name == "depth":
        rows["median of the row"] = {"delta1": rows["median"]["delta1_rows"]}
    return rows


def study_rows(
    study: Study, folder: Path, with_peers: bool, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """The results of a seed after each training, the baselines first."""
    task = find_task(study.task)
    study = replace(study, recipe=replace(study.recipe, seed=seed))
    where = folder / "data"
    study.write(where, seed)
    data = task.open_data(str(where))
    for number, model in enumerate(study.models):
        out, begin = folder / f"run{number}", time.process_time()
        list(run.train(out, model, data, study.recipe, RunOptions(task=task.name)))
        seconds = time.process_time() - begin
        bundle = Bundle.load(out / run_folder.BUNDLE, build_head)
        trained = task_of(bundle)
        if not number:
            for name, each in baselines(trained, data, bundle.preprocessing).items():
                yield dict(name=name, kind="baseline", scores=each)
        name = f"fullstride {study.task}, {model}"
        yield row(name, "ours", bundle.net, trained, data, bundle.preprocessing, seconds)
    if not with_peers:
        return
    width, side = study.recipe.task_options["head_width"], study.recipe.resolution
    for name, build in peers(trained, len(data.classes), width, side).items():
        begin, pre = time.process_time(), bundle.preprocessing
        net = train_peer(build, data, trained, pre, study.recipe)
        seconds = time.process_time() - begin
        yield row(f"{name}, timm/{BACKBONE}", "peer", net, trained, data, pre, seconds)


def row(
    name: str,
    kind: str,
    net: nn.Module,
    task: Task,
    data: DataSet,
    pre: Preprocessing,
    seconds: float,
) -> dict[str, Any]:
    begin = time.process_time()
    values = scores(net.eval(), task, data, pre)
    return {
        "name": name,
        "kind": kind,
        "scores": values,
        "train_s": seconds,
        "test_ms_per_image": 1000 * (time.process_time() - begin) / len(data.test),
        "parameters": sum(each.numel() for each in net.parameters()),
    }


def page(content: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    study = STUDIES[content["study"]]
    score, points, over = study.goal
    by_name: dict[str, list[dict[str, Any]]] = {}  # the results of all seeds
    for each in content["rows"]:
        by_name.setdefault(each["name"], []).append(each)
    wanted = points + np.mean([each["scores"].get(score, 0.0) for each in by_name.get(over, [])])
    recipe, where = content["recipe"], content["environment"]
    lines = [
        TITLE + content["study"],
        "",
        f"`python benchmarks/dense.py {content['study']}`, {where['date'][:10]}, "
        f"{where['device']}, {where['threads']} thread, torch {where['torch']}. Goal: "
        f"{study.columns[score]} of at least {wanted:.1f}.",
        f"{recipe['steps']} steps of {recipe['batch_size']} images of "
        f"{recipe['resolution']} pixels, pyramids and heads of "
        f"{recipe['task_options']['head_width']} channels.",
        "",
        f"| network | {' | '.join(study.columns.values())} | training, s | test, ms an image "
        "| parameters, M |",
        "|---" * (len(study.columns) + 4) + "|",
    ]
    for name, seeds in by_name.items():
        cells = [mean_and_deviation([s["scores"].get(key) for s in seeds]) for key in study.columns]
        cells += (
            [f"{np.mean([each['train_s'] for each in seeds]):.0f}"]
            + [f"{np.mean([each['test_ms_per_image'] for each in seeds]):.1f}"]
            + [f"{seeds[0]['parameters'] / 1e6:.2f}"]
            if "train_s" in seeds[0]
            else ["-"] * 3
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def mean_and_deviation(values: Sequence[float | None]) -> str:
    """For example "84.7 ± 1.2"; the mean alone of one value, and "-" where there is none."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    deviation = f" ± {np.std(numbers, ddof=1):.2g}" if len(numbers) > 1 else ""
    return f"{np.mean(numbers):.3g}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--work", type=Path, required=True, help="a folder for data and runs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="fewer for a trial")
    parser.add_argument("--models", nargs="+", help="names of networks, of which each is a row")
    words = parser.parse_args()
    torch.set_num_threads(1)
    study = STUDIES[words.study]
    study = replace(
        study,
        recipe=replace(study.recipe, steps=words.steps or study.recipe.steps),
        models=tuple(words.models or study.models),
    )
    environment = asdict(Environment.here("cpu"))  # of the code that is loaded now
    content: dict[str, Any] = {"study": words.study, "recipe": asdict(study.recipe), "rows": []}
    content["environment"] = environment
    rows = chain.from_iterable(
        study_rows(study, words.work / f"seed{seed}", words.peers, seed)
        for seed in range(words.seeds)
    )
    for each in rows:
        content["rows"].append(each)
        with atomic_write(words.out, OUTPUT) as temporary:
            temporary.write_text(json.dumps(content, indent=1))
        with atomic_write(words.out.with_suffix(".md"), PAGE) as temporary:
            temporary.write_text(page(content))
        print(each["name"], each["scores"], flush=True)
    print(page(content))


if __name__ == "__main__":
    main()
