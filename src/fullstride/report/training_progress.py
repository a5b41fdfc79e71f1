"""Prints the plan of a training run, its remaining time, and its epochs."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from fullstride.data.dataset import DataSet, Images
from fullstride.io.console import Bar, count_of, first_names, printable, report_skipped
from fullstride.measure.environment import Environment
from fullstride.measure.tracer import cost
from fullstride.nets.bundle import Bundle, Metadata, read_metadata
from fullstride.nets.spec import input_shape
from fullstride.nets.timm_wrapper import TimmNetwork
from fullstride.report.console_lines import few_images_line, test_line
from fullstride.report.console_tables import count, three_digits, wilson
from fullstride.tasks import build_head, task_of
from fullstride.tasks.task import Metric
from fullstride.train import run_folder
from fullstride.train.batches import BatchOptions, TrainingBatches, recipe_in_epochs
from fullstride.train.final_weights import features
from fullstride.train.prepare import PreparedRun
from fullstride.train.recipes.named import BY_IMAGES, RECIPES, default_recipe, find_recipe
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.run import StallWatch
from fullstride.train.scoring import SplitScores, load_scores
from fullstride.train.timing import Report

MAX_CHANGES = 6  # to a named recipe that are printed one by one
# Fields whose values are printed anyway.
PRINTED = {"epochs", "steps", "images", "batch_size", "lr", "warmup_epochs", "resolution"}
PRINTED |= {"score_every_epochs"}
PRINTED |= {"precision", "channels_last", "efficiency", "grad_accum_steps"}


class TrainingProgress:
    """Prints a run's plan, its remaining time, and its epochs with a bar.

    `announce` and `watch` are arguments of `train.run.train`.
    """

    def __init__(self, bar: Bar, metric: Metric):
        self.bar, self.metric = bar, metric
        self.run: PreparedRun | None = None
        self.watch_stall: StallWatch | None = None
        self.rows: list[dict[str, Any]] = []

    def announce(self, run: PreparedRun) -> Report:
        self.run, self.watch_stall = run, StallWatch(run)
        if self.bar.shown:
            for line in plan_lines(run):
                self.bar.print(line)
            is_share = self.metric.percent_of_images
            if few := few_images_line("val", len(run.data.val), is_share=is_share):
                self.bar.print(f"warning  {few}")
        return self.report

    def watch(self, batches: TrainingBatches) -> Any:
        return self.bar.watch(batches)

    def report(self, step_s: float, epoch: int, step: int) -> None:
        assert self.run
        training_s, end_s = self.run.seconds_left(step_s, epoch, step)
        self.bar.print(time_line(training_s / self.run.course.stride + end_s))

    def print(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        every = self.run.resolved.score_every_epochs if self.run else 1
        if row["epoch"] % every == 0 or row["epoch"] in (1, row["epochs"]):
            self.bar.print(epoch_line(row, self.metric))
        if self.watch_stall and (note := self.watch_stall.update(row)):
            self.bar.print(f"stalled  {note}")

    def end(self, folder: Path, data: DataSet, recipe: Recipe) -> None:
        """Print why training stopped, unreadable images, and the score of the run in `folder`."""
        if not self.bar.shown:
            return
        if run_folder.should_stop_early(self.rows, recipe, self.metric):
            epochs = recipe.early_stop_patience
            self.bar.print(
                f"no better validation score in {epochs} epochs: training stops, with the best "
                "weights"
            )
        if self.watch_stall and self.watch_stall.note:
            self.bar.print(f"stalled  {self.watch_stall.note}")
        split, bundle = data.score_split, folder / run_folder.BUNDLE
        scored = split in read_metadata(bundle).scores
        scores = run_folder.final_scores(folder, split, self.metric) if scored else {}
        skipped = {name: reason for row in self.rows for name, reason in row["skipped"].items()}
        report_skipped(skipped | scores.get("skipped", {}))
        trained = "all images were trained on"
        why = f"no {split} image could be scored" if getattr(data, split) else trained
        line = f"no score, as {why}; bundle in {bundle}"
        if scored:
            line = test_line(split, scores, self.metric, bundle, data.missing_classes(split))
            if baseline := task_of(read_metadata(bundle)).baseline_note(scores):
                self.bar.print(baseline)
        if calibration := calibration_line(read_metadata(bundle), recipe):
            self.bar.print(calibration)
        for each in shift_lines(folder, data):
            self.bar.print(each)
        self.bar.print(line)


def calibration_line(bundle: Metadata, recipe: Recipe) -> str:
    """What a bundle's fitted state changes, or why a recipe with `calibrate` has none."""
    scores = bundle.scores.get("val")
    task = task_of(bundle)
    if scores:
        return task.fit_note(scores)
    if recipe.calibrate and task.has_fit:
        return "nothing is calibrated, as there is no validation split"
    return ""


def plan_lines(run: PreparedRun) -> list[str]:
    """The plan of a run: device, data, network, recipe, and where it starts."""
    data, recipe, side = run.data, run.resolved, run.pre.resolution
    environment = Environment.here(run.device)
    threads = f", threads: {environment.threads}" if run.device.type == "cpu" else ""
    processes = f", processes: {run.context.world_size}" if run.context.world_size > 1 else ""
    total = cost(run.net, side, run.net.spec.in_channels)
    shape = " x ".join(map(str, input_shape(run.net.spec, side)[1:]))
    weights = f"weights from {run.config.weights}" if run.config.weights else "random weights"
    passes = f" in {recipe.grad_accum_steps} passes" if recipe.grad_accum_steps > 1 else ""
    layout = "channels last" if recipe.channels_last else "contiguous"
    splits = (f"{len(getattr(data, name)):,} {name}" for name in ("train", "val", "test"))
    warmup = f" after a warmup of {recipe.warmup_epochs:.3g} epochs"
    if recipe.schedule == "one_cycle":
        warmup = ""
    classes = count_of(len(data.classes), "class")
    lines = [
        f"device   {environment.device}{threads}{processes}, workers: {run.workers}",
        f"data     {data.where}: {classes}; images: {', '.join(splits)}",
        f"network  {run.config.model}: {count(total.params)} parameters, "
        f"{three_digits(total.macs / 1e9)} GMACs at {shape}, {weights}",
        f"recipe   {name_of_recipe(run)}: {recipe.epochs:.4g} epochs x "
        f"{count_of(run.steps_per_epoch, 'step')} = {count_of(run.steps, 'step')} of "
        f"{count_of(recipe.batch_size, 'image')}{passes}; learning rate {recipe.lr:.4g}{warmup}, "
        f"{recipe.precision}, {layout}, {recipe.efficiency}",
        *score_lines(recipe, bool(data.val)),
        *advice_lines(run),
    ]
    for name in ("train", "val", "test"):
        if getattr(data, name) and (missing := data.missing_classes(name)):
            classes = f"{count_of(len(missing), 'class')}: {first_names(missing)}"
            lines.append(f"classes  {name} has no image of {classes}")
    if not data.val:
        score = "" if data.test else ", and there is no score of it"
        lines.append(
            f"splits   no validation split: no epoch is chosen, the last one is saved{score}"
        )
    if any(run.start):
        epochs, steps = run.start
        within = f" and {count_of(steps, 'step')}" if steps else ""
        lines.append(f"resumes  after {count_of(epochs, 'epoch')}{within}")
    return lines


def score_lines(recipe: Recipe, has_val: bool) -> list[str]:
    """How often epochs are scored, unless each is."""
    every = recipe.score_every_epochs
    if every == 1:
        return []
    what = "a score of the validation split and a checkpoint" if has_val else "a checkpoint"
    return [f"scores   {what} every {every} epochs; --recipe.score-every-epochs sets it"]


def name_of_recipe(run: PreparedRun) -> str:
    """The named recipe behind the run's recipe, with the differences."""
    name = run.config.recipe_name
    if not name:
        return recipe_name(run.recipe)
    base = find_recipe(name, run.case)
    count = f" for {count_of(run.case.images, 'image')}" if name in BY_IMAGES else ""
    values = changed_values(run.recipe, base)
    if len(values) > MAX_CHANGES:
        values = [f"{len(values)} other fields"]
    return f"{name}{count}{' with ' if values else ''}{', '.join(values)}"


def recipe_name(recipe: Recipe) -> str:
    """The closest named recipe, with the differences, such as "digits with seed 1"."""
    name = min(RECIPES, key=lambda name: len(changed_fields(recipe, RECIPES[name])))
    values = changed_values(recipe, RECIPES[name])
    if len(values) > MAX_CHANGES:
        return "of its own"
    return f"{name} with {', '.join(values)}" if values else name


def changed_values(recipe: Recipe, other: Recipe) -> list[str]:
    values = {
        field: getattr(recipe, field)
        for field in changed_fields(recipe, other)
        if field not in PRINTED
    }
    options = values.pop("task_options", {})
    values |= {name: x for name, x in options.items() if other.task_options.get(name) != x}
    return [
        f"{field} {value:.4g}" if isinstance(value, float) else f"{field} {value}"
        for field, value in values.items()
    ]


def advice_lines(run: PreparedRun) -> list[str]:
    """Notes on consequences of the user's changes that may not be intended."""
    recipe, case = run.resolved, run.case
    name, side = run.config.recipe_name, run.pre.resolution
    base = find_recipe(name, case) if name else run.recipe
    usual_name = name if name in BY_IMAGES else default_recipe(case)
    usual = recipe_in_epochs(run.data, find_recipe(usual_name, replace(case, epochs=None)))
    most = max(base.batch_size, case.images)  # the rate follows the batch up to this
    usual_steps = round(usual.epochs * max(1, case.images // usual.batch_size))
    lines = []
    if run.deadline is not None:
        lines.append(
            f"limit    {recipe.epochs:.4g} epochs are expected to end in time; where steps become "
            "slower, training ends after fewer, and a line says so"
        )
    if (before := run.weights_resolution) and before != side:
        lines.append(
            f"weights  of {before} x {before} pixels go on at {side} x {side}; "
            f"--resolution {before} keeps theirs"
        )
    if recipe.batch_size != base.batch_size and recipe.lr != base.lr:
        lines.append(
            f"rate     {recipe.lr:.4g} for batch {recipe.batch_size:,}; the recipe has "
            f"{base.lr:.4g} for {base.batch_size:,}"
        )
    same_rate = recipe.lr == base.lr_for(min(recipe.batch_size, most), recipe.optimizer)
    if recipe.optimizer != base.optimizer and same_rate:
        lines.append(
            f"rate     {recipe.lr:.4g} follows the rate of {base.optimizer}, not of "
            f"{recipe.optimizer}: --lr sets it"
        )
    if recipe.batch_size > case.images:
        lines.append(
            f"batch    {recipe.batch_size:,} is above the "
            f"{count_of(case.images, 'training image')}: a step has all of them; --batch-size sets "
            "it, and the rate follows"
        )
    elif run.steps_per_epoch == 1:
        lines.append("batch    one step is an epoch: a smaller --batch-size gives more steps")
    is_shorter = recipe.epochs < recipe_in_epochs(run.data, base).epochs
    warmup = base.warmup_epochs if is_shorter else run.recipe.warmup_epochs
    if recipe.warmup_epochs < warmup:
        lines.append(
            f"warmup   {recipe.warmup_epochs:.3g} epochs in place of {warmup:.3g}, as training "
            "is shorter"
        )
    if 2 * run.steps < usual_steps:
        lines.append(
            f"length   {count_of(run.steps, 'step')}; {usual_name} takes {usual_steps:,} for "
            f"{count_of(case.images, 'image')}, and fewer may be too few: --epochs sets it"
        )
    return lines


def changed_fields(recipe: Recipe, other: Recipe) -> list[str]:
    names = (field.name for field in fields(Recipe))
    return [name for name in names if getattr(recipe, name) != getattr(other, name)]


def time_line(seconds: float) -> str:
    left = "less than a minute" if seconds < 45 else f"about {duration(seconds)}"
    return f"time     {left} left, from the time of the first steps"


def duration(seconds: float) -> str:
    """90 -> 2 min, 4000 -> 67 min, 9000 -> 2.5 h, 300000 -> 3.5 days."""
    hours = seconds / 3600
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} h" if hours >= 2 else f"{max(1, round(60 * hours))} min"


def epoch_line(row: Mapping[str, Any], metric: Metric) -> str:
    """The text of one row of a run's log."""
    score = row.get(f"val/{metric.name}")
    val = "" if score is None else f"validation {metric.text(score)}  "
    if "unscored" in row:
        val = "no validation score, as the outputs are not finite  "
    return (
        f"epoch {row['epoch']:>3}/{row['epochs']}  loss {row['loss']:.4f}  {val}"
        f"{row['images_per_s']:,.0f} images/s, {row['data_wait_fraction']:.0%} of the time waiting "
        "for them"
    )


# ---- how test images differ from validation images if the test score is lower

MOST_IMAGES = 500  # of a split, evenly spaced, to compare
SHOWN = 3  # classes, and images


def shift_lines(
    run: Path, data: DataSet, test: SplitScores | None = None, device: str = "cpu"
) -> list[str]:
    """Explain a test top-1 below the 95 % interval of the validation top-1.

    The lines say how far below it is, which classes lose most images, which test images are least
    like the training images (by the cosine of embeddings to the nearest one), and how to choose a
    better network for them. There are no lines if the test is as good or too small to tell, without
    validation or test scores, and for tasks without one class per image.

    `run` is the folder of the run, with the bundle and its scores; `test` are test scores of a
    file of the network, by default the run's; `device` computes embeddings.
    """
    bundle = read_metadata(run / run_folder.BUNDLE)
    if not task_of(bundle).single_label or "val" not in bundle.scores or not len(data.test):
        return []
    splits = load_scores(run / run_folder.SCORES).splits
    val, test = splits["val"], test or splits.get("test")
    if not test:
        return []
    low, high = wilson(val.scores["top1"], int(val.scores["images"]))
    _, most = wilson(test.scores["top1"], int(test.scores["images"]))
    below = low - test.scores["top1"]
    if below <= 0 or most >= val.scores["top1"]:
        return []
    lines = [
        f"shift    the test is {below:.1f} points below the interval of the validation, "
        f"{low:.1f} to {high:.1f} %: its images may be of another kind"
    ]
    before = {each.name: each.recall for each in val.by_class}
    falls = [
        (
            each.images * (recall - each.recall),
            f"{printable(each.name)} ({recall:.0f} to {each.recall:.0f} %)",
        )
        for each in test.by_class
        if each.recall is not None and (recall := before.get(each.name)) is not None
    ]
    if classes := [text for fall, text in sorted(falls, reverse=True)[:SHOWN] if fall > 0]:
        lines.append(f"shift    most images are lost in {', '.join(classes)}")
    if names := least_like_training(run / run_folder.BUNDLE, data, device):
        lines.append(f"shift    least like the training images: {', '.join(map(printable, names))}")
    lines.append(
        "shift    a val/ of the new kind, or --group with what images of a kind have in common, "
        "would choose better networks for them"
    )
    return lines


def least_like_training(folder: Path, data: DataSet, device: str) -> list[str]:
    """The names of the test images whose nearest training image is furthest; none for a network
    without an embedding.
    """
    bundle = Bundle.load(folder, build_head)
    if isinstance(bundle.net, TimmNetwork) and not bundle.net.embeds:
        return []
    how = BatchOptions(bundle.preprocessing, device)

    def embedded(images: Images) -> tuple[torch.Tensor, list[str]]:
        some = images.spaced(MOST_IMAGES)
        inputs, _, indices = features(bundle.net, task_of(bundle), some, how)
        return normalize(inputs), [some.names[index] for index in indices.tolist()]

    (train, _), (test, names) = embedded(data.train), embedded(data.test)
    nearest = (test @ train.T).amax(1)
    return [names[index] for index in nearest.argsort(stable=True)[:SHOWN].tolist()]
