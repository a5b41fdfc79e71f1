"""What is left of a training? A run folder: what was asked, log, last checkpoint, best weights, and a bundle."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fullstride.data.images import DataSet, Images, open_data
from fullstride.data.loader import Batches, TestView, TrainView
from fullstride.data.views.augment import Augmentation
from fullstride.measure.environment import Environment
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle, copy_weights, read_json
from fullstride.nets.disk import replacing
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.timm_network import TimmNetwork
from fullstride.tasks.classify import Classify
from fullstride.train import loop
from fullstride.train.ranks import ALONE, Ranks
from fullstride.train.recipe import Recipe
from fullstride.train.teach import Answers, Remembered, fitting_teacher

ASKED, LOG, CHECKPOINT, BEST, BUNDLE = "run.json", "log.jsonl", "checkpoint.pt", "best", "bundle"


@dataclass(frozen=True)
class Asked:
    """What makes a run this run and no other: going on in its folder needs the same."""

    model: str
    weights: str  # where the first weights came from; "" for fresh ones
    data: str
    minival: float | None  # share of the training images; None: by their number
    fingerprint: str  # of the images and their labels
    classes: tuple[str, ...]
    spec: Mapping[str, Any]
    preprocessing: Mapping[str, Any]
    recipe: Mapping[str, Any]


def train(
    folder: Path,
    model: str,
    data: DataSet,
    recipe: Recipe,
    *,
    weights: str = "",
    device: torch.device | str = "cpu",
    workers: int = 0,
    mark_every: int = 0,
    teacher_cache: Path | None = None,
    ranks: Ranks = ALONE,
    watch: Callable[[Batches], loop.Batches] = lambda batches: batches,
) -> Iterator[dict[str, Any]]:
    """Train `model` on `data` in `folder`; yields the log's row of each epoch, those of an earlier start first.

    Stopped at any time, the same call goes on from the last checkpoint, which is written after every epoch and, with
    `mark_every`, after so many steps within one. The weights of the epoch with the best minival are kept as a bundle
    beside it; with the recipe's patience they are the ones that are scored on the test at the end, else the last are.
    `teacher_cache` is a folder for a teacher's answers. `watch` may wrap the training batches, to show progress.
    Raises ValueError where the folder holds another run.
    """
    net, pre = beginning(model, data, recipe, weights)
    net.regularise(drop_path=recipe.drop_path, by=recipe.drop_path_by, dropout=recipe.dropout)
    batches = training_batches(data, pre, recipe, device, workers, ranks)
    lasting = recipe.lasting(len(batches))
    teacher = answers(data, pre, lasting, device, teacher_cache)
    asked = Asked(
        model=model,
        weights=weights,
        data=data.where,
        minival=data.minival_share,
        fingerprint=data.fingerprint,
        classes=data.classes,
        spec=json.loads(net.spec.to_json()),
        preprocessing=asdict(pre),
        recipe=asdict(recipe),
    )
    if ranks.first:
        claim(folder, asked)
    ranks.wait()
    resume = load_checkpoint(folder)
    rows = logged(folder, resume["epochs"] if resume else 0)
    yield from rows
    if (folder / BUNDLE).is_dir():
        return

    def bundle(net: Network | TimmNetwork, scores: Mapping[str, Any]) -> Bundle:
        return Bundle(
            net=net,
            name=folder.name,
            classes=data.classes,
            preprocessing=pre,
            recipe=asked.recipe,
            scores=scores,
            environment=asdict(Environment.here(device)),
            source=f"trained on {data.name}",
        )

    net.to(device)
    task = Classify(recipe.label_smoothing)
    learning = loop.fit(net, task, watch(batches), lasting, resume, teacher=teacher, mark_every=mark_every, ranks=ranks)
    for epoch in () if out_of_patience(rows, recipe) else learning:
        if not isinstance(epoch, loop.Epoch):
            if ranks.first:
                save(folder, epoch.state)
            continue
        scores, skipped = judge(epoch.average, data.minival, pre, device, workers, ranks)
        skipped |= {name: why for each in ranks.gather(batches.skipped) for name, why in each.items()}
        rows.append(
            {
                "epoch": epoch.number + 1,
                "epochs": math.ceil(lasting.epochs),
                "loss": epoch.loss,
                "lr": epoch.lr,
                "images_per_s": epoch.images_per_s,
                "data_share": epoch.data_share,
                "minival_top1": scores["top1"],
                "minival_loss": scores["loss"],
                "skipped": skipped,
            }
        )
        if ranks.first:
            if best(rows) is rows[-1]:
                bundle(epoch.average, {"minival": scores}).save(folder / BEST)
            keep(folder, rows, epoch.state)
        yield rows[-1]
        if out_of_patience(rows, recipe):
            break
    ranks.wait()
    if recipe.patience:
        net.load_state_dict(Bundle.load(folder / BEST).net.state_dict())
    else:
        last = load_checkpoint(folder)
        assert last is not None
        net.load_state_dict(last["average"])
    scores = {split: judge(net, getattr(data, split), pre, device, workers, ranks)[0] for split in ("minival", "test")}
    if ranks.first:
        bundle(net, scores).save(folder / BUNDLE)


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The first of those with the highest accuracy on the minival, and among them the lowest loss."""
    return max(rows, key=lambda row: (row["minival_top1"], -row["minival_loss"]))


def out_of_patience(rows: list[dict[str, Any]], recipe: Recipe) -> bool:
    return bool(recipe.patience and rows) and len(rows) - best(rows)["epoch"] >= recipe.patience


def answers(
    data: DataSet, pre: Preprocessing, recipe: Recipe, device: torch.device | str, cache: Path | None
) -> Answers | None:
    """The recipe's teacher, if it has one; its answers are kept in the folder `cache`, if there is one."""
    if not recipe.teacher:
        if cache:
            raise ValueError(f"--teacher-cache {cache} without a teacher: set recipe.teacher, or leave it out")
        return None
    teacher = fitting_teacher(zoo.load(recipe.teacher), recipe.teacher, data.classes, pre).to(device)
    if cache is None:
        return teacher
    if recipe.mixup or recipe.cutmix or recipe.grow_from:
        raise ValueError(
            "--teacher-cache remembers views of single images at the resolution: set recipe.mixup and recipe.cutmix "
            "to 0 and recipe.grow_from to None, or leave it out"
        )
    decisive = [*(field.name for field in fields(Augmentation)), "engine", "seed", "views", "precision"]
    views = {
        "data": data.fingerprint,
        "mirror": data.mirror,
        "preprocessing": asdict(pre),
        **{name: getattr(recipe, name) for name in decisive},
    }
    return Remembered(teacher, cache, len(data.train), views, recipe.views or math.ceil(recipe.epochs))


def training_batches(
    data: DataSet, pre: Preprocessing, recipe: Recipe, device: torch.device | str, workers: int, ranks: Ranks
) -> Batches:
    """The training images as the recipe shows them; of several processes each gets its share of every batch."""
    if recipe.batch % ranks.world or (ranks.together and len(data.train) < recipe.batch):
        raise ValueError(
            f"recipe.batch {recipe.batch} of {len(data.train)} images is not shared out evenly among {ranks.world} "
            f"processes: set it to a multiple of {ranks.world} that is not above the number of images"
        )
    at_once = recipe.batch // ranks.world // recipe.accumulate
    if recipe.triplet and (at_once % recipe.per_class or at_once < 2 * recipe.per_class):
        least = 2 * recipe.per_class * ranks.world * recipe.accumulate
        raise ValueError(
            f"recipe.triplet compares classes among the {at_once} images that are computed at once, with "
            f"{recipe.per_class} of each: set recipe.batch to a multiple of {least}"
        )
    recipe = recipe.lasting(max(1, len(data.train) // recipe.batch))
    asked = {field.name: getattr(recipe, field.name) for field in fields(Augmentation)}
    augmentation = Augmentation(**asked) if data.mirror else Augmentation(**{**asked, "flip": 0.0})
    return Batches(
        data.train,
        TrainView(pre, augmentation, recipe.engine, sides=recipe.sides(pre.resolution)),
        batch=recipe.batch,
        seed=recipe.seed,
        shuffle=True,
        per_class=recipe.per_class,
        views=recipe.views,
        workers=workers,
        device=device,
        share=(ranks.rank, ranks.world),
    )


def beginning(model: str, data: DataSet, recipe: Recipe, weights: str) -> tuple[Network | TimmNetwork, Preprocessing]:
    """The network before training, with fresh or given weights, and the pixels it wants."""
    torch.manual_seed(recipe.seed)
    net = zoo.create(model, classes=len(data.classes), in_channels=data.channels, resolution=recipe.resolution)
    pre = zoo.family_preprocessing(net.spec)
    if weights:
        start = zoo.load(model if weights == "hub" else weights, model)
        left = copy_weights(start.net, net)
        strange = [name for name in left if not name.startswith(net.classifier)]
        if strange:
            raise ValueError(
                f"{weights} does not begin {model} with {data.channels} input channels: {strange[0]} differs "
                f"and {len(strange) - 1} more; give weights of the same network"
            )
        pre = start.preprocessing
    return net, replace(pre, resolution=net.spec.resolution, crop=recipe.crop or pre.crop, fit=recipe.fit or pre.fit)


def fitting_data(where: str, classes: tuple[str, ...], data: str = "") -> DataSet:
    """The images `data`, or those that the run at `where` was trained on; their classes must be `classes`."""
    minival = None
    if not data:
        asked = Path(where) / ASKED
        if not asked.exists():
            raise ValueError(f"{where} is no run and does not know its images: give --data")
        told = read_json(asked)
        data, minival = str(told["data"]), told.get("minival")
    images = open_data(data, minival=minival)
    if images.classes != classes:
        shown = [", ".join(names[:5]) + (", ..." if len(names) > 5 else "") for names in (classes, images.classes)]
        raise ValueError(f"{where} knows the classes {shown[0]}; {data} has {shown[1]}: give data of the same classes")
    return images


def judge(
    net: torch.nn.Module,
    images: Images,
    pre: Preprocessing,
    device: torch.device | str,
    workers: int = 0,
    ranks: Ranks = ALONE,
) -> tuple[dict[str, float], dict[str, str]]:
    """Scores on `images`, and the reason for each one that could not be read."""
    share = (ranks.rank, ranks.world)
    batches = Batches(images, TestView(pre), batch=128, workers=workers, device=device, share=share)
    scores = loop.evaluate(net, Classify(), batches, ranks)
    return scores, {name: why for each in ranks.gather(batches.skipped) for name, why in each.items()}


def claim(folder: Path, asked: Asked) -> None:
    """Make `folder` this run's, or find that it is. A run without a checkpoint has nothing to lose and gives way."""
    wanted = json.loads(json.dumps(asdict(asked)))
    if (folder / ASKED).exists() and ((folder / CHECKPOINT).exists() or (folder / BUNDLE).exists()):
        found = read_json(folder / ASKED)
        differ = [
            f"{name} is {old!r} there and {new!r} now"
            for name, old, new in differences(found, wanted)
            if name != "data"  # the folder may have moved; the fingerprint says whether the images are the same
        ]
        if differ:
            raise ValueError(f"{folder} holds another run: {'; '.join(differ[:5])}. Give another --out or ask the same")
    elif folder.exists() and not (folder.is_dir() and all(is_ours(path) for path in folder.iterdir())):
        raise ValueError(f"{folder} exists and is no run: give another --out")
    else:
        with replacing(folder / ASKED) as beside:
            beside.write_text(json.dumps(wanted, indent=1))


def is_ours(path: Path) -> bool:
    """Whether it may be left of a run without a checkpoint: all that is written before one, also unfinished."""
    return path.name in (ASKED, LOG, BEST) or path.name.startswith(".")


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield name, old, new


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}): remove it to begin again at the first epoch"
        ) from None


def logged(folder: Path, epochs: int | None = None) -> list[dict[str, Any]]:
    """The rows of the first `epochs`: those that a checkpoint holds, as a row written after it is done again."""
    path = folder / LOG
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()[:epochs]]


def keep(folder: Path, rows: list[dict[str, Any]], state: dict[str, Any]) -> None:
    """Log first, checkpoint second: a stop between the two costs one row, which is written again."""
    with replacing(folder / LOG) as beside:
        beside.write_text("".join(json.dumps(row) + "\n" for row in rows))
    save(folder, state)


def save(folder: Path, state: dict[str, Any]) -> None:
    with replacing(folder / CHECKPOINT) as beside:
        torch.save(state, beside)
