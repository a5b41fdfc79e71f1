"""Trains a run from data and the name of a network to a bundle, and resumes it after a stop."""

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods, get_start_method
from pathlib import Path
from typing import Any

from fullstride.data.dataset import DataSet
from fullstride.data.recognise import recognise
from fullstride.io.console import print_error, print_note
from fullstride.measure.budget import deadline_s
from fullstride.measure.environment import choose_device
from fullstride.nets import fused_form
from fullstride.nets.bundle import Bundle
from fullstride.tasks import build_head, find_task
from fullstride.tasks.task import Task
from fullstride.train import final_weights, loop, run_folder
from fullstride.train.batches import TrainingBatches
from fullstride.train.compute import SINGLE_PROCESS, DistributedContext
from fullstride.train.prepare import PreparedRun, prepare
from fullstride.train.recipes.choice import DEFAULTS, HERE, NamedRecipe, RecipeChoice, RunOptions
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import FinalNetwork, all_skipped, save_scores
from fullstride.train.timing import recipe_within


def finish(run: PreparedRun) -> None:
    """Score the final weights on validation and test images, and save them as the bundle.

    Scores that the log has are not computed again. The state of the task, such as a temperature, is
    fitted on the validation split before. Raises FloatingPointError if the final scores are not
    finite.
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
        if len(run.data.test):  # data with a validation split of their own may have none
            results["test"] = run.score(final.net, run.data.test, task).with_interval()
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
    """The average of the last epoch, or that of the best one if the recipe stops early.

    It has the scores of the log. In a run that has not ended the last epoch may have none.
    """
    last = run_folder.load_checkpoint(run.folder)
    assert last is not None
    rows = run_folder.read_log(run.folder, run.metric, last["epochs"])
    if run.recipe.early_stop_patience and (best := run_folder.best_row(rows, run.metric)):
        path = run.folder / run_folder.BEST
        if not path.is_dir():
            raise ValueError(f"{path}, the best epoch's weights, is gone: train with another --out")
        net = fused_form.unpadded(run.net, run.spec)
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
    announce: Callable[[PreparedRun], None] = lambda run: None,
    watch: Callable[[TrainingBatches], loop.BatchSource] = lambda batches: batches,
) -> Generator[dict[str, Any], None, None]:
    """Train `model` on `data` in `folder`; yields the row of each epoch, also of earlier ones.

    `data` is from `open_data` of the task. After a stop, the same call resumes from the last
    checkpoint; these are written after every epoch that is scored, and where this generator is
    closed after an epoch. The weights of the epoch with the best validation score are saved as a
    bundle in the folder; with the recipe's `early_stop_patience` these are scored on the test
    images at the end, else the last ones. `announce` is called before the first step of a run that
    has not ended; `watch` may wrap the training batches, to show progress.

    Raises ValueError if the folder holds another run, and LockedError if another process trains in
    it.
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
    """The task of the options, or else the one that `data` are for, which is said in a line.

    It has the options of the task among `changes` of the recipe. Raises ValueError in one line.
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
    announce: Callable[[PreparedRun], None],
    watch: Callable[[TrainingBatches], loop.BatchSource],
) -> Iterator[dict[str, Any]]:
    """The rows of a run whose folder is locked; it goes on from its last checkpoint."""
    resume = run_folder.load_checkpoint(run.folder)
    rows = run_folder.read_log(run.folder, run.metric, resume["epochs"] if resume else 0)
    has_ended = (run.folder / run_folder.BUNDLE).is_dir()
    if not has_ended:
        announce(replace(run, start=(resume["epochs"], resume["index"])) if resume else run)
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
        epochs = loop.train_epochs(
            run.net,
            run.task,
            watch(run.batches),
            run.resolved,
            resume,
            teacher=run.teacher,
            checkpoint_every_steps=checkpoint_every_steps,
            context=run.context,
        )
        yield from saved_epochs(run, epochs, rows)
    finish(run)


def saved_epochs(
    run: PreparedRun, epochs: Iterator[loop.Checkpoint], rows: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Score and save each of `epochs`; yields its row of the log, which is added to `rows`.

    Of epochs that share a score, the last one is scored and saved. Where the caller closes this
    generator after another one, that is saved too. Without a validation split there are no scores,
    and no best epoch is saved.
    """
    for epoch in epochs:
        if not isinstance(epoch, loop.Epoch):
            run.context.on_rank_zero(run_folder.save_epoch, run.folder, rows, epoch.state)
            continue
        rows.append(unscored_row(run, epoch, rows))
        number, last = rows[-1]["epoch"], rows[-1]["epochs"]
        is_due = number % run.resolved.score_every_epochs == 0 or number == last
        if is_due:
            if run.data.val:
                score_epoch(run, epoch, rows)
            run.context.on_rank_zero(run_folder.save_epoch, run.folder, rows, epoch.state)
        try:
            yield rows[-1]
        except GeneratorExit:
            if not is_due and not run.context.is_distributed:  # others may not be closed now
                run_folder.save_epoch(run.folder, rows, epoch.state)
            raise
        if run_folder.should_stop_early(rows, run.recipe, run.metric):
            return


def unscored_row(run: PreparedRun, epoch: loop.Epoch, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the log that follows `rows`, without scores."""
    row = {
        "epoch": epoch.number + 1,
        "epochs": math.ceil(run.resolved.epochs),
        "loss": epoch.loss,
        "lr": epoch.lr,
        "images_per_s": epoch.images_per_s,
        "data_wait_fraction": epoch.data_wait_fraction,
    }
    return {**row, "skipped": not_logged(all_skipped(run.batches.skipped, run.context), rows)}


def not_logged(skipped: Mapping[str, str], rows: list[dict[str, Any]]) -> dict[str, str]:
    """Those of the unreadable images that no row has."""
    logged = {name for row in rows for name in row["skipped"]}
    return {name: why for name, why in skipped.items() if name not in logged}


def score_epoch(run: PreparedRun, epoch: loop.Epoch, rows: list[dict[str, Any]]) -> None:
    """Add the scores of an epoch to its row, the last one, and save it if it is the best so far.

    Running statistics may be far off at the start of training, so that outputs are not finite. The
    row then says so, and training goes on.
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


# Shares of a training, and steps, after which it says that it has learned nothing. A score of 0 is
# said earlier: detectors that learn leave it within a tenth of the training (docs/log.md).
STALLED_SHARE, ZERO_SHARE, STALLED_STEPS = 1 / 3, 1 / 10, 10
# Losses / that of a guess between which nothing is learned, a loss of the validation split / it
# below which something is, and points of a score by which it is better: our own numbers.
LEARNED, FAR, VAL_LEARNED, NEAR_SCORE = 0.98, 1.1, 0.95, 0.05


@dataclass
class StallWatch:
    """Whether the last epochs of a run were no better than predictions without the images."""

    run: PreparedRun
    learned: int = 0  # the last epoch that was better
    note: str = ""  # what to say at the end; "" where the last epochs were better
    is_said: bool = False

    def update(self, row: Mapping[str, Any]) -> str:
        """What to say while training goes on, once, after the row of the next epoch; else ""."""
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
        """How the epoch is no better than a guess; "" if it is better, None if that is unknown.

        By a loss near that of a guess, where this is known. Else by the score of the validation
        split: a loss far above it may be that of a network which is too sure of its errors.
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
        """The loss of a guess; None where other losses or other shares of classes are learned."""
        recipe = self.run.resolved
        others = recipe.teacher or recipe.unlabelled or recipe.balanced_sampling or recipe.per_class
        return None if others else self.run.task.chance_loss()

    def chance(self, row: Mapping[str, Any]) -> float | None:
        """The score of a guess on the validation split; None where it is not known."""
        return self.run.task.chance_score(self.run.metric, run_folder.val_scores(row))

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
    """Train a network as the command `train` does, in this process, and return its bundle.

    After a stop, the same call resumes from the last checkpoint. `train.run.train` is the
    generator behind it, which yields the row of each epoch.

    Args:
        data: A folder with one subfolder of images per class, or what else `open_data` opens; or a
            `DataSet` of it, such as `open_data(folder, SplitRule(val=0.2))`.
        model: A name that `zoo.list()` has, or timm/NAME.
        out: The run folder, for log, checkpoint, best weights and the bundle.
        recipe: A recipe, or the name, run, bundle or JSON file of one; by default digits for the
            digits, else finetune with weights and scratch without, whose numbers follow the
            number of images.
        options: Initial weights, task and device; by default random weights, the task that files of
            the data are for, and cuda where there is one. `workers` None is 0 where a process does
            not begin as a fork, as it would run an unguarded script again.
        minutes: Minutes that the whole may take: training has as many epochs as fit.
        on_epoch: Called with the row of each epoch, such as `print`.
        **changes: Fields of the recipe, such as `epochs=3`. The learning rate follows `batch_size`
            unless `lr` is given too.

    Raises ValueError in one line for names or data that do not fit, and if `out` has another run.

    Examples:
        >>> import fullstride
        >>> bundle = fullstride.train_network("digits", "genet_tiny", "runs/few", steps=2)
        >>> sorted(bundle.scores)
        ['test', 'val']
    """
    deadline = deadline_s(None, minutes)
    out = Path(out)
    if not isinstance(data, DataSet):
        task = task_for(str(data), options, changes)
        data, options = task.open_data(str(data)), replace(options, task=task.name)
    options = replace(options, task=options.task or DEFAULTS.task)
    starts_fresh = (get_start_method(allow_none=True) or get_all_start_methods()[0]) != "fork"
    workers = 0 if options.workers is None and starts_fresh else options.workers
    options = replace(options, workers=workers, device=str(choose_device(options.device)))
    named = recipe_within(RecipeChoice(recipe, changes), deadline, out, model, data, options)
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
