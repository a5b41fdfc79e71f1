"""Trains a run from data and the name of a network to a bundle, and resumes it after a stop."""

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods, get_start_method
from pathlib import Path
from typing import Any

from fullstride.data.dataset import DataSet
from fullstride.data.targets import recognise
from fullstride.io.console import print_error, print_note
from fullstride.measure.budget import deadline_s
from fullstride.measure.environment import choose_device
from fullstride.nets import padding
from fullstride.nets.bundle import Bundle
from fullstride.tasks import build_head, find_task
from fullstride.tasks.task import Task
from fullstride.train import final_weights, loop, run_folder
from fullstride.train.batches import TrainingBatches
from fullstride.train.compute import SINGLE_PROCESS, DistributedContext, keep_freed_memory
from fullstride.train.prepare import PreparedRun, prepare
from fullstride.train.recipes.choice import DEFAULTS, HERE, NamedRecipe, RecipeChoice, RunOptions
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import FinalNetwork, all_skipped, save_scores
from fullstride.train.timing import Pace, Report, recipe_within


def finish(run: PreparedRun) -> None:
    """Score the final weights on validation and test images, and save them as the bundle.

    Scores in the log are not computed again. The task's state, such as a temperature, is first
    fitted on the validation split. Test images that cannot be scored, such as unreadable ones, are
    told of, and left out. Raises FloatingPointError if the final scores are not finite.
    """
    final, results = final_network(run), {}
    if run.recipe.measures_statistics:
        final = final_weights.better_statistics(run, final)
    if run.recipe.soup:
        final = final_weights.better_average(run, final)
    if run.recipe.linear_probe:
        final = final_weights.with_probe(run, final)
    try:
        task, val = run.calibrate(final.net)
        if val:
            results["val"] = val.with_interval()
        if len(run.data.test):  # data with its own validation split may have no test
            try:
                results["test"] = run.score(final.net, run.data.test, task).with_interval()
            except ValueError as error:
                if run.context.is_rank_zero:
                    print_note(f"{run.folder} has no test scores: {error}")
    except FloatingPointError as error:
        raise FloatingPointError(
            f"{error} at the end of training: lower recipe.lr ({run.recipe.lr:g}), such as "
            f"--lr {run.recipe.lr / 10:.2g}, or set recipe.clip_norm, with another --out"
        ) from None
    names = run.folder.name, run.data.name, run.data.classes
    run.context.on_rank_zero(save_scores, run.folder / run_folder.SCORES, *names, results)
    scores = {
        split: result.scores | ({"skipped": result.skipped} if result.skipped else {})
        for split, result in results.items()
    }
    bundle = run.bundle(final.net, scores, task, final.epochs)
    run.context.on_rank_zero(bundle.save, run.folder / run_folder.BUNDLE)


def final_network(run: PreparedRun) -> FinalNetwork:
    """The average of the last epoch, or of the best epoch if the recipe stops early.

    It has the scores of the log, which may lack the last epoch's if the run has not ended.
    """
    last = run_folder.load_checkpoint(run.folder)
    assert last is not None
    rows = run_folder.read_log(run.folder, run.metric, last["epochs"])
    if run.recipe.early_stop_patience and (best := run_folder.best_row(rows, run.metric)):
        path = run.folder / run_folder.BEST
        if not path.is_dir():
            raise ValueError(f"{path}, the best epoch's weights, is gone: train with another --out")
        net = padding.to_unpadded(run.net, run.spec)
        net.load_state_dict(Bundle.load(path, build_head).net.state_dict())
        return FinalNetwork(net, run_folder.val_scores(best))
    run.net.load_state_dict(last["average"])
    return FinalNetwork(run.net, run_folder.val_scores(rows[-1]))


def train(
    folder: Path,
    model: str,
    data: DataSet,
    recipe: Recipe | NamedRecipe,
    options: RunOptions = DEFAULTS,
    context: DistributedContext = SINGLE_PROCESS,
    announce: Callable[[PreparedRun], Report | None] = lambda run: None,
    watch: Callable[[TrainingBatches], loop.BatchSource] = lambda batches: batches,
) -> Generator[dict[str, Any], None, None]:
    """Train `model` on `data` in `folder`; yield each epoch's row of the log, earlier epochs too.

    `data` is from `open_data` of the task. After a stop, the same call resumes from the last
    checkpoint; checkpoints are written after every scored epoch, and when this generator is closed
    after an epoch. The weights with the best validation score are saved as a bundle in the folder.
    With the recipe's `early_stop_patience` these are scored on the test images at the end,
    otherwise the last weights. `announce` is called before the first step of a run that has not
    ended, and may return a function that `Pace` reports the time of the first steps to; `watch` may
    wrap the training batches, to show progress.

    Raises ValueError if the folder has another run, and LockedError if another process trains
    there.
    """
    if (steps := options.checkpoint_every_steps) < 0:
        raise ValueError(
            f"checkpoint_every_steps {steps}: use a number of steps, or 0 for after each epoch only"
        )
    with run_folder.locked(folder, context):
        run = prepare(folder, model, data, recipe, options, context)
        try:
            yield from trained_epochs(run, steps, announce, watch)
        finally:
            run.close()


def task_for(data: str, options: RunOptions, changes: Mapping[str, Any]) -> Task:
    """The task of the options, or else a task recognised from `data`, which is printed.

    It has the task's options from `changes` of the recipe. Raises ValueError in one line.
    """
    name = options.task
    if not name:
        name, what = recognise(data)
        if what:
            print_note(f"{data!r} has {what}: the task is {name}; --task NAME chooses another")
    task = find_task(name)
    return replace(task, **vars(task.read_options(changes.get("task_options", {}))))


def trained_epochs(
    run: PreparedRun,
    checkpoint_every_steps: int,
    announce: Callable[[PreparedRun], Report | None],
    watch: Callable[[TrainingBatches], loop.BatchSource],
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run in a locked folder, from its last checkpoint on."""
    resume = run_folder.load_checkpoint(run.folder)
    rows = run_folder.read_log(run.folder, run.metric, resume["epochs"] if resume else 0)
    has_ended, run = (run.folder / run_folder.BUNDLE).is_dir(), run.resumed(resume)
    report = None if has_ended else announce(run)
    yield from rows
    if has_ended:
        return
    if run.recipe.linear_probe and resume is None:
        final_weights.save_probe(run)
        if run.recipe.frozen_statistics:
            final_weights.begin_with_probe(run)
    run.net.to(run.device)
    run.context.on_rank_zero(final_weights.check_slots, run)
    if not run_folder.should_stop_early(rows, run.recipe, run.metric):
        per_epoch = run.steps_per_epoch
        how = run.resolved.in_epochs(per_epoch), per_epoch, run.teacher, run.context
        trainer = loop.build_trainer(run.net, run.task, *how)
        pause = Pace(run, loop.every(checkpoint_every_steps, per_epoch), report)
        with keep_freed_memory(run.device):
            epochs = loop.run_epochs(trainer, watch(run.batches), resume, pause)
            yield from saved_epochs(run, epochs, rows)
        run = replace(run, turns=trainer.course.turns)
    finish(run)


def saved_epochs(
    run: PreparedRun, epochs: Iterator[loop.Checkpoint], rows: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Score and save `epochs`; add the row of each to `rows`, and yield it.

    The last of every `score_every_epochs` epochs is scored and saved. An epoch that turns the
    course is saved too, and an epoch after which the caller closes this generator. Without a
    validation split there are no scores, and no best epoch is saved.
    """
    turns = run.turns
    for epoch in epochs:
        is_turn, turns = epoch.state["turns"] != turns, epoch.state["turns"]
        if not isinstance(epoch, loop.Epoch):
            run.context.on_rank_zero(run_folder.save_epoch, run.folder, rows, epoch.state)
            continue
        rows.append(unscored_row(run, epoch, rows))
        number, last = rows[-1]["epoch"], rows[-1]["epochs"]
        is_due = number % run.resolved.score_every_epochs == 0 or number == last
        if is_due and run.data.val:
            score_epoch(run, epoch, rows)
        if is_due or is_turn:
            run.context.on_rank_zero(run_folder.save_epoch, run.folder, rows, epoch.state)
        try:
            yield rows[-1]
        except GeneratorExit:
            if not is_due and not run.context.is_distributed:  # other processes may still run
                run_folder.save_epoch(run.folder, rows, epoch.state)
            raise
        if run_folder.should_stop_early(rows, run.recipe, run.metric):
            return


def unscored_row(run: PreparedRun, epoch: loop.Epoch, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The next row of the log after `rows`, without scores."""
    return {
        "epoch": epoch.number + 1,
        "epochs": epoch.epochs,
        "loss": epoch.loss,
        "lr": epoch.lr,
        "images_per_s": epoch.images_per_s,
        "data_wait_fraction": epoch.data_wait_fraction,
        "skipped": not_logged(all_skipped(run.batches.skipped, run.context), rows),
    }


def not_logged(skipped: Mapping[str, str], rows: list[dict[str, Any]]) -> dict[str, str]:
    """The unreadable images that are not in any row."""
    logged = {name for row in rows for name in row["skipped"]}
    return {name: why for name, why in skipped.items() if name not in logged}


def score_epoch(run: PreparedRun, epoch: loop.Epoch, rows: list[dict[str, Any]]) -> None:
    """Add the scores of an epoch to the last row, and save the epoch if it is the best so far.

    If outputs are not finite, since running statistics may be far off at the start of training, the
    row says so, and training continues.
    """
    row = rows[-1]
    try:
        result = run.score(epoch.average, run.data.val)
    except FloatingPointError as error:
        row["unscored"] = str(error)
        return
    scores = result.scores
    row |= {f"val/{key}": value for key, value in scores.items() if key != "images"}
    row["skipped"] |= not_logged(result.skipped, rows)
    if run_folder.best_row(rows, run.metric) is row:
        best = run.bundle(epoch.average, {"val": scores})
        run.context.on_rank_zero(best.save, run.folder / run_folder.BEST)
    if run.recipe.soup:
        run.context.on_rank_zero(final_weights.save_epoch, run, rows, epoch.average, scores)


# Fractions of training, and steps, after which a note says that nothing is learned. For a score of
# 0 it comes earlier: a detector that learns leaves 0 in a tenth of the training (docs/log.md).
STALLED_SHARE, ZERO_SHARE, STALLED_STEPS = 1 / 3, 1 / 10, 10
# Nothing is learned for a loss / the loss of a guess from LEARNED to FAR; something is learned for
# a validation loss / the loss of a guess below VAL_LEARNED, or a score better by NEAR_SCORE points.
# Our own numbers.
LEARNED, FAR, VAL_LEARNED, NEAR_SCORE = 0.98, 1.1, 0.95, 0.05


@dataclass
class StallWatch:
    """Detects that the last epochs of a run were no better than guesses without the images."""

    run: PreparedRun
    learned: int = 0  # the last better epoch
    note: str = ""  # printed at the end; "" if the last epochs were better
    is_said: bool = False

    def update(self, row: Mapping[str, Any]) -> str:
        """Read the row of the next epoch; return a note to print during training, once, or ""."""
        reason = self.why_stalled(row)
        if reason is not None:
            self.learned, self.note = self.learned if reason else row["epoch"], ""
            epochs, of = row["epoch"] - self.learned, row["epochs"]
            steps = min(self.run.steps, epochs * self.run.steps_per_epoch)
            share = ZERO_SHARE if self.chance(row) == 0 else STALLED_SHARE
            if epochs > share * of and steps >= STALLED_STEPS:
                self.note = (
                    f"nothing is learned in {epochs} of {of} epochs: {reason}; {self.advice()}"
                )
        if not self.note or self.is_said or row["epoch"] == row["epochs"]:
            return ""
        self.is_said = True
        return self.note

    def why_stalled(self, row: Mapping[str, Any]) -> str | None:
        """How the epoch is no better than a guess; "" if it is better, None if unknown.

        The losses decide if they are below or near a guess's loss, and otherwise the validation
        score: a loss far above a guess's may come from a network that is too sure of its errors.
        """
        metric, loss = self.run.metric, self.chance_loss()
        if loss:
            ratio, val_ratio = row["loss"] / loss, row.get("val/loss", math.inf) / loss
            if ratio < LEARNED or val_ratio < VAL_LEARNED:
                return ""
            if ratio < FAR:
                return (
                    f"the loss is {row['loss']:.3f}, and {loss:.3f} without looking at the images"
                )
        value, chance = row.get(f"val/{metric.name}"), self.chance(row)
        if value is None or chance is None:
            return None
        noise = 3 * math.sqrt(chance * max(0.0, 100 - chance) / max(1, len(self.run.data.val)))
        if value > chance + max(noise, NEAR_SCORE):
            return ""
        return f"{metric.text(value)}, and {chance:.2f} without looking at the images"

    def chance_loss(self) -> float | None:
        """The loss of a guess; None for other losses or changed frequencies of classes."""
        recipe = self.run.resolved
        others = recipe.teacher or recipe.unlabelled or recipe.balanced_sampling or recipe.per_class
        return None if others else self.run.task.chance_loss()

    def chance(self, row: Mapping[str, Any]) -> float | None:
        """The score of a guess on the validation split; None if unknown."""
        scores, targets = run_folder.val_scores(row), self.run.data.val.targets
        return self.run.task.chance_score(self.run.metric, scores, targets)

    def advice(self) -> str:
        recipe, task = self.run.recipe, self.run.task
        weights = "" if self.run.config.weights else ", pretrained weights (--weights)"
        size = f", a --resolution above {self.run.pre.resolution}" if task.has_places else ""
        return (
            f"try another rate, such as --lr {recipe.lr / 10:.2g} or {recipe.lr * 3:.2g}{weights}"
            f"{size}, and compare the labels with the pictures"
        )


def train_network(
    data: str | Path | DataSet,
    model: str,
    out: str | Path,
    *,
    recipe: str | Recipe = "",
    options: RunOptions = HERE,
    minutes: float | None = None,
    on_epoch: Callable[[Mapping[str, Any]], object] = lambda row: None,
    **changes: Any,
) -> Bundle:
    """Train a network like the command `train`, in this process, and return its bundle.

    After a stop, the same call resumes from the last checkpoint. The generator `train.run.train`
    yields each epoch's row of the log.

    Args:
        data: A folder with one subfolder of images per class, or another source for `open_data`; or
            a `DataSet`, such as `open_data(folder, SplitRule(val=0.2))`.
        model: A name in `zoo.list()`, or timm/NAME.
        out: The run folder, for log, checkpoint, best weights and the bundle.
        recipe: A recipe, or a name, run, bundle or JSON file with a recipe; by default digits for
            the digits, else finetune with weights and scratch without, whose numbers follow the
            number of images.
        options: Initial weights, task and device; by default random weights, the task recognised
            from the data, and cuda if available. `workers` None is 0 if processes do not start as
            forks, since they would run an unguarded script again.
        minutes: Time limit in minutes; training has as many epochs as fit.
        on_epoch: Called with each epoch's row of the log, such as `print`.
        **changes: Fields of the recipe, such as `epochs=3`. The learning rate follows `batch_size`
            unless `lr` is given too.

    Raises ValueError in one line for wrong names or data, and if `out` has another run.

    Examples:
        >>> import fullstride
        >>> bundle = fullstride.train_network("digits", "genet_tiny", "runs/few", steps=2)
        >>> sorted(bundle.scores)
        ['test', 'val']
    """
    choice, deadline, out = RecipeChoice(recipe, changes), deadline_s(None, minutes), Path(out)
    if not isinstance(data, DataSet):
        task = task_for(str(data), options, changes)
        data, options = task.open_data(str(data)), replace(options, task=task.name)
    options = replace(options, task=options.task or DEFAULTS.task)
    starts_fresh = (get_start_method(allow_none=True) or get_all_start_methods()[0]) != "fork"
    workers = 0 if options.workers is None and starts_fresh else options.workers
    options = replace(options, workers=workers, device=str(choose_device(options.device)))
    named = recipe_within(choice, deadline, out, model, data, options)
    runs: list[PreparedRun] = []  # none for a run that has ended
    watch = None
    for row in train(out, model, data, named, options, announce=runs.append):
        on_epoch(row)
        watch = watch or (StallWatch(runs[0]) if runs else None)
        if watch and (note := watch.update(row)):
            print_error(f"{out}: {note}")
    if watch and watch.note:
        print_error(f"{out}: {watch.note}")
    return Bundle.load(out / run_folder.BUNDLE, build_head)
