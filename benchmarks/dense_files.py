"""How good and how fast are small detectors as ONNX files: ours, FCOS and YOLO of others?

    python benchmarks/dense_files.py --yolo VENV/bin/yolo --work FOLDER --out FILE.json

Pictures are those of `dense.py detection`, and so are the trainings of ours and of torchvision's
FCOS. Ultralytics' YOLO begins with random weights too; its own command line trains and exports it,
in an environment of its own, as its licence is the AGPL. It gets whole epochs, the fewest that take
the processor at least as long as ours, with the export. All files take a picture and give boxes
without duplicates, and one thread runs them in turn. WORK has the trained files: a second call only
measures again.
Beside the JSON is the table as a page, with means and standard deviations of the seeds.
"""

import argparse
import json
import resource
import shutil
import subprocess
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from dense import STUDIES, Study, mean_and_deviation, scores
from dense_peers import torchvision_fcos, train_peer
from torch import Tensor, nn

from fullstride.data.dataset import DataSet
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.settings import ExportOptions
from fullstride.io.writing import Output, atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import build_head, find_task
from fullstride.tasks.task import Task
from fullstride.train import run, run_folder
from fullstride.train.recipes.choice import RunOptions

TITLE = "# Small detectors as files"
OUTPUT = json_output("a comparison of detectors as files", "environment", "yolo", "rows")
PAGE = Output("a table of detectors", ".md", lambda path: path.read_text().startswith(TITLE))
ROUNDS, PICTURES = 10, 30  # of every file, in turn
PIXELS = Preprocessing(mean=(0.0,) * 3, std=(1.0,) * 3, fit="pad")


@dataclass(frozen=True)
class Job:
    """What a network is trained on."""

    study: Study
    folder: Path  # of the seed, with the pictures in `data`
    data: DataSet
    task: Task


class File(nn.Module):
    """An ONNX file: pixels (N, 3, H, W) in 0..1 -> detections (N, 100, 6), one picture at a time.

    Its output is (1, n, 6): left, top, right, bottom, score and class, the highest score first. Its
    input are the same pixels, or bytes with the channels last.
    """

    def __init__(self, path: Path):
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        (self.input,) = self.session.get_inputs()

    def prepare(self, x: Tensor) -> Mapping[str, np.ndarray]:
        if "uint8" in self.input.type:
            x = (255 * x).round().byte().permute(0, 2, 3, 1)
        return {self.input.name: x.numpy()}

    def forward(self, x: Tensor) -> Tensor:
        rows = x.new_zeros(len(x), 100, 6)
        rows[..., 5] = -1
        for row, picture in zip(rows, x.split(1), strict=True):
            (boxes,) = self.session.run(None, self.prepare(picture))
            count = min(boxes.shape[1], len(row))
            row[:count] = torch.from_numpy(boxes[0, :count])
        return rows


def train_ours(job: Job, path: Path) -> None:
    folder = job.folder / "run"
    model = job.study.models[0]
    list(run.train(folder, model, job.data, job.study.recipe, RunOptions(task="detect")))
    bundle = Bundle.load(folder / run_folder.BUNDLE, build_head)
    pictures = [job.data.val.picture(i) for i in range(min(20, len(job.data.val)))]
    export(bundle, path, ComparisonImages(pictures), ExportOptions(input_kind="pixels"))


class OneFile(nn.Module):
    """A detector of torchvision: pixels (1, 3, H, W) in 0..1 -> (1, n, 6)."""

    def __init__(self, detector: nn.Module, pre: Preprocessing):
        super().__init__()
        self.detector = detector
        self.mean, self.std = (torch.tensor(each)[:, None, None] for each in (pre.mean, pre.std))

    def forward(self, x: Tensor) -> Tensor:
        (boxes,) = self.detector([(x[0] - self.mean) / self.std])
        others = torch.stack((boxes["scores"], boxes["labels"].to(x.dtype)), 1)
        return torch.cat((boxes["boxes"], others), 1)[None]


def train_fcos(job: Job, path: Path) -> None:
    recipe, pre = job.study.recipe, Preprocessing(resolution=job.study.recipe.resolution, fit="pad")
    width = recipe.task_options["head_width"]
    build = partial(torchvision_fcos, len(job.data.classes), width, recipe.resolution)
    write_fcos(train_peer(build, job.data, job.task, pre, recipe), pre, path)


def write_fcos(net: nn.Module, pre: Preprocessing, path: Path) -> None:
    x, detector = torch.zeros(1, 3, pre.resolution, pre.resolution), net.get_submodule("detector")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter that takes its loops is an old one
        torch.onnx.export(OneFile(detector, pre).eval(), (x,), path, dynamo=False)


def train_yolo(program: Path, words: Sequence[str], job: Job, path: Path) -> None:
    """By its documented command line: `words` are its settings, with the model and the epochs."""
    write_yolo(job.folder)
    recipe, out = job.study.recipe, (job.folder / "yolo").resolve()
    shutil.rmtree(out / "run", ignore_errors=True)
    common = [f"imgsz={recipe.resolution}", "device=cpu"]
    here = [f"data={out / 'data.yaml'}", f"project={out}", "name=run", "workers=0", "amp=False"]
    here += [f"batch={recipe.batch_size}", f"seed={recipe.seed}", "val=False", "plots=False"]
    subprocess.run([program, "detect", "train", *words, *common, *here], check=True)
    weights = out / "run" / "weights" / "last.pt"
    # boxes without duplicates, as in the other files, from the score on that its own `val` takes
    form = ["format=onnx", "nms=True", "conf=0.001"]
    subprocess.run([program, "export", f"model={weights}", *form, *common], check=True)
    weights.with_suffix(".onnx").rename(path)


def write_yolo(folder: Path) -> None:
    """FOLDER/yolo: the pictures of FOLDER/data with a text file of boxes each, in YOLO's format."""
    for file in sorted((folder / "data" / "annotations").iterdir()):
        content, split = json.loads(file.read_text()), file.stem.removeprefix("instances_")
        texts = {each["id"]: "" for each in content["images"]}
        sizes = {each["id"]: (each["width"], each["height"]) for each in content["images"]}
        for each in content["annotations"]:
            number = each["image_id"]
            (left, top, w, h), (width, height) = each["bbox"], sizes[number]
            middle = f"{(left + w / 2) / width:.6f} {(top + h / 2) / height:.6f}"
            label = each["category_id"] - 1
            texts[number] += f"{label} {middle} {w / width:.6f} {h / height:.6f}\n"
        images, labels = (folder / "yolo" / name / split for name in ("images", "labels"))
        shutil.copytree(folder / "data" / split, images, dirs_exist_ok=True)
        labels.mkdir(parents=True, exist_ok=True)
        for each in content["images"]:
            (labels / each["file_name"]).with_suffix(".txt").write_text(texts[each["id"]])
    names = {each["id"] - 1: each["name"] for each in content["categories"]}
    content = {split: f"images/{split}" for split in ("train", "val", "test")}
    content |= {"path": str((folder / "yolo").resolve()), "names": names}
    (folder / "yolo" / "data.yaml").write_text(json.dumps(content))


Train = Callable[[Job, Path], None]


def processor_s() -> float:
    """Of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def trained(trainings: Mapping[str, Train], job: Job) -> dict[str, Path]:
    """The file of each network, which is trained unless it is there; beside it its seconds."""
    paths = {name: job.folder / f"{number}.onnx" for number, name in enumerate(trainings)}
    for name, path in paths.items():
        if path.exists():
            continue
        begin, part = processor_s(), path.with_suffix(".part.onnx")
        trainings[name](job, part)
        path.with_suffix(".json").write_text(json.dumps({"train_s": processor_s() - begin}))
        part.rename(path)
    return paths


def times(files: Sequence[File], pictures: Tensor) -> list[float]:
    """Median ms of a call of each file with one picture; the files alternate in rounds."""
    inputs = [[file.prepare(x) for x in pictures.split(1)] for file in files]
    seconds: list[list[float]] = [[] for _ in files]
    for turn in range(ROUNDS + 1):
        for file, each, mine in zip(files, inputs, seconds, strict=True):
            for x in each:
                begin = time.perf_counter()
                file.session.run(None, x)
                if turn:  # the first one warms up
                    mine.append(time.perf_counter() - begin)
    return [1000 * float(np.median(mine)) for mine in seconds]


def compare(study: Study, trainings: Mapping[str, Train], work: Path, seeds: int) -> list[Any]:
    """The rows of all networks and seeds."""
    rows, files = [], []
    for seed in range(seeds):
        folder = work / f"seed{seed}"
        if not (folder / "data").exists():
            study.write(folder / "data", seed)
        task = find_task("detect")
        data = task.open_data(str(folder / "data"))
        task, mine = task.for_data(data), replace(study, recipe=replace(study.recipe, seed=seed))
        pre = replace(PIXELS, resolution=mine.recipe.resolution)
        for name, path in trained(trainings, Job(mine, folder, data, task)).items():
            files.append(File(path))
            values = scores(files[-1], task, data, pre)
            seconds = json.loads(path.with_suffix(".json").read_text())
            size = {"file_mb": path.stat().st_size / 1e6}
            rows.append({"name": name, "seed": seed, "scores": values, **seconds, **size})
            print(rows[-1], flush=True)
    pictures = [np.array(data.test.picture(i)) for i in range(min(PICTURES, len(data.test)))]
    pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255
    return [row | {"ms": ms} for row, ms in zip(rows, times(files, pixels), strict=True)]


def page(content: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    where = content["environment"]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for each in content["rows"]:
        by_name.setdefault(each["name"], []).append(each)
    seeds = 1 + max(each["seed"] for each in content["rows"])
    lines = [
        TITLE,
        "",
        textwrap.fill(
            f"`python benchmarks/dense_files.py`, {where['date'][:10]}, {where['device']}, 1 "
            f"thread, torch {where['torch']}. Seeds: {seeds}. {content['yolo']}. Times of files "
            "are with the suppression of duplicates.",
            100,
        ),
        "",
        "| network | AP50 | AP | training and export, CPU s | file, ms a picture | file, MB |",
        "|---" * 6 + "|",
    ]
    for name, seeds in by_name.items():
        cells = [
            mean_and_deviation([s["scores"].get(key) for s in seeds]) for key in ("ap50", "ap")
        ]
        cells += [f"{np.mean([each['train_s'] for each in seeds]):.0f}"]
        cells += [mean_and_deviation([each["ms"] for each in seeds])]
        lines.append(f"| {name} | {' | '.join(cells)} | {seeds[0]['file_mb']:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--yolo", type=Path, required=True, help="its program")
    parser.add_argument("--model", default="yolo26n", help="the YOLO, a name of Ultralytics")
    parser.add_argument("--epochs", type=int, default=3, help="of the YOLO")
    parser.add_argument("--settings", nargs="*", default=[], help="of the YOLO, as NAME=VALUE")
    parser.add_argument("--work", type=Path, required=True, help="a folder for data and files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    version = subprocess.run([args.yolo, "version"], check=True, capture_output=True, text=True)
    settings = [f"model={args.model}.yaml", f"epochs={args.epochs}", *args.settings]
    trainings: dict[str, Train] = {
        "fullstride detect": train_ours,
        "torchvision FCOS": train_fcos,
        f"Ultralytics {args.model}": partial(train_yolo, args.yolo, settings),
    }
    environment = asdict(Environment.here("cpu"))
    yolo = f"Ultralytics {version.stdout.strip()} with {' '.join(settings)}"
    rows = compare(STUDIES["detection"], trainings, args.work, args.seeds)
    content = {"environment": environment, "yolo": yolo, "rows": rows}
    with atomic_write(args.out, OUTPUT) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
    with atomic_write(args.out.with_suffix(".md"), PAGE) as temporary:
        temporary.write_text(page(content))
    print(page(content))


if __name__ == "__main__":
    main()
