"""Holds the commands that pack images, train, evaluate, and time the data path."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from fullstride.commands.flags import Data, Device, JpegFlags, OpenFlags, Run, SplitFlags
from fullstride.deploy.settings import Tta
from fullstride.io.console import Bar, count_of, print_parts, report_ignored, report_skipped
from fullstride.train.recipes.choice import HERE, RecipeChoice, RunOptions


def pack(
    data: Data,
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    jpegs: JpegFlags,
    shard_mib: int = 256,
    group: str = "",
    keep_duplicates: bool = False,
    task: str = "",
) -> None:
    """Write a data set as tar shards: a few large files instead of many small files.

    Example: fullstride data pack photos shards

    The splits are kept. Image files are copied unless --long-side is given.

    Args:
        data: A folder with one subfolder of images per class, a CSV table, tar shards, a Hugging
            Face dataset, or digits.
        out: The new folder, which is a data set for all commands.
        shard_mib: Size of a shard.
        group: As for `train`: the shards keep the splits of these groups.
        keep_duplicates: As for `train`.
        task: The task of the images, by default recognised from the files of the data: with
            multilabel the shards have all labels of an image.
    """
    from fullstride.data.pack import Encoding, pack
    from fullstride.train.run import task_for

    splits = SplitFlags(group=group, keep_duplicates=keep_duplicates)
    images = splits.open(data, task_for(data, RunOptions(task=task), {}))
    encoding = Encoding(jpegs.long_side, jpegs.quality, jpegs.background)
    done, shards = None, 0
    for done in pack(images, out, encoding, shard_mib=shard_mib):
        if done.shards > shards:
            done_so_far = count_of(done.images, "image"), count_of(done.shards, "shard")
            print(" in ".join(done_so_far), flush=True)
            shards = done.shards
    assert done
    report_skipped(done.skipped)
    before, after = done.bytes_in / 2**20, done.bytes_out / 2**20
    print(f"{before:,.1f} MiB of images became {after:,.1f} MiB in {out}")


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """The time limits and extra logs of a run."""

    # Time limit of the whole run in hours: training has as many epochs as fit, at most the
    # recipe's, with a schedule of that length, which ends earlier if the machine becomes slower.
    hours: float | None = None
    # Time limit in minutes, added to --hours.
    minutes: float | None = None
    # Also write a log for TensorBoard, in the run folder.
    tensorboard: bool = False
    # Seconds after which a process that waits for another one fails.
    ddp_timeout_s: float = 50


def train(
    data: Data,
    model: str,
    out: Path,
    recipe: RecipeChoice,
    *,
    options: RunOptions = HERE,
    splits: SplitFlags,
    flags: TrainFlags,
) -> None:
    """Train a network and write a run folder: log, checkpoint, best weights and a bundle.

    Example: fullstride train digits --model genet_tiny --out runs/digits

    After a stop, the same command resumes from the last checkpoint, to the same weights. On
    several GPUs: `torchrun --nproc-per-node N -m fullstride train ...`, with the same flags.
    `--recipe.FIELD` changes a field of the recipe, and `--recipe.help` explains all fields.

    Args:
        data: A folder with one subfolder of images per class, a CSV table, tar shards, a Hugging
            Face dataset, or digits.
        model: A name listed by `fullstride zoo`, or timm/NAME.
        out: The run folder.
    """
    from fullstride.measure.budget import deadline_s
    from fullstride.measure.environment import choose_device
    from fullstride.report.training_progress import TrainingProgress
    from fullstride.train import compute, run, run_folder, timing

    board = run_folder.open_board(out / "tensorboard") if flags.tensorboard else None
    deadline = deadline_s(flags.hours, flags.minutes)
    task = run.task_for(data, options, recipe.changes)
    images, options = splits.open(data, task), replace(options, task=task.name)
    device = choose_device(options.device)
    with (
        compute.init_distributed(device, flags.ddp_timeout_s) as (context, place),
        Bar(shown=context.is_rank_zero) as bar,
    ):
        options = replace(options, device=str(place))
        named = timing.recipe_within(recipe, deadline, out, model, images, options, context)
        progress = TrainingProgress(bar, task.find_metric(named.recipe.score))
        hooks = progress.announce, progress.watch
        for row in run.train(out, model, images, named, options, context, *hooks):
            progress.print(row)
            if board and context.is_rank_zero:
                board(row)
        progress.end(out, images, named.recipe)


@dataclass(frozen=True, kw_only=True)
class ViewFlags:
    """The views of an image or a video whose mean probabilities are scored."""

    # With flip, score the mean of the probabilities of an image and its mirror image.
    tta: Tta = "none"
    # For videos, CLIPSxCROPS: score the mean of the probabilities of so many clips all over the
    # video, with 3 crops of each from side to side, or 1. 10x3 is the 30-view protocol;
    # --resolution 256 --crop 1 make its crops as large as the shorter side.
    views: str = ""
    # Where the clips of --views begin: inclusive, evenly up to the last possible start
    # (TensorFlow's code), or slowfast, which does not reach it (PySlowFast's).
    clip_starts: Literal["inclusive", "slowfast"] = "inclusive"


def validate(
    run: Run,
    *,
    data: str = "",
    split: Literal["test", "val", "train", "all"] | None = None,
    per_class: bool = False,
    views: ViewFlags,
    out: Path | None = None,
    how: OpenFlags,
) -> None:
    """Evaluate a trained network on images that it was not trained on.

    Example: fullstride validate runs/digits

    Args:
        run: A run, a bundle, an exported file, a file of weights, or a name with released weights.
        data: A folder of images, a table, shards or digits; by default the run's own.
        split: The split of the images; by default the test, or the validation split of data without
            a test. Data other than the run's, without own splits, are scored on all images.
        per_class: Also print the precision, recall and F1 of each class, if the task has classes.
        out: A JSON file for all scores, scores by class and the confusion matrix.
    """
    from fullstride.deploy.comparison import evaluate
    from fullstride.deploy.predict import check_tta
    from fullstride.io.writing import check_output
    from fullstride.measure.environment import choose_device
    from fullstride.report.console_lines import validation_lines
    from fullstride.report.console_tables import class_table
    from fullstride.tasks import common_metric
    from fullstride.tasks.video import views_of
    from fullstride.train.scoring import SCORES, images_to_score, save_scores

    check_output(out, SCORES)
    model, place = how.open(run), choose_device(how.device)
    on = images_to_score(run, model, data, split)
    report_ignored(on.data.ignored, on.notes)
    if mirrored := views.tta == "flip":
        check_tta(model, on.data)
    several = views_of(views.views, model.preprocessing, views.clip_starts)
    result = evaluate(model, on.images, place, mirrored, several)
    report_skipped(result.skipped)
    metrics = result.task.metrics(common_metric([model]))
    print_parts(validation_lines(on.split, result, metrics, model.classes, on.missing))
    if per_class and (rows := result.score.by_class(model.classes)):
        print_parts([class_table(rows)])
    if out:
        save_scores(out, model.name, on.data.name, model.classes, {on.split: result})


def bench_data(
    data: Data,
    model: str,
    recipe: RecipeChoice,
    workers: int | None = None,
    seconds: float = 5,
    device: Device = "auto",
    out: Path | None = None,
    task: str = "",
) -> None:
    """Measure whether the GPU will wait for images: times the data path and training steps alone.

    Example: fullstride data bench photos --model genet_light

    Args:
        data: As for `train`: a folder of images, a table, shards or digits.
        model: A name listed by `fullstride zoo`, or timm/NAME.
        workers: Processes that decode images; 0 decodes in the main process, None chooses by the
            cores, the images and the device.
        seconds: Approximate duration of each measurement.
        device: Where to train.
        out: A JSON file for all samples, the recipe and the environment.
        task: The task of the images, by default recognised from the files of the data.
    """
    from fullstride.io.writing import check_output
    from fullstride.measure.environment import Environment, choose_device
    from fullstride.report.console_lines import data_bench_lines
    from fullstride.report.console_tables import data_bench_table
    from fullstride.train import timing
    from fullstride.train.compute import on_device
    from fullstride.train.recipes.choice import case_of
    from fullstride.train.run import task_for

    check_output(out, timing.DATA_BENCH)
    purpose = task_for(data, RunOptions(task=task), recipe.changes)
    images, place = SplitFlags().open(data, purpose), choose_device(device)
    numbers = on_device(recipe.resolve(case_of(images, task=purpose)).recipe, place)
    bench = timing.bench_data(
        model, images, numbers, task=purpose, workers=workers, device=place, seconds=seconds
    )
    print_parts([data_bench_table(bench)])
    environment = Environment.here(place)
    suggestions = bench.suggestions(numbers, from_files=images.train.file is not None)
    print(*data_bench_lines(bench, numbers, suggestions, environment), sep="\n")
    report_skipped(bench.loading.skipped)
    if out:
        timing.save_data_bench(out, bench, model, images, numbers, environment)
