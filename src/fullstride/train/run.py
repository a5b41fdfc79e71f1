"""How does a training run from beginning to end, and go on after a stop? From data and a name to a bundle."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from fullstride.data.dataset import DataSet, Images, open_data
from fullstride.data.loader import Batches, TestView, TrainView
from fullstride.data.transforms.crop import Augmentation
from fullstride.measure.environment import Environment
from fullstride.nets import fused_form, zoo
from fullstride.nets.backbone import Backbone, Spec
from fullstride.nets.bundle import Bundle, copy_weights
from fullstride.nets.preprocessing import Preprocessing
from fullstride.storage import read_json
from fullstride.tasks.classify import Classify
from fullstride.train import loop, run_folder
from fullstride.train.autotune import choose_efficiency
from fullstride.train.distill import CachedTeacher, TeacherProbabilities, matching_teacher
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.recipe import RENAMED, Recipe


def train(
    folder: Path,
    model: str,
    data: DataSet,
    recipe: Recipe,
    *,
    weights: str = "",
    device: torch.device | str = "cpu",
    workers: int = 0,
    checkpoint_every_steps: int = 0,
    teacher_cache: Path | None = None,
    context: DistributedContext = SINGLE_PROCESS,
    watch: Callable[[Batches], loop.Batches] = lambda batches: batches,
) -> Iterator[dict[str, Any]]:
    """Train `model` on `data` in `folder`; yields the log's row of each epoch, those of an earlier start first.

    Stopped at any time, the same call goes on from the last checkpoint, which is written after every epoch and, with
    `checkpoint_every_steps`, after so many steps within one. The weights of the epoch with the best minival are kept as a bundle
    beside it; with the recipe's patience they are the ones that are scored on the test at the end, else the last are.
    `teacher_cache` is a folder for a teacher's answers. `watch` may wrap the training batches, to show progress.
    Raises ValueError where the folder holds another run.
    """
    if checkpoint_every_steps < 0:
        raise ValueError(
            f"--mark-every {checkpoint_every_steps}: use a number of steps, or 0 for after each epoch only"
        )
    net, pre = beginning(model, data, recipe, weights)
    net.regularise(drop_path=recipe.drop_path, by=recipe.drop_path_by, dropout=recipe.dropout)
    spec, net = net.spec, fused_form.padded(net, model) if recipe.pad_channels else net
    training_batches(
        data, pre, recipe, device, workers, context
    )  # says what cannot be before anything is measured
    lasting = lasting_on(data, recipe)
    if lasting.efficiency == "auto":
        before = context.gather(run_folder.saved_efficiency(folder))[0]
        chosen = (
            before or choose_efficiency(lasting, net, pre, device, context.world_size).efficiency
        )
        lasting = lasting.with_efficiency(context.gather(chosen)[0])
    batches = training_batches(data, pre, lasting, device, workers, context)
    teacher = build_teacher(data, pre, lasting, device, teacher_cache)
    asked = run_folder.RunConfig(
        model=model,
        weights=weights,
        data=data.where,
        minival=data.minival_share,
        fingerprint=data.fingerprint,
        classes=data.classes,
        spec=json.loads(spec.to_json()),
        preprocessing=asdict(pre),
        recipe=asdict(recipe),
        efficiency=lasting.efficiency,
    )
    context.on_rank_zero(run_folder.create_or_resume, folder, asked)
    resume = run_folder.load_checkpoint(folder)
    rows = run_folder.read_log(folder, resume["epochs"] if resume else 0)
    yield from rows
    if (folder / run_folder.BUNDLE).is_dir():
        return

    def bundle(net: Backbone, scores: Mapping[str, Any]) -> Bundle:
        return Bundle(
            net=without_padding(net, spec),
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
    learning = loop.train_epochs(
        net,
        task,
        watch(batches),
        lasting,
        resume,
        teacher=teacher,
        checkpoint_every_steps=checkpoint_every_steps,
        context=context,
    )
    for epoch in () if run_folder.should_stop_early(rows, recipe) else learning:
        if not isinstance(epoch, loop.Epoch):
            context.on_rank_zero(run_folder.save_checkpoint, folder, epoch.state)
            continue
        scores, skipped = judge(epoch.average, data.minival, pre, device, workers, context)
        skipped |= {
            name: why for each in context.gather(batches.skipped) for name, why in each.items()
        }
        told = {name for row in rows for name in row["skipped"]}
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
                "skipped": {name: why for name, why in skipped.items() if name not in told},
            }
        )
        if run_folder.best_row(rows) is rows[-1]:
            context.on_rank_zero(
                bundle(epoch.average, {"minival": scores}).save, folder / run_folder.BEST
            )
        context.on_rank_zero(run_folder.save_epoch, folder, rows, epoch.state)
        yield rows[-1]
        if run_folder.should_stop_early(rows, recipe):
            break
    if recipe.early_stop_patience:
        if not (folder / run_folder.BEST).is_dir():
            raise ValueError(
                f"{folder / run_folder.BEST}, the best epoch's weights, is gone: train with another --out"
            )
        net = without_padding(net, spec)
        net.load_state_dict(Bundle.load(folder / run_folder.BEST).net.state_dict())
    else:
        last = run_folder.load_checkpoint(folder)
        assert last is not None
        net.load_state_dict(last["average"])
    scores = {}
    for split in ("minival", "test"):
        score, skipped = judge(net, getattr(data, split), pre, device, workers, context)
        scores[split] = score | ({"skipped": skipped} if skipped else {})
    context.on_rank_zero(bundle(net, scores).save, folder / run_folder.BUNDLE)


def without_padding(net: Backbone, spec: Spec) -> Backbone:
    """The network of `spec` that may have learned padded."""
    return fused_form.unpadded(net, spec)


def lasting_on(data: DataSet, recipe: Recipe) -> Recipe:
    """The recipe with its length in epochs of these images; a set smaller than a batch is one step."""
    images = len(data.train)
    per_step = recipe.batch if recipe.per_class else min(recipe.batch, images)
    return recipe.in_epochs(max(1, images // recipe.batch), per_step)


def build_teacher(
    data: DataSet,
    pre: Preprocessing,
    recipe: Recipe,
    device: torch.device | str,
    cache: Path | None,
) -> TeacherProbabilities | None:
    """The recipe's teacher, if it has one; its answers are kept in the folder `cache`, if there is one."""
    if not recipe.teacher:
        if cache:
            raise ValueError(
                f"--teacher-cache {cache} without a teacher: set recipe.teacher, or leave it out"
            )
        return None
    teacher = matching_teacher(zoo.load(recipe.teacher), recipe.teacher, data.classes, pre).to(
        device
    )
    if cache is None:
        return teacher
    if recipe.mixup or recipe.cutmix or recipe.grow_from:
        raise ValueError(
            "--teacher-cache remembers views of single images at the resolution: set recipe.mixup and recipe.cutmix "
            "to 0 and recipe.grow_from to None, or leave it out"
        )
    old_names = {new: old for old, new in RENAMED.items()}  # those of caches on disk
    decisive = [
        *(field.name for field in fields(Augmentation)),
        "decoder",
        "seed",
        "distinct_views",
        "precision",
    ]
    views = {
        "data": data.fingerprint,
        "mirror": data.mirror,
        "preprocessing": asdict(pre),
        **{old_names.get(name, name): getattr(recipe, name) for name in decisive},
    }
    return CachedTeacher(
        teacher, cache, len(data.train), views, recipe.distinct_views or math.ceil(recipe.epochs)
    )


def training_batches(
    data: DataSet,
    pre: Preprocessing,
    recipe: Recipe,
    device: torch.device | str,
    workers: int,
    context: DistributedContext,
) -> Batches:
    """The training images as the recipe shows them; each process gets its share of every batch."""
    parts = context.world_size * recipe.grad_accum_steps
    if recipe.batch % parts or (context.is_distributed and len(data.train) < recipe.batch):
        raise ValueError(
            f"recipe.batch {recipe.batch} of {len(data.train)} images is not shared out evenly among {context.world_size} "
            f"processes: set it to a multiple of {parts} that is not above the number of images"
        )
    at_once = recipe.batch // context.world_size // recipe.grad_accum_steps
    if recipe.triplet and (at_once % recipe.per_class or at_once < 2 * recipe.per_class):
        least = 2 * recipe.per_class * context.world_size * recipe.grad_accum_steps
        raise ValueError(
            f"recipe.triplet compares classes among the {at_once} images that are computed at once, with "
            f"{recipe.per_class} of each: set recipe.batch to a multiple of {least}"
        )
    recipe = lasting_on(data, recipe)
    asked = {field.name: getattr(recipe, field.name) for field in fields(Augmentation)}
    augmentation = Augmentation(**asked)
    if not data.mirror:
        augmentation = replace(augmentation, hflip_prob=0.0)
    return Batches(
        data.train,
        TrainView(pre, augmentation, recipe.decoder, sides=recipe.resolutions(pre.resolution)),
        batch=recipe.batch,
        seed=recipe.seed,
        shuffle=True,
        per_class=recipe.per_class,
        distinct_views=recipe.distinct_views,
        workers=workers,
        device=device,
        share=(context.rank, context.world_size),
    )


def beginning(
    model: str, data: DataSet, recipe: Recipe, weights: str
) -> tuple[Backbone, Preprocessing]:
    """The network before training, with fresh or given weights, and the pixels it wants."""
    torch.manual_seed(recipe.seed)
    net = zoo.create(
        model, classes=len(data.classes), in_channels=data.channels, resolution=recipe.resolution
    )
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
    crop = pre.crop if recipe.crop is None else recipe.crop
    return net, replace(pre, resolution=net.spec.resolution, crop=crop, fit=recipe.fit or pre.fit)


def fitting_data(where: str, classes: tuple[str, ...], data: str = "") -> DataSet:
    """The images `data`, or those that the run at `where` was trained on; their classes must be `classes`."""
    minival = None
    if not data:
        asked = Path(where) / run_folder.RUN_CONFIG
        if not asked.exists():
            raise ValueError(f"{where} is no run and does not know its images: give --data")
        told = read_json(asked)
        if not isinstance(told, dict) or "data" not in told:
            raise ValueError(f"{asked} does not say which images it was trained on: give --data")
        data, minival = str(told["data"]), told.get("minival")
    images = open_data(data, minival=minival)
    if images.classes != classes:
        shown = [
            ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            for names in (classes, images.classes)
        ]
        raise ValueError(
            f"{where} knows the classes {shown[0]}; {data} has {shown[1]}: give data of the same classes"
        )
    return images


def judge(
    net: torch.nn.Module,
    images: Images,
    pre: Preprocessing,
    device: torch.device | str,
    workers: int = 0,
    context: DistributedContext = SINGLE_PROCESS,
) -> tuple[dict[str, float], dict[str, str]]:
    """Scores on `images`, and the reason for each one that could not be read."""
    share = (context.rank, context.world_size)
    batches = Batches(images, TestView(pre), batch=128, workers=workers, device=device, share=share)
    scores = loop.evaluate(net, Classify(), batches, context)
    return scores, {
        name: why for each in context.gather(batches.skipped) for name, why in each.items()
    }
