"""Prepares a training run before its first step: network, batches and configuration."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullstride.data.dataset import DataSet, Images
from fullstride.data.loader import Batches
from fullstride.io.console import print_note
from fullstride.measure.environment import Environment, find_device
from fullstride.nets import padding, zoo
from fullstride.nets.backbone import Backbone, Spec
from fullstride.nets.bundle import Bundle, copy_weights, reorder_outputs
from fullstride.nets.preprocessing import LoadOptions, Preprocessing, WeightsKind
from fullstride.nets.timm_wrapper import TimmNetwork
from fullstride.nets.weights.reader import first_ten
from fullstride.tables.class_names import permutation
from fullstride.tasks import build_head, find_task, task_of
from fullstride.tasks.task import Metric, Task
from fullstride.train import run_folder
from fullstride.train.autotune import choose_efficiency, choose_passes
from fullstride.train.batches import (
    BatchOptions,
    TrainingBatches,
    measurement_batches,
    recipe_in_epochs,
    run_batches,
)
from fullstride.train.compute import SINGLE_PROCESS, DistributedContext, choose_workers, on_device
from fullstride.train.distill import TeacherProbabilities, build_teacher
from fullstride.train.optimizer import Course
from fullstride.train.recipes.choice import DEFAULTS, NamedRecipe, RunOptions, case_of
from fullstride.train.recipes.named import Case
from fullstride.train.recipes.recipe import LEFT_TO_THE_DEVICE, Recipe
from fullstride.train.scoring import (
    MAX_OUTPUTS,
    Evaluation,
    fit_and_score,
    fit_on,
    score_batches,
    score_images,
    scoring_batches,
)


def network_to_train(
    model: str,
    task: Task,
    data: DataSet,
    recipe: Recipe,
    start: Bundle | None,
    width: float = 1.0,
    depth: float = 1.0,
) -> tuple[Spec, Backbone, Preprocessing]:
    """Build the network to train; return its saved spec, the network and its preprocessing.

    The network is `initial_network` with the recipe's regularisation and padding of channels.
    """
    net, pre = initial_network(model, task, data, recipe, start, width, depth)
    net.regularise(drop_path=recipe.drop_path, by=recipe.drop_path_by, dropout=recipe.dropout)
    return net.spec, padding.to_padded(net, model) if recipe.pad_channels else net, pre


def initial_weights(
    model: str, weights: str, weights_kind: WeightsKind = "averaged"
) -> Bundle | None:
    """Load the bundle with the initial weights for `model`; None for random weights.

    A network of clips may begin with weights of a network of images, so a file may be of any
    network.
    """
    if not weights:
        return None
    options = LoadOptions(weights_kind=weights_kind)
    name = model if not zoo.spec(model).frames and Path(weights).is_file() else None
    return zoo.load(model if weights == "hub" else weights, name, build_head, options)


def initial_network(
    model: str,
    task: Task,
    data: DataSet,
    recipe: Recipe,
    start: Bundle | None = None,
    width: float = 1.0,
    depth: float = 1.0,
) -> tuple[Backbone, Preprocessing]:
    """Build the network before training, with random or `start` weights, and its preprocessing.

    A classifier for the same classes in another order is put in the order of the data, and one for
    other classes begins with zeros; as many classes without names are the same. Layers of a task's
    head that have rows for each class do so too, but begin with random weights. The resolution is
    the recipe's, or else the task adjusts the resolution of `start` or the network. Gray images are
    read as RGB, with three equal channels, if the weights of `start` take RGB.
    """
    check_input(model, task)
    task = task.with_options(recipe)
    resolution = recipe.resolution or (start and start.preprocessing.resolution)
    if not recipe.resolution:
        usual = resolution or zoo.spec(model).resolution
        fitting = task.resolution_for(data.train, usual)
        resolution = resolution if fitting == usual else fitting
    frames, stride = task.clip
    frames = (frames or (start and start.preprocessing.frames)) if task.takes_clips else 0
    channels = max(data.channels, start.preprocessing.channels) if start else data.channels
    torch.manual_seed(recipe.seed)
    net = zoo.create(
        model,
        classes=len(data.classes),
        in_channels=channels,
        width=width,
        depth=depth,
        resolution=resolution,
        frames=frames or None,
    )
    if isinstance(net, TimmNetwork):  # before a folder exists that the next attempt would resume
        net.check_size(net.spec.resolution, net.spec.resolution)
    net.task_head = task.head(net)
    if net.task_head is not None and recipe.pad_channels:
        raise ValueError(
            f"recipe.pad_channels: the head of the task {task.name} cannot be padded: leave it out"
        )
    own = pre = zoo.family_preprocessing(net.spec)
    if start is None and isinstance(net, TimmNetwork):
        zero_classifiers(net)
    if start:
        begin_with(start, net, model, task, data)
        pre = start.preprocessing
    return net, replace(
        pre,
        resolution=net.spec.resolution,
        crop=pre.crop if recipe.crop is None else recipe.crop,
        fit=recipe.fit or task.view_fit or pre.fit,
        draft=recipe.draft is not False,
        background=recipe.background or pre.background,
        frames=net.spec.frames,
        frame_stride=stride or (pre if pre.frames else own).frame_stride,
    )


def begin_with(start: Bundle, net: Backbone, model: str, task: Task, data: DataSet) -> None:
    """Copy the weights of `start` into `net`, the new network `model`, see `initial_network`."""
    outputs = permutation(start.classes, data.classes, named=start.has_class_names)
    of_classes = tuple(f"{path}." for path in net.class_rows)
    left = copy_weights(start.net, net, () if outputs else of_classes)
    new = [name for name in left if name.startswith(net.classifiers)]
    other = [name for name in left if name not in new and not name.startswith("task_head.")]
    if is_inflated(start.net.spec, net.spec, left):
        what = f"; new: {first_ten(other)}" if other else ""
        print_note(f"{start.name}, of images, begins the middle frames of all kernels{what}")
    elif other:
        raise ValueError(
            f"{start.name} does not begin {model} with {net.spec.in_channels} input channels: "
            f"{other[0]} differs and {len(other) - 1} more; give weights of the same network"
        )
    if any(name.startswith("task_head.") and not name.startswith(of_classes) for name in left):
        note_head(start, task)
    if new or not outputs:
        zero_classifiers(net)
    else:
        reorder_outputs(net, outputs)


@torch.no_grad()
def zero_classifiers(net: Backbone) -> None:
    """Initialise a new classifier with weights and biases of 0, so that the first loss is ln K.

    timm draws classifiers of EfficientNet-like networks from +-1 / sqrt(K), a deviation of 0.41 for
    two classes: the first loss is 2.7 instead of 0.69, and the first steps undo this through the
    whole network. Source of zeros: arXiv:1912.11370, section 3.3; no gradient reaches the layers
    below before the classifier has changed.
    """
    for path in net.classifiers:
        for layer in net.get_submodule(path).modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                for parameter in layer.parameters():
                    parameter.zero_()


def note_head(start: Bundle, task: Task) -> None:
    """Say by which options the head of `start`, for the same task, differs from the new head.

    Switches, such as `normalise_embedding`, are left out, as they change no weights.
    """
    if start.task != task.name:
        return
    own = task_of(start)
    names = [name for name in vars(task.options()) if name in task.state_fields]
    pairs = [(name, getattr(own, name), getattr(task, name)) for name in names]
    others = [each for each in pairs if each[1] != each[2] and not isinstance(each[1], bool)]
    if options := " ".join(f"--task.{name} {its}" for name, its, _ in others):
        print_note(
            f"the head begins with random weights: give {options} for the weights of {start.name}"
        )


def is_inflated(images: Spec, clips: Spec, left: Sequence[str]) -> bool:
    """Whether weights of images initialise all blocks of a network of clips, given `left` names."""
    has_blocks = not any(".branch.conv" in name or ".project." in name for name in left)
    same_channels = images.in_channels == clips.in_channels
    return clips.frames > 0 == images.frames and same_channels and has_blocks


def check_input(model: str, task: Task) -> None:
    """Raise ValueError for a network of images with a task of clips, and vice versa."""
    takes_clips = zoo.spec(model).frames > 0
    if takes_clips and not task.takes_clips:
        raise ValueError(
            f"{model} takes clips, and the task {task.name} has images: use --task video, or a "
            "network of images"
        )
    if task.takes_clips and not takes_clips:
        raise ValueError(
            f"{model} takes images, and the task {task.name} has clips: use a network of clips, "
            "such as resnet3d_rs_50"
        )


def epochs_text(epochs: float) -> str:
    """12.34 -> 12.3, 1234.5 -> 1234."""
    return f"{epochs:.3g}" if epochs < 100 else f"{epochs:.0f}"


SCORING_SHARE = 1 / 3  # time of a forward pass / time of a training step


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run with its configuration in a folder, and everything for its steps."""

    folder: Path
    config: run_folder.RunConfig
    task: Task
    metric: Metric  # to compare epochs by
    data: DataSet
    case: Case  # the case of the recipe
    recipe: Recipe
    resolved: Recipe  # with its length in epochs and its efficiency
    pre: Preprocessing
    spec: Spec  # of the saved network, without padding
    net: Backbone  # with its initial weights, on the CPU
    batches: TrainingBatches
    val: Batches | None  # with workers as long-lived as in `batches`; None: no images
    weights_resolution: int | None  # of the initial weights; None for random ones
    licence: str  # of the initial weights, which holds for the trained weights; or ""
    origin: str  # the initial weights, at the end of the bundle's source; or ""
    teacher: TeacherProbabilities | None
    device: torch.device
    workers: int  # processes that decode images, per training process
    context: DistributedContext
    deadline: float | None  # see `NamedRecipe`
    start: tuple[int, int] = (0, 0)  # epochs of an earlier call, and steps in the next epoch
    turns: tuple[tuple[int, int], ...] = ()  # of the `Course` of an earlier call

    @property
    def scoring(self) -> BatchOptions:
        return BatchOptions(self.pre, self.device, self.workers, self.context)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.batches)

    @property
    def steps(self) -> int:
        """The steps of the whole schedule."""
        return max(1, round(self.resolved.epochs * self.steps_per_epoch))

    @cached_property
    def work(self) -> list[float]:
        """The time of a step in each epoch of the schedule / at the whole resolution, by pixels."""
        sides, resolution = self.resolved.resolutions(self.pre.resolution), self.pre.resolution
        work = [(side / resolution) ** 2 for side in sides]
        return work + [1.0] * (math.ceil(self.resolved.epochs) - len(work))

    @property
    def course(self) -> Course:
        return Course(self.steps, self.turns)

    def resumed(self, state: Mapping[str, Any] | None) -> "PreparedRun":
        """The run that goes on from the checkpoint `state`, if there is one."""
        if state is None:
            return self
        return replace(self, start=(state["epochs"], state["index"]), turns=state["turns"])

    def seconds_left(
        self, step_s: float, epoch: int, step: float, image_s: float | None = None
    ) -> tuple[float, float]:
        """The time from a step of an epoch (from 0) to the last step, and then to the end.

        The step takes `step_s`. Scoring an image takes `image_s`, by default a third of its share
        of a step at the whole resolution.
        """
        epochs, work = math.ceil(self.resolved.epochs), self.work
        left = sum(work[: self.steps // self.steps_per_epoch]) * self.steps_per_epoch
        left += work[-1] * (self.steps % self.steps_per_epoch)
        left -= sum(work[:epoch]) * self.steps_per_epoch + work[epoch] * step
        scores = math.ceil((epochs - epoch) / self.resolved.score_every_epochs)
        whole_s, val = step_s / work[epoch], len(self.data.val)
        if image_s is None:
            image_s = SCORING_SHARE * whole_s / self.resolved.batch_size
        return left * whole_s + scores * val * image_s, (val + len(self.data.test)) * image_s

    def score(self, net: Backbone, images: Images, task: Task | None = None) -> Evaluation:
        """Evaluate `net` on `images`; `task` defaults to the run's task."""
        task = task or self.task
        if images is self.data.val and self.val:
            return score_batches(net, task, self.val, self.context)
        return score_images(net, task, images, self.scoring)

    def val_scores(self, net: Backbone) -> dict[str, float]:
        """The validation scores of `net`; none without images, or if they are not finite."""
        try:
            return self.score(net, self.data.val).scores if self.val else {}
        except FloatingPointError:
            return {}

    def calibrate(self, net: Backbone) -> tuple[Task, Evaluation | None]:
        """Fit the task to outputs of `net` on the validation split; return it with the result.

        It is the run's task if there is nothing to fit, or no validation split.
        """
        images = self.data.val
        if not self.val:
            return self.task, None
        if not (self.recipe.calibrate and self.task.has_fit):
            return self.task, self.score(net, images)
        classes = len(self.data.classes)
        if len(images) * classes <= MAX_OUTPUTS:
            result = fit_and_score(net, self.task, self.val, self.context)
            return result.task, result
        task = fit_on(net, self.task, images, self.scoring, classes=classes)
        return task, self.score(net, images, task)

    def close(self) -> None:
        """End the processes that decode images."""
        for batches in filter(None, (self.batches, self.val)):
            batches.close()

    def bundle(
        self,
        net: Backbone,
        scores: Mapping[str, Any],
        task: Task | None = None,
        epochs: Sequence[int] = (),
    ) -> Bundle:
        """Make the bundle of `net`, without padding, with `scores` by split and the task's state.

        `epochs`: the averaged epochs, if several.
        """
        state = (task or self.task).state()
        average = f", the average of epochs {', '.join(map(str, epochs))}" if epochs else ""
        if self.turns:
            ended = self.course.end / self.steps_per_epoch
            average = (
                f", for {epochs_text(ended)} of {epochs_text(self.resolved.epochs)} epochs by a "
                f"time limit{average}"
            )
        return Bundle(
            net=padding.to_unpadded(net, self.spec),
            name=self.folder.name,
            classes=self.data.classes,
            preprocessing=self.pre,
            recipe=self.config.recipe,
            scores=scores,
            environment=asdict(Environment.here(self.device))
            | {"train_images": len(self.data.train)},
            source=f"trained on {self.data.name}{average}{self.origin}",
            licence=self.licence,
            task=self.task.name,
            temperature=state.pop("temperature", 1.0),
            task_state=state,
            mirror=self.data.mirror,
        )


def prepare(
    folder: Path,
    model: str,
    data: DataSet,
    recipe: Recipe | NamedRecipe,
    options: RunOptions = DEFAULTS,
    context: DistributedContext = SINGLE_PROCESS,
) -> PreparedRun:
    """Prepare the run for the arguments of `run.train`, and create or check the folder.

    Raises ValueError if the folder holds another run.
    """
    case = case_of(data, options.weights, options.width)
    named = recipe if isinstance(recipe, NamedRecipe) else NamedRecipe(recipe, case=case)
    recipe = named.recipe
    check_recipe(recipe, data, options.weights)
    saved = context.gather(run_folder.resumable_config(folder))[0]
    if saved:
        left = (name for name, auto in LEFT_TO_THE_DEVICE.items() if getattr(recipe, name) == auto)
        recipe = replace(recipe, **{name: saved.recipe[name] for name in left})
    task = find_task(options.task).with_options(recipe).for_data(data)
    metric = task.find_metric(recipe.score, len(data.classes))
    start = initial_weights(model, options.weights, options.weights_kind)
    spec, net, pre = network_to_train(
        model, task, data, recipe, start, options.width, options.depth
    )
    device, workers = find_device(options.device), options.workers
    if workers is None:
        workers = choose_workers(data.train, len(data.train) // recipe.batch_size, device)
    how = BatchOptions(pre, device, workers, context)
    batches, in_steps, pseudo_labels = run_batches(data, task, how, recipe)
    val = scoring_batches(task, data.val, how) if data.val else None
    resolved = recipe_here(in_steps, data, len(batches), device, saved)
    teacher = build_teacher(data, pre, resolved, device, options.teacher_cache)
    resolved = choose_passes(resolved, net, len(data.train), device, context)
    if resolved.efficiency == "auto":
        few = measurement_batches(data, task, BatchOptions(pre, device), recipe, batch=8)
        batch = next(few.epoch(0))
        chosen = choose_efficiency(resolved, task, net, batch, device, context.world_size)
        resolved = replace(resolved, efficiency=context.gather(chosen.efficiency)[0])
    named = replace(named, recipe=recipe)
    config = run_config(model, options, data, spec, pre, named, resolved, pseudo_labels)
    context.on_rank_zero(run_folder.create_or_resume, folder, config)
    return PreparedRun(
        folder=folder,
        config=config,
        task=task,
        metric=metric,
        data=data,
        case=named.case,
        recipe=recipe,
        resolved=resolved,
        pre=pre,
        spec=spec,
        net=net,
        batches=batches,
        val=val,
        weights_resolution=start.preprocessing.resolution if start else None,
        licence=start.licence if start else "",
        origin=f", beginning with {start.name} ({start.source})" if start else "",
        teacher=teacher,
        device=device,
        workers=workers,
        context=context,
        deadline=named.deadline,
    )


def run_config(
    model: str,
    options: RunOptions,
    data: DataSet,
    spec: Spec,
    pre: Preprocessing,
    named: NamedRecipe,
    resolved: Recipe,
    pseudo_labels: str,
) -> run_folder.RunConfig:
    return run_folder.RunConfig(
        model=model,
        weights=options.weights,
        weights_kind=options.weights_kind,
        data=data.where,
        fingerprint=data.fingerprint,
        classes=data.classes,
        spec=json.loads(spec.to_json()),
        preprocessing=asdict(pre),
        recipe=asdict(named.recipe),
        efficiency=resolved.efficiency,
        score_every_epochs=resolved.score_every_epochs,
        precision=resolved.precision,
        channels_last=bool(resolved.channels_last),
        grad_accum_steps=resolved.grad_accum_steps,
        task=options.task,
        recipe_name=named.name,
        pseudo_labels=pseudo_labels,
        **asdict(data.rule),
    )


def check_recipe(recipe: Recipe, data: DataSet, weights: str) -> None:
    """Raise ValueError, in one line, for fields that lack their weights or validation images."""
    keeps = "would leave random weights as they are"
    of_weights = {
        "frozen_statistics": "normalises by the statistics of released weights",
        "linear_probe": "fits a classifier to the features of released weights",
        "freeze_stages": keeps,
        "freeze_epochs": keeps,
        "frozen": keeps,
    }
    for name, what in of_weights.items():
        if getattr(recipe, name) and not weights:
            raise ValueError(f"recipe.{name} {what}: give --weights, or leave it out")
    for name in ("soup", "early_stop_patience"):
        if getattr(recipe, name) and not data.val:
            raise ValueError(
                f"recipe.{name} {getattr(recipe, name)} needs validation images to compare "
                "epochs on: set it to 0, or leave --val 0 out"
            )


def recipe_here(
    recipe: Recipe,
    data: DataSet,
    steps_per_epoch: int,
    device: torch.device | str,
    saved: run_folder.RunConfig | None,
) -> Recipe:
    """Resolve the recipe's length in epochs, and the numbers that the device decides.

    A resumed run has the numbers of `saved`.
    """
    resolved = recipe_in_epochs(data, recipe)
    every = recipe.scored_every(resolved.epochs, steps_per_epoch)
    if saved:
        resolved = replace(
            resolved,
            precision=saved.precision,
            channels_last=saved.channels_last,
            efficiency=saved.efficiency if recipe.efficiency == "auto" else recipe.efficiency,
            grad_accum_steps=resolved.grad_accum_steps or saved.grad_accum_steps,
        )
        every = recipe.score_every_epochs or saved.score_every_epochs
    return on_device(replace(resolved, score_every_epochs=every), device)
