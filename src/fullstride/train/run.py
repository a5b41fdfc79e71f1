"""How does a training run go from data and a model's name to a bundle, and resume after a stop?"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fullstride.data.dataset import DataSet
from fullstride.data.loader import Batches
from fullstride.measure.environment import Environment
from fullstride.nets import fused_form, zoo
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import Bundle, copy_weights, reorder_outputs
from fullstride.nets.class_names import permutation
from fullstride.nets.load_options import LoadOptions, WeightsKind
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.timm_wrapper import TimmNetwork
from fullstride.tasks import build_head, find_task
from fullstride.tasks.task import Task
from fullstride.train import loop, run_folder
from fullstride.train.autotune import choose_efficiency
from fullstride.train.batches import measurement_batches, recipe_in_epochs, training_batches
from fullstride.train.distill import build_teacher
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.plan import TrainingPlan
from fullstride.train.recipe import Recipe
from fullstride.train.scoring import all_skipped, score_images


def train(
    folder: Path,
    model: str,
    data: DataSet,
    recipe: Recipe,
    *,
    task: Task | None = None,
    weights: str = "",
    weights_kind: WeightsKind = "averaged",
    device: torch.device | str = "cpu",
    workers: int = 0,
    checkpoint_every_steps: int = 0,
    teacher_cache: Path | None = None,
    context: DistributedContext = SINGLE_PROCESS,
    announce: Callable[[TrainingPlan], None] = lambda plan: None,
    watch: Callable[[Batches], loop.BatchSource] = lambda batches: batches,
) -> Iterator[dict[str, Any]]:
    """Train `model` on `data` in `folder`; yields the row of each epoch, also of earlier ones.

    `data` is from `task.open_data`; the task is classification if None. After a stop, the same call
    resumes from the last checkpoint. Checkpoints are written after every epoch and within an epoch
    after every `checkpoint_every_steps` steps. The weights of the epoch with the best minival are
    saved as a bundle in the folder; with the recipe's `early_stop_patience` these are scored on the
    test images at the end, else the last ones. `teacher_cache` is a folder for the probabilities of
    the teacher. `announce` is called before the first step of a run that has not ended; `watch` may
    wrap the training batches, to show progress.

    Raises ValueError if the folder holds another run.
    """
    if checkpoint_every_steps < 0:
        raise ValueError(
            f"checkpoint_every_steps {checkpoint_every_steps}: use a number of steps, or 0 for "
            "after each epoch only"
        )
    context.on_rank_zero(run_folder.check_folder, folder)
    task = task or find_task()
    net, pre = initial_network(model, task, data, recipe, weights, weights_kind)
    net.regularise(drop_path=recipe.drop_path, by=recipe.drop_path_by, dropout=recipe.dropout)
    spec, net = net.spec, fused_form.padded(net, model) if recipe.pad_channels else net
    batches = training_batches(data, task, pre, recipe, device, workers, context)
    resolved = recipe_in_epochs(data, recipe)
    if resolved.efficiency == "auto":
        efficiency = context.gather(run_folder.saved_efficiency(folder))[0]
        if not efficiency:
            few = measurement_batches(data, task, pre, recipe, device, batch=8)
            efficiency = choose_efficiency(
                resolved, task, net, next(few.epoch(0)), device, context.world_size
            ).efficiency
        resolved = resolved.with_efficiency(context.gather(efficiency)[0])
    teacher = build_teacher(data, pre, resolved, device, teacher_cache)
    config = run_folder.RunConfig(
        model=model,
        weights=weights,
        weights_kind=weights_kind,
        data=data.where,
        minival=data.minival_share,
        fingerprint=data.fingerprint,
        classes=data.classes,
        spec=json.loads(spec.to_json()),
        preprocessing=asdict(pre),
        recipe=asdict(recipe),
        efficiency=resolved.efficiency,
        task=task.name,
        splits=data.splits,
    )
    context.on_rank_zero(run_folder.create_or_resume, folder, config)
    resume = run_folder.load_checkpoint(folder)
    rows = run_folder.read_log(folder, task.metric, resume["epochs"] if resume else 0)
    has_ended = (folder / run_folder.BUNDLE).is_dir()
    if not has_ended:
        announce(
            TrainingPlan(
                model=model,
                weights=weights,
                net=net,
                data=data,
                recipe=recipe,
                resolved=resolved,
                resolution=pre.resolution,
                steps_per_epoch=len(batches),
                device=torch.device(device),
                processes=context.world_size,
                start=(resume["epochs"], resume["index"]) if resume else (0, 0),
            )
        )
    yield from rows
    if has_ended:
        return

    def bundle(net: Backbone, scores: Mapping[str, Any]) -> Bundle:
        return Bundle(
            net=fused_form.unpadded(net, spec),
            name=folder.name,
            classes=data.classes,
            preprocessing=pre,
            recipe=config.recipe,
            scores=scores,
            environment=asdict(Environment.here(device)),
            source=f"trained on {data.name}",
            task=task.name,
        )

    net.to(device)
    epochs = loop.train_epochs(
        net,
        task,
        watch(batches),
        resolved,
        resume,
        teacher=teacher,
        checkpoint_every_steps=checkpoint_every_steps,
        context=context,
    )
    for epoch in () if run_folder.should_stop_early(rows, recipe, task.metric) else epochs:
        if not isinstance(epoch, loop.Epoch):
            context.on_rank_zero(run_folder.save_checkpoint, folder, epoch.state)
            continue
        scores, skipped = score_images(
            epoch.average, task, data.minival, pre, device, workers, context
        )
        skipped |= all_skipped(batches, context)
        logged = {name for row in rows for name in row["skipped"]}
        rows.append(
            {
                "epoch": epoch.number + 1,
                "epochs": math.ceil(resolved.epochs),
                "loss": epoch.loss,
                "lr": epoch.lr,
                "images_per_s": epoch.images_per_s,
                "data_share": epoch.data_share,
                **{f"minival/{key}": value for key, value in scores.items() if key != "images"},
                "skipped": {name: why for name, why in skipped.items() if name not in logged},
            }
        )
        if run_folder.best_row(rows, task.metric) is rows[-1]:
            best = bundle(epoch.average, {"minival": scores})
            context.on_rank_zero(best.save, folder / run_folder.BEST)
        context.on_rank_zero(run_folder.save_epoch, folder, rows, epoch.state)
        yield rows[-1]
        if run_folder.should_stop_early(rows, recipe, task.metric):
            break
    if recipe.early_stop_patience:
        if not (folder / run_folder.BEST).is_dir():
            raise ValueError(
                f"{folder / run_folder.BEST}, the best epoch's weights, is gone: train with "
                "another --out"
            )
        net = fused_form.unpadded(net, spec)
        best = Bundle.load(folder / run_folder.BEST, build_head)
        net.load_state_dict(best.net.state_dict())
    else:
        last = run_folder.load_checkpoint(folder)
        assert last is not None
        net.load_state_dict(last["average"])
    scores = {}
    for split in ("minival", "test"):
        images = getattr(data, split)
        if not len(images):  # data with a minival of their own may have no test
            continue
        score, skipped = score_images(net, task, images, pre, device, workers, context)
        scores[split] = score | ({"skipped": skipped} if skipped else {})
    context.on_rank_zero(bundle(net, scores).save, folder / run_folder.BUNDLE)


def initial_network(
    model: str,
    task: Task,
    data: DataSet,
    recipe: Recipe,
    weights: str = "",
    weights_kind: WeightsKind = "averaged",
) -> tuple[Backbone, Preprocessing]:
    """The network before training, with random weights or `weights`, and its preprocessing.

    A classifier for the same classes in another order is put in the order of the data.
    """
    torch.manual_seed(recipe.seed)
    net = zoo.create(
        model, classes=len(data.classes), in_channels=data.channels, resolution=recipe.resolution
    )
    if isinstance(net, TimmNetwork):  # before there is a folder, which the next try would resume
        net.check_size(net.spec.resolution, net.spec.resolution)
    net.task_head = task.head(net)
    if net.task_head is not None and recipe.pad_channels:
        raise ValueError(
            f"recipe.pad_channels: the head of the task {task.name} cannot be padded: leave it out"
        )
    pre = zoo.family_preprocessing(net.spec)
    if weights:
        options = LoadOptions(weights_kind=weights_kind)
        start = zoo.load(model if weights == "hub" else weights, model, build_head, options)
        outputs = permutation(start.classes, data.classes) if task.single_label else None
        if outputs:
            reorder_outputs(start.net, outputs)
        left = copy_weights(start.net, net)
        other = [name for name in left if not name.startswith((net.classifier, "task_head."))]
        if other:
            raise ValueError(
                f"{weights} does not begin {model} with {data.channels} input channels: {other[0]} "
                f"differs and {len(other) - 1} more; give weights of the same network"
            )
        pre = start.preprocessing
    crop = pre.crop if recipe.crop is None else recipe.crop
    return net, replace(pre, resolution=net.spec.resolution, crop=crop, fit=recipe.fit or pre.fit)
