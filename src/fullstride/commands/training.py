"""How are networks trained? Commands that pack images, train, evaluate and time the data path."""

from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from fullstride.commands.flags import Data, Device, Loading, Run
from fullstride.io.console import Bar, console, printable, report_ignored, report_skipped
from fullstride.nets.preprocessing import BY_DEFAULT, WeightsKind
from fullstride.train.recipes.choice import RecipeChoice


def pack(
    data: Data,
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    long_side: int | None = None,
    quality: int = 90,
    shard_mib: int = 256,
    group: str = "",
    keep_duplicates: bool = False,
    task: str = "classify",
) -> None:
    """Write a data set as tar shards: a few large files in place of many small ones.

    Example: fullstride data pack photos shards

    The splits stay as they are. Image files are copied unless --long-side is given.

    Args:
        data: A folder with one subfolder of images per class, a CSV table, tar shards, a Hugging
            Face dataset, or digits.
        out: The new folder, on which one can train as on any other.
        long_side: Store upright JPEGs whose longer side has at most so many pixels; 400 suits
            training at 224.
        quality: Of these JPEGs, 1 to 100.
        shard_mib: Size of a shard.
        group: As for `train`: the shards keep the splits of these groups.
        keep_duplicates: As for `train`.
        task: What the images are for: with multilabel the shards have all labels of an image.
    """
    from fullstride.data.dataset import SplitRule
    from fullstride.data.pack import Encoding, pack
    from fullstride.tasks import find_task

    images = find_task(task).open_data(
        data, SplitRule(group=group, keep_duplicates=keep_duplicates)
    )
    done, shards = None, 0
    report_ignored(images.ignored, images.notes)
    for done in pack(images, out, Encoding(long_side, quality), shard_mib=shard_mib):
        if done.shards > shards:
            print(f"{done.images:,} images in {done.shards:,} shards", flush=True)
            shards = done.shards
    assert done
    report_skipped(done.skipped)
    before, after = done.bytes_in / 2**20, done.bytes_out / 2**20
    print(f"{before:,.1f} MiB of images became {after:,.1f} MiB in {out}")


def train(
    data: Data,
    model: str,
    out: Path,
    recipe: RecipeChoice,
    weights: str = "",
    weights_kind: WeightsKind = "averaged",
    width: float = 1.0,
    depth: float = 1.0,
    device: Device = "auto",
    workers: int | None = None,
    hours: float | None = None,
    minutes: float | None = None,
    checkpoint_every_steps: int = 0,
    val: float | None = None,
    test: float | None = None,
    group: str = "",
    keep_duplicates: bool = False,
    teacher_cache: Path | None = None,
    tensorboard: bool = False,
    task: str = "classify",
    ddp_timeout_s: float = 50,
) -> None:
    """Train a network and leave a run folder: log, checkpoint, best weights and a bundle.

    Example: fullstride train digits --model genet_tiny --out runs/digits

    After a stop, the same command resumes from the last checkpoint, to the same weights. On
    several GPUs: `torchrun --nproc-per-node N -m fullstride train ...`, with the same flags.
    `--recipe.FIELD` changes a field of the recipe, and `--recipe.help` explains all fields.

    Args:
        data: A folder with one subfolder of images per class, a CSV table, tar shards, a Hugging
            Face dataset, or digits.
        model: A name that `fullstride zoo` lists, or timm/NAME.
        out: The run folder.
        recipe: How to train.
        weights: Initial weights: a run, a bundle, a file of released weights, or hub. By default
            they are random.
        weights_kind: Which weights of a checkpoint that has both.
        width: Multiplier of the network's widths, which are rounded to multiples of 8.
        depth: Multiplier of the numbers of blocks in its stages.
        device: Where to train.
        workers: Processes that decode images beside this one; 0 decodes in this one, None chooses
            by the cores, the images and the device.
        hours: Hours that the whole may take: training has as many epochs as fit, at most those of
            the recipe, and its schedule is made for them.
        minutes: As --hours; the two add up.
        checkpoint_every_steps: Steps from one checkpoint to the next within an epoch; 0 writes one
            after each epoch that is scored only.
        val: Share of the training images for validation, where the data have none; by default it
            depends on their number. 0: no validation, not even val/; the last epoch is saved.
        test: Share of the images for the test, where the data have none; by default a tenth. 0: no
            test, not even test/; its images are for training.
        group: What images have in common that must be in one split, such as a patient: a column of
            a table, a level of folders below the class (1, 2, ... or parent), or a pattern such as
            '(patient[0-9]+)' for the names.
        keep_duplicates: Allow the same image in several splits; by default copies are in one.
        teacher_cache: A folder for the outputs of the recipe's teacher, for this run and others on
            the same views.
        tensorboard: Write a log for TensorBoard too, in the run folder.
        task: What the network is trained for.
        ddp_timeout_s: Seconds after which a process fails that waits for another one.
    """
    from fullstride.data.dataset import SplitRule
    from fullstride.measure.budget import deadline_s
    from fullstride.measure.environment import choose_device
    from fullstride.report.training_progress import TrainingProgress
    from fullstride.tasks import find_task
    from fullstride.train import run
    from fullstride.train.compute import init_distributed
    from fullstride.train.run_folder import open_board
    from fullstride.train.timing import recipe_within

    board = open_board(out / "tensorboard") if tensorboard else None
    kind = find_task(task)
    deadline = deadline_s(hours, minutes)
    settings: dict[str, Any] = dict(weights=weights, workers=workers, teacher_cache=teacher_cache)
    settings |= dict(task=kind, weights_kind=weights_kind, width=width, depth=depth)
    images = kind.open_data(data, SplitRule(val, test, group, keep_duplicates))
    report_ignored(images.ignored, images.notes)
    with (
        init_distributed(choose_device(device), ddp_timeout_s) as (context, place),
        Bar(shown=context.is_rank_zero) as bar,
    ):
        settings |= dict(device=place, context=context)
        named = recipe_within(recipe, deadline, out, model, images, **settings)
        progress = TrainingProgress(bar, kind.find_metric(named.recipe.score))
        settings |= dict(announce=progress.announce, watch=progress.watch)
        settings |= dict(checkpoint_every_steps=checkpoint_every_steps)
        for row in run.train(out, model, images, named, **settings):
            progress.print(row)
            if board and context.is_rank_zero:
                board(row)
        progress.end(out, images, named.recipe)


def validate(
    run: Run,
    data: str = "",
    split: Literal["test", "val", "train", "all"] | None = None,
    device: Device = "auto",
    per_class: bool = False,
    tta: Literal["none", "flip"] = "none",
    views: str = "",
    clip_starts: Literal["inclusive", "slowfast"] = "inclusive",
    out: Path | None = None,
    loading: Loading = BY_DEFAULT,
) -> None:
    """Evaluate a trained network on images that it was not trained on.

    Example: fullstride validate runs/digits

    Args:
        run: A run, a bundle, a file of weights, or a name with released weights.
        data: A folder of images, a table, shards or digits; by default the run's own.
        split: Which split of the images; by default the test, or the validation split of data
            without one. Of data that are not the run's and have no splits of their own, all images.
        device: Where to compute.
        per_class: Print the precision, recall and F1 of each class too, where the task has classes.
        tta: With flip, score the mean of the probabilities of an image and of its mirror image.
        views: Of a video, CLIPSxCROPS: score the mean of the probabilities of so many clips all
            over it, and 3 crops of each from side to side, or 1. 10x3 is the 30-view protocol;
            --resolution 256 --crop 1 make its crops as large as the shorter side.
        clip_starts: Where the clips of --views begin: inclusive, evenly up to the last possible
            start (TensorFlow's code), or slowfast, which does not reach it (PySlowFast's).
        out: A JSON file for all scores, those of each class and the confusion matrix.
    """
    from fullstride import tasks
    from fullstride.deploy.predict import check_tta
    from fullstride.io.writing import check_output
    from fullstride.measure.environment import choose_device
    from fullstride.report.console_lines import validation_lines
    from fullstride.report.console_tables import class_table
    from fullstride.tasks.video import views_of
    from fullstride.train.scoring import SCORES, images_to_score, save_scores, score_bundle

    check_output(out, SCORES)
    bundle, place = tasks.load(run, options=loading), choose_device(device)
    on = images_to_score(run, bundle, data, split)
    report_ignored(on.data.ignored, on.notes)
    if tta == "flip":
        check_tta(bundle, on.data)
    several = views_of(views, bundle.preprocessing, clip_starts) if views else None
    result = score_bundle(bundle, on.images, place, mirrored=tta == "flip", views=several)
    report_skipped(result.skipped)
    metrics = tasks.find_task(bundle.task).metrics(tasks.common_metric([bundle]))
    for line in validation_lines(on.split, result, metrics, bundle.classes, on.missing):
        print(printable(line))
    if per_class and (rows := result.by_class(bundle.classes)):
        console().print(class_table(rows))
    if out:
        save_scores(out, bundle.name, on.data.name, bundle.classes, {on.split: result})


def bench_data(
    data: Data,
    model: str,
    recipe: RecipeChoice,
    workers: int | None = None,
    seconds: float = 5,
    device: Device = "auto",
    out: Path | None = None,
) -> None:
    """Measure whether the GPU will wait for images: the data path and training steps, each alone.

    Example: fullstride data bench photos --model genet_light

    Args:
        data: The same as for `train`: a folder of images, a table, shards or digits.
        model: A name that `fullstride zoo` lists, or timm/NAME.
        recipe: How to train; as for `train`.
        workers: Processes that decode images beside this one; 0 decodes in this one, None chooses
            by the cores, the images and the device.
        seconds: About how long each of the measurements takes.
        device: Where to train.
        out: A JSON file for all samples, the recipe and the environment.
    """
    from fullstride.data.dataset import open_data
    from fullstride.io.writing import check_output
    from fullstride.measure.environment import Environment, choose_device
    from fullstride.report.console_lines import data_bench_lines
    from fullstride.report.console_tables import data_bench_table
    from fullstride.train import timing
    from fullstride.train.compute import on_device
    from fullstride.train.recipes.choice import case_of

    check_output(out, timing.DATA_BENCH)
    images, place = open_data(data), choose_device(device)
    report_ignored(images.ignored)
    numbers = on_device(recipe.resolve(case_of(images)).recipe, place)
    settings: dict[str, Any] = dict(workers=workers, device=place, seconds=seconds)
    bench = timing.bench_data(model, images, numbers, **settings)
    console().print(data_bench_table(bench))
    environment = Environment.here(place)
    suggestions = bench.suggestions(numbers, from_files=images.train.file is not None)
    print(*data_bench_lines(bench, numbers, suggestions, environment), sep="\n")
    report_skipped(bench.loading.skipped)
    if out:
        timing.save_data_bench(out, bench, model, images, numbers, environment)
