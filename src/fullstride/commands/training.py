"""How does one learn? Commands to pack images, train on them, score, and tell whether a GPU will wait."""

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from fullstride.commands.flags import Device
from fullstride.console import Bar, console, report_skipped
from fullstride.train.recipe import Recipe


def pack(
    data: Positional[str],
    out: Positional[Path],
    long_side: int | None = None,
    quality: int = 90,
    shard_mib: int = 256,
) -> None:
    """Write a data set as tar shards: a few large files in place of many small ones.

    The parts stay as they are. Pictures go in as the files that they are unless --long-side is given.

    Args:
        data: A folder with one subfolder of images per class, a table, .tar shards, a Hugging Face dataset, or digits.
        out: The new folder; train on it as on any other.
        long_side: Store upright JPEGs whose longer side has at most so many pixels; 400 suits training at 224.
        quality: Of these JPEGs, 1 to 100.
        shard_mib: How large a shard is.
    """
    from fullstride.data import pack as packing
    from fullstride.data.dataset import open_data

    done, told = None, 0
    for done in packing.pack(
        open_data(data), out, packing.Encoding(long_side, quality), shard_mib=shard_mib
    ):
        if done.shards > told:
            print(f"{done.images:,} images in {done.shards:,} shards", flush=True)
            told = done.shards
    assert done
    report_skipped(done.skipped)
    print(
        f"{done.bytes_in / 2**20:,.1f} MiB of images became {done.bytes_out / 2**20:,.1f} MiB in {out}"
    )


def train(
    data: Positional[str],
    model: str,
    out: Path,
    recipe: Recipe,
    weights: str = "",
    device: Device = "auto",
    workers: int = 0,
    mark_every: int = 0,
    minival: float | None = None,
    teacher_cache: Path | None = None,
    tensorboard: bool = False,
    task: str = "classify",
) -> None:
    """Train a network on images and leave a run folder: log, checkpoint, best weights, and at the end a bundle.

    Stopped at any time, the same command goes on from the last checkpoint. On several GPUs:
    `torchrun --nproc-per-node N -m fullstride train ...`, no other flag. `--recipe NAME` chooses a named recipe
    (digits for the digits, else finetune) or that of an earlier run, bundle or JSON file, `--recipe.FIELD` changes a
    field of it, `--recipe.help` shows them all.

    Args:
        data: A folder with one subfolder of images per class, a table, .tar shards, a Hugging Face dataset, or digits.
        model: A name that `fullstride zoo` lists, or timm/NAME.
        out: The run folder.
        recipe: How to train.
        weights: Where to begin: a run, a bundle, a file of released weights, or hub. Fresh weights if not given.
        device: Where to train.
        workers: Processes that decode images beside this one; 0 decodes in this one.
        mark_every: Steps from one checkpoint to the next within an epoch; 0 writes one after each epoch only.
        minival: Share of the training images to choose by, where the data have none; by their number if not given.
        teacher_cache: A folder for the answers of the recipe's teacher, for this run and others on the same views.
        tensorboard: Write what the log says for TensorBoard too, in the run folder.
        task: What the network is trained for.
    """
    from fullstride.measure.environment import choose_device
    from fullstride.storage import read_json
    from fullstride.tasks import find_task
    from fullstride.train import run, run_folder
    from fullstride.train.distributed import init_distributed
    from fullstride.train.tensorboard import open_board

    board = open_board(out / "tensorboard") if tensorboard else None
    kind = find_task(task)
    images = kind.open_data(data, minival=minival)
    skipped: dict[str, str] = {}
    with (
        init_distributed(choose_device(device)) as (context, place),
        Bar(shown=context.is_rank_zero) as bar,
    ):
        rows = run.train(
            out,
            model,
            images,
            recipe,
            task=kind,
            weights=weights,
            device=place,
            workers=workers,
            checkpoint_every_steps=mark_every,
            teacher_cache=teacher_cache,
            context=context,
            watch=bar.watch,
        )
        told = []
        for row in rows:
            told.append(row)
            skipped |= row["skipped"]
            bar.say(
                f"epoch {row['epoch']:>3}/{row['epochs']}  loss {row['loss']:.4f}  "
                f"minival {kind.metric.text(row[f'minival/{kind.metric.name}'])}  "
                f"{row['images_per_s']:,.0f} images/s, "
                f"{row['data_share']:.0%} of the time waiting for them"
            )
            if board and context.is_rank_zero:
                board(row)
        if run_folder.should_stop_early(told, recipe, kind.metric):
            bar.say(
                f"no better minival in {recipe.early_stop_patience} epochs: stopped, and the best weights are taken"
            )
    if not context.is_rank_zero:
        return
    bundle = out / run_folder.BUNDLE
    scores = read_json(bundle / "bundle.json")["scores"]["test"]
    report_skipped(skipped | scores.get("skipped", {}))
    print(
        f"test {kind.metric.text(scores[kind.metric.name])} on {scores['images']} images; "
        f"bundle in {bundle}"
    )


def validate(
    run: Positional[str],
    data: str = "",
    split: Literal["test", "minival", "train"] = "test",
    device: Device = "auto",
) -> None:
    """Score a trained network on images that it was not trained on.

    Args:
        run: A run, a bundle, a file of weights, or a name with released weights.
        data: A folder of images, a table, shards or digits; the run's own where not given.
        split: Which part of the images.
        device: Where to compute.
    """
    from fullstride import tasks
    from fullstride.measure.environment import choose_device
    from fullstride.train.scoring import matching_data, score_images

    bundle = tasks.load(run)
    task = tasks.find_task(bundle.task)
    images = getattr(matching_data(run, bundle, data), split)
    place = choose_device(device)
    scores, skipped = score_images(bundle.net.to(place), task, images, bundle.preprocessing, place)
    report_skipped(skipped)
    others = "".join(
        f", {name} {value:.4f}"
        for name, value in scores.items()
        if name not in (task.metric.name, "images")
    )
    print(
        f"{split} {task.metric.text(scores[task.metric.name])}{others}, "
        f"on {scores['images']} images"
    )


def bench_data(
    data: Positional[str],
    model: str,
    recipe: Recipe,
    workers: int = 0,
    seconds: float = 5,
    device: Device = "auto",
    out: Path | None = None,
) -> None:
    """Tell whether the GPU will wait for images: the data path and the training steps, each measured alone.

    Args:
        data: What `train` takes: a folder of images, a table, shards or digits.
        model: A name that `fullstride zoo` lists, or timm/NAME.
        recipe: How to train; as for `train`.
        workers: Processes that decode images beside this one; 0 decodes in this one.
        seconds: About how long each of the measurements takes.
        device: Where to train.
        out: A JSON file for all samples, the recipe and the environment.
    """
    from rich.table import Table

    from fullstride.data.dataset import open_data
    from fullstride.measure.environment import Environment, choose_device
    from fullstride.measure.timing import spread
    from fullstride.storage import atomic_write
    from fullstride.train import data_bench as feeding

    images, place = open_data(data), choose_device(device)
    found = feeding.balance(model, images, recipe, workers=workers, device=place, seconds=seconds)
    feed, steps = found.feed, found.steps
    rows = [
        ("decoding in one process", feed.images_per_s_alone, feed.samples_alone),
        ("the same, per CPU-second", feed.images_per_cpu_s, feed.samples_cpu),
        (
            f"training steps of {steps.batch} at {found.resolution} pixels",
            steps.images_per_s,
            steps.samples,
        ),
    ]
    if workers:
        rows.insert(2, (f"decoding with --workers {workers}", feed.images_per_s, feed.samples))
    table = Table("", "images/s", "spread", box=None, header_style="bold")
    for name, rate, samples in rows:
        table.add_row(name, f"{rate:,.1f}", f"{spread(samples):.2f}")
    console().print(table)
    here = Environment.here(place)
    print(
        f"{recipe.decoder}, {recipe.precision}, {here.device}, {found.cores} cores, torch {here.torch}"
    )
    if recipe.teacher:
        print(f"without the teacher {recipe.teacher}: with it the network eats less")
    if place.type == "cpu":
        print("on a CPU decoding and training share the cores: together each is slower than alone")
    levers = found.levers(recipe, from_files=images.train.file is not None)
    print(found.verdict())
    for lever in levers:
        print(f"  {lever}")
    report_skipped(feed.skipped)
    if out:
        asked = {
            "model": model,
            "data": images.where,
            "fingerprint": images.fingerprint,
            "recipe": asdict(recipe),
        }
        said = {"verdict": found.verdict(), "waiting": found.waiting, "levers": levers}
        with atomic_write(out) as beside:
            beside.write_text(
                dumps({**asked, **asdict(found), **said, "environment": asdict(here)}, indent=1)
            )
