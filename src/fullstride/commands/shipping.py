"""What is a trained network good for? Commands that predict, export and report."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from fullstride.commands.flags import Device
from fullstride.console import Bar, console, report_skipped

if TYPE_CHECKING:
    from torch import nn

    from fullstride.data.dataset import Images
    from fullstride.deploy.comparison import ComparisonImages, LazyImages
    from fullstride.deploy.export import ExportResult, Finetune
    from fullstride.deploy.exported import ExportedModel
    from fullstride.nets.bundle import Bundle

COMPARED = 500  # images that a file's answers are compared on
CALIBRATED = 256  # images that int8 takes its ranges from


def predict(
    run: Positional[str],
    images: Positional[tuple[str, ...]],
    top: int = 3,
    json: bool = False,
    batch: int = 32,
    device: Device = "auto",
    trust: bool = False,
) -> None:
    """Say what is in pictures.

    Args:
        run: A run, a bundle, an exported file of any format, a file of weights, or a name with released weights.
        images: Picture files, folders of them, or - for a list of paths on standard input.
        top: How many classes to name for each.
        json: One line of JSON for each picture.
        batch: Pictures at a time.
        device: Where a run or a bundle computes; an exported file does where its engine is.
        trust: Open files of the formats pt2 and aoti, which are programs, too.
    """
    from fullstride.deploy import predict as predicting
    from fullstride.measure.environment import choose_device

    for flag, value in (("top", top), ("batch", batch)):
        if value < 1:
            raise ValueError(f"--{flag} {value}: use 1 or more")
    paths, skipped = pictures_in(images), {}
    how: dict[str, Any] = dict(top=top, batch=batch, device=choose_device(device))
    for answer in predicting.predict(find_model(run, trust), paths, **how):
        if answer.unreadable:
            skipped[answer.path] = answer.unreadable
        if json:
            print(dumps(asdict(answer)))
        elif answer.guesses:
            told = (
                f"{' '.join(g.label.split())} {100 * g.probability:.1f} %" for g in answer.guesses
            )
            print(f"{answer.path}: {', '.join(told)}")
    report_skipped(skipped)
    if len(skipped) == len(paths):
        raise ValueError("none of the pictures could be read")


def find_model(what: str, trust: bool = False) -> "Bundle | ExportedModel":
    """A bundle or an exported file."""
    from fullstride import tasks
    from fullstride.deploy.formats import is_exported_path, open_file

    if is_exported_path(what):
        return open_file(what, trust=trust)
    return tasks.load(what)


def pictures_in(words: Sequence[str]) -> list[Path]:
    """The files that are named, those in folders, sorted, and for - those on standard input, one a line."""
    from fullstride.data.readers.folder import SUFFIXES

    found = []
    for word in words:
        path = Path(word)
        if word == "-":
            found += [Path(line.rstrip("\n")) for line in sys.stdin if line.strip()]
        elif path.is_dir():
            found += sorted(each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES)
        else:
            found.append(path)
    if not found:
        where = f" in {', '.join(words)}" if words else ""
        raise ValueError(
            f"no pictures{where}: name files or folders of {' '.join(SUFFIXES)} after the run"
        )
    return found


def export(
    runs: Positional[tuple[str, ...]],
    out: Path,
    format: str = "",
    precision: Literal["fp32", "bf16", "fp16", "int8"] | None = None,
    with_preprocessing: bool = False,
    with_resize: bool = False,
    any_size: bool = False,
    backend: Literal["onnx", "openvino", "tensorrt"] = "onnx",
    budget_ms: float | None = None,
    data: str = "",
    calibration: str = "",
    max_drop: float | None = None,
    finetune_epochs: int = 0,
    device: str = "cpu",
    force: bool = False,
) -> None:
    """Write a trained network as a file for other engines, after comparing its answers with PyTorch's.

    Args:
        runs: A run, a bundle or a name with released weights. Of several, the most accurate one is taken.
        out: The file or folder to write.
        format: onnx, openvino, aoti, pt2, tensorrt, triton-server (see docs/shipping.md), or auto: of openvino, onnx,
            aoti and tensorrt, where they run here, the one that answers fastest, and its precision. Where not given,
            onnx for an --out that ends in .onnx, and for a folder openvino, the fastest on CPUs.
        precision: fp32, bf16, fp16 or int8; fp32 where not given, of auto any.
        with_preprocessing: The file takes uint8 pixels (N, H, W, C) of the network's resolution and gives
            probabilities; else normalised float32 (N, C, H, W) and logits.
        with_resize: The file also resizes: pixels of any size in.
        any_size: The sides of images may be any multiples of 32.
        backend: The engine inside triton-server.
        budget_ms: Take only what answers one image within this median time, measured here.
        data: Images to compare on; the run's own minival where not given.
        calibration: Images that int8 takes its ranges from; the run's own training images where not given.
        max_drop: Points of top-1 that the file may lose; by default 0 in fp32, 0.2 in bf16 and fp16, 0.5 in int8.
        finetune_epochs: Where int8 loses more, train the network with int8 simulated before layers go back to float.
        device: Where files of the formats aoti and pt2 compute: cpu or cuda. Other engines choose.
        force: Replace what stands at --out.
    """
    from fullstride import tasks
    from fullstride.deploy.export import check_free, find_format
    from fullstride.deploy.export import export as write
    from fullstride.deploy.select import fastest, most_accurate
    from fullstride.measure.environment import choose_device

    if not runs:
        raise ValueError(
            "nothing to export: name a run, a bundle or a network with released weights"
        )
    if not format:
        format = {"": "openvino", ".onnx": "onnx"}.get(out.suffix, "")
        if not format:
            raise ValueError(f"--out {out} does not say which format: say it by --format")
    auto = format == "auto"
    if not auto:  # before anything that takes time
        check_free(out, force, find_format(format, precision or "fp32").suffix)
    int8 = precision == "int8" or (auto and precision is None)
    for flag, value in (("--calibration", calibration), ("--finetune-epochs", finetune_epochs)):
        if value and not int8:
            raise ValueError(f"{flag} {value} is for --precision int8: leave it out")
    best, bundle, ms = most_accurate(
        {run: tasks.load(run) for run in runs}, None if auto else budget_ms
    )
    if ms is not None:
        print(
            f"{best}: {ms:.3f} ms an image here, the most accurate of {len(runs)} within {budget_ms:g} ms"
        )
    takes = "pictures" if with_resize else "pixels" if with_preprocessing else "normalised"
    how: dict[str, Any] = dict(
        input_kind=takes, any_size=any_size, backend=backend, max_drop=max_drop
    )
    how |= dict(force=force, progress=partial(print, flush=True))
    if device != "cpu":
        how["device"] = str(choose_device(device))
    sample = compared_on(best, bundle, data)
    if int8:
        how["calibration"], how["finetune"] = prepare_int8(
            best, bundle, calibration or data, finetune_epochs
        )
    if auto:
        made = fastest(bundle, out, sample, precision=precision, budget_ms=budget_ms, **how)
    else:
        made = write(bundle, out, sample, format=format, precision=precision or "fp32", **how)
    show_export(made)


def compared_on(where: str, bundle: "Bundle", data: str) -> "ComparisonImages":
    """The minival of the images, at most COMPARED of them, with their classes."""
    from fullstride.deploy.comparison import ComparisonImages
    from fullstride.train.scoring import matching_data

    images = matching_data(where, bundle, data).minival
    found = spread(images, COMPARED)
    if not found:
        raise ValueError("none of the images to compare on could be read: give others by --data")
    return ComparisonImages(found, [images.targets[index] for index in found.indices])


def spread(images: "Images", most: int) -> "LazyImages":
    """At most so many of the images, from all over the set, which may be in the order of its classes."""
    from fullstride.deploy.comparison import LazyImages

    count = min(most, len(images))
    places = [place * len(images) // count for place in range(count)]
    return LazyImages(images, [places[place] for place, _ in images.subset(places).readable()])


def prepare_int8(
    where: str, bundle: "Bundle", data: str, epochs: int
) -> "tuple[LazyImages, Finetune | None]":
    """Training images for the ranges, and what trains the network for int8 if it may."""
    import torch

    from fullstride.deploy.int8 import INT8_FINETUNE, finetune_int8
    from fullstride.deploy.predict import inputs
    from fullstride.tasks import find_task
    from fullstride.train.scoring import matching_data

    if epochs < 0:
        raise ValueError(f"--finetune-epochs {epochs}: use 0 or more")
    found = matching_data(where, bundle, data)
    pictures = spread(found.train, CALIBRATED)
    if not pictures:
        raise ValueError(
            "none of the images for int8's ranges could be read: give others by --calibration"
        )
    if not epochs:
        return pictures, None

    def tune(net: "nn.Module") -> "nn.Module":
        seen = torch.cat(
            [torch.from_numpy(x) for x in inputs("normalised", bundle.preprocessing, pictures)]
        )
        with Bar() as bar:
            bar.say(f"int8 loses too much: it is trained with int8 simulated, epochs: {epochs}")
            return finetune_int8(
                net,
                bundle.preprocessing,
                found,
                seen,
                task=find_task(bundle.task),
                recipe=replace(INT8_FINETUNE, epochs=epochs),
                watch=bar.watch,
            )

    return pictures, tune


def show_export(made: "ExportResult") -> None:
    """A table of how the file compares, and what is in it."""
    from rich.table import Table

    check, about = made.comparison, made.metadata
    columns = ("images", "difference", "cosine", "same class", "top-1 % PyTorch", "top-1 % file")
    table = Table(*columns, box=None, header_style="bold")
    scores = ("-" if value is None else f"{value:.2f}" for value in (check.top1, check.file_top1))
    same = f"{check.same_top1} of {check.images}"
    table.add_row(
        str(check.images), f"{check.relative_difference:.1e}", f"{check.cosine:.6f}", same, *scores
    )
    console().print(table)
    if about.float_layers:
        print(f"in float: {', '.join(about.float_layers)}")
    print(
        f"{made.path}: {made.format}, {about.precision}, {about.input_kind} in, run by {made.runtime}"
    )


def report(
    runs: Positional[tuple[Path, ...]],
    out: Path = Path("report.html"),
    bench: Path | None = None,
    picture: Path | None = None,
) -> None:
    """Write one self-contained HTML page about runs: accuracy against latency, learning curves, predicted images.

    Args:
        runs: Finished runs on the same data.
        out: The page.
        bench: What `fullstride bench --out` wrote, for times; its other networks stand beside as untrained.
        picture: The plot of accuracy against latency alone, as a PNG file.
    """
    from fullstride.report import page
    from fullstride.report.gather import gather
    from fullstride.storage import atomic_write

    if not runs:
        raise ValueError("nothing to report: name one or more run folders")
    found = gather(runs, bench)
    page.write(out, page.render(**found))
    if picture:
        with atomic_write(picture) as beside:
            beside.write_bytes(page.picture(found["entries"]))
    print(out.resolve())
