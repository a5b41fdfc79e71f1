"""What is left of a training? A run folder: what was asked, the log, the last checkpoint, and at the end a bundle."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fullstride.data.augment import Augmentation
from fullstride.data.images import DataSet, Images, open_data
from fullstride.data.loader import Batches, TestView, TrainView
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
from fullstride.train.recipes import Recipe
from fullstride.train.teach import fitting_teacher

ASKED, LOG, CHECKPOINT, BUNDLE = "run.json", "log.jsonl", "checkpoint.pt", "bundle"


@dataclass(frozen=True)
class Asked:
    """What makes a run this run and no other: going on in its folder needs the same."""

    model: str
    weights: str  # where the first weights came from; "" for fresh ones
    data: str
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
    ranks: Ranks = ALONE,
    watch: Callable[[Batches], loop.Batches] = lambda batches: batches,
) -> Iterator[dict[str, Any]]:
    """Train `model` on `data` in `folder`; yields the log's row of each epoch, those of an earlier start first.

    Stopped at any time, the same call goes on from the last checkpoint, which is written after every epoch and, with
    `mark_every`, after so many steps within one. `watch` may wrap the training batches, to show progress. Raises
    ValueError where the folder holds another run.
    """
    net, pre = beginning(model, data, recipe, weights)
    net.regularise(drop_path=recipe.drop_path, by=recipe.drop_path_by, dropout=recipe.dropout)
    teacher = None
    if recipe.teacher:
        teacher = fitting_teacher(zoo.load(recipe.teacher), recipe.teacher, data.classes, pre).to(device)
    asked = Asked(
        model=model,
        weights=weights,
        data=data.where,
        fingerprint=data.fingerprint,
        classes=data.classes,
        spec=json.loads(net.spec.to_json()),
        preprocessing=asdict(pre),
        recipe=asdict(recipe),
    )
    batches = training_batches(data, pre, recipe, device, workers, ranks)
    if ranks.first:
        claim(folder, asked)
    ranks.wait()
    resume = load_checkpoint(folder)
    rows = logged(folder, resume["epochs"] if resume else 0)
    yield from rows
    if (folder / BUNDLE).is_dir():
        return

    net.to(device)
    task = Classify(recipe.label_smoothing)
    for epoch in loop.fit(
        net, task, watch(batches), recipe, resume, teacher=teacher, mark_every=mark_every, ranks=ranks
    ):
        if not isinstance(epoch, loop.Epoch):
            if ranks.first:
                save(folder, epoch.state)
            continue
        scores, skipped = judge(epoch.average, data.minival, pre, device, workers, ranks)
        skipped |= {name: why for each in ranks.gather(batches.skipped) for name, why in each.items()}
        rows.append(
            {
                "epoch": epoch.number + 1,
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
            keep(folder, rows, epoch.state)
        yield rows[-1]
    ranks.wait()
    last = load_checkpoint(folder)
    assert last is not None
    net.load_state_dict(last["average"])
    scores = {split: judge(net, getattr(data, split), pre, device, workers, ranks)[0] for split in ("minival", "test")}
    if not ranks.first:
        return
    Bundle(
        net=net.cpu(),
        name=folder.name,
        classes=data.classes,
        preprocessing=pre,
        recipe=asked.recipe,
        scores=scores,
        environment=asdict(Environment.here(device)),
        source=f"trained on {data.name}",
    ).save(folder / BUNDLE)


def training_batches(
    data: DataSet, pre: Preprocessing, recipe: Recipe, device: torch.device | str, workers: int, ranks: Ranks
) -> Batches:
    """The training images as the recipe shows them; of several processes each gets its share of every batch."""
    if recipe.batch % ranks.world or (ranks.together and len(data.train) < recipe.batch):
        raise ValueError(
            f"recipe.batch {recipe.batch} of {len(data.train)} images is not shared out evenly among {ranks.world} "
            f"processes: set it to a multiple of {ranks.world} that is not above the number of images"
        )
    asked = {field.name: getattr(recipe, field.name) for field in fields(Augmentation)}
    augmentation = Augmentation(**asked) if data.mirror else Augmentation(**{**asked, "flip": 0.0})
    return Batches(
        data.train,
        TrainView(pre, augmentation, recipe.engine),
        batch=recipe.batch,
        seed=recipe.seed,
        shuffle=True,
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
    if not data:
        asked = Path(where) / ASKED
        if not asked.exists():
            raise ValueError(f"{where} is no run and does not know its images: give --data")
        data = str(read_json(asked)["data"])
    images = open_data(data)
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
    """Whether it may be left of a run without a checkpoint: question, log, or a file that was being written."""
    return path.name in (ASKED, LOG) or path.name.startswith(".")


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


def logged(folder: Path, epochs: int) -> list[dict[str, Any]]:
    """The rows of the epochs that the checkpoint holds; a row written after it is done again."""
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
