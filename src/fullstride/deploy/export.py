"""How does a network leave Python? As a file of some format, compared with the original on images before it is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from fullstride.deploy.formats import FORMATS
from fullstride.deploy.formats.format import Format
from fullstride.deploy.fuse import folded
from fullstride.deploy.graph import STRIDE, Backend, Job
from fullstride.deploy.predict import answers, inputs, logits, softmax
from fullstride.deploy.quantize import release, sensitivity
from fullstride.deploy.shipped import About, Input, Kind, Shipped
from fullstride.nets.bundle import Bundle
from fullstride.nets.disk import remove, replacing

# What a file may differ by: its answers, as the largest difference / the largest answer, and its top-1, in points.
# A format that computes otherwise than it says shows in the first; what an application feels is the second.
DIFFERENCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 0.2, "int8": float("inf")}
DROP = {"fp32": 0.0, "fp16": 0.2, "bf16": 0.2, "int8": 0.5}
Tuning = Callable[[nn.Module], nn.Module]  # a folded network -> one that loses less in int8
RESIZED = 0.05, 0.2  # the same for files that resize pictures, where a level of brightness is rounded otherwise
MOST_KEPT = 0.5  # share of the layers of an int8 file that may stay in float


@dataclass(frozen=True)
class Sample:
    """Real images to compare answers on, with their classes where they are known."""

    pictures: Sequence[Image.Image]
    labels: Sequence[int] = ()


@dataclass(frozen=True)
class Check:
    """How a file's answers compare with those of the network in PyTorch on the same images."""

    images: int
    relative_difference: float  # largest absolute difference of an answer / largest absolute answer
    cosine: float  # mean over images, of the two vectors of answers
    same_top1: int  # images on which both name the same class
    top1: float | None = None  # percent of the images that PyTorch names rightly; None: their classes are not known
    file_top1: float | None = None

    @property
    def drop(self) -> float:
        """Points of top-1 that the file is worse by; where classes are not known, how often it says another one."""
        if self.top1 is None or self.file_top1 is None:
            return 100 * (1 - self.same_top1 / self.images)
        return max(0.0, self.top1 - self.file_top1)


@dataclass(frozen=True)
class Exported:
    """A file that passed, and what was seen of it."""

    path: Path
    format: str
    about: About
    runtime: str
    check: Check
    tried: tuple[tuple[int, float], ...] = field(default=())  # of int8: layers in float -> points lost


def export(
    bundle: Bundle,
    path: Path,
    sample: Sample,
    *,
    format: str = "onnx",
    precision: Kind = "fp32",
    takes: Input = "normalised",
    any_size: bool = False,
    backend: Backend = "onnx",
    calibration: Sequence[Image.Image] = (),
    max_drop: float | None = None,
    finetune: Tuning | None = None,
    device: str = "cpu",
    threads: int | None = None,
    force: bool = False,
) -> Exported:
    """Write `bundle` to `path`, in evaluation mode with batch norms folded, if the file answers as the bundle does.

    It is written beside its place, opened by the program that will run it, and asked about all pictures of `sample`.
    Raises ValueError, and keeps what stood there before, if an answer differs by more than `DIFFERENCE` of the
    largest, or top-1 by more than `max_drop` points (None: `DROP`). An int8 file takes its ranges from the pictures
    `calibration`; where it loses more than that, layers are put back into float one by one, the most sensitive first.

    Before that, `finetune` may train the folded network for int8.

    `takes` is what goes into the file (see `About`); with `any_size` sides may be any multiples of 32. `device` is
    where programs of PyTorch (aoti, pt2) compute; other engines choose.
    """
    kind = find_format(format, precision)
    if device != "cpu" and not kind.runs_code:
        raise ValueError(
            f"{format} computes where its engine does, device {device!r} is for aoti and pt2: leave it out"
        )
    check_free(path, force)
    if any_size and takes == "pictures":
        raise ValueError("a file that takes pictures takes any size as it is: leave --any-size out")
    side = bundle.preprocessing.resolution
    if any_size and (side % STRIDE or side == STRIDE):  # maps of one pixel are blurred otherwise
        raise ValueError(
            f"any size for a network of {side} pixels: it is for those of {2 * STRIDE}, {3 * STRIDE}, {4 * STRIDE}, ..."
        )
    if not sample.pictures:
        raise ValueError("no images to compare answers on: give some by --data")
    if precision == "int8" and not calibration:
        raise ValueError("int8 needs images to take its ranges from: give some of the same kind by --calibration")
    about = About(
        name=bundle.name,
        classes=bundle.classes,
        preprocessing=bundle.preprocessing,
        scores=dict(bundle.scores),
        source=bundle.source,
        licence=bundle.licence,
        precision=precision,
        input=takes,
        device=device,
    )
    expected = logits(bundle, sample.pictures)
    if takes != "normalised":
        expected = softmax(expected)
    ready = folded(bundle.net.cpu())
    first = next(inputs(takes, bundle.preprocessing, sample.pictures))
    ranges = tuple(inputs(takes, bundle.preprocessing, calibration)) if precision == "int8" else ()
    job = Job(ready, about, first, any_size=any_size, backend=backend, calibration=ranges)
    difference, points = allowed(precision, takes)
    points = points if max_drop is None else max_drop

    with replacing(path) as beside:
        last: list[tuple[Shipped, Check]] = []

        def attempt(kept: Sequence[str] = ()) -> float:
            remove(beside)
            kind.write(replace(job, about=replace(about, kept_float=tuple(kept))), beside)
            shipped = kind.open(beside, threads or torch.get_num_threads())
            last[:] = [(shipped, compare(answers(shipped, sample.pictures), expected, sample.labels))]
            return last[0][1].drop

        drop = attempt()
        if precision == "int8" and drop > points and finetune:
            job = replace(job, net=finetune(job.net))
            drop = attempt()
        tried = [(0, drop)]
        if precision == "int8" and drop > points:
            seen = torch.from_numpy(np.concatenate(list(inputs("normalised", bundle.preprocessing, calibration))))
            order = [name for name, _ in sensitivity(job.net, seen)]
            tried += release(attempt, points, order[: int(MOST_KEPT * len(order))])
        ((shipped, check),) = last
        if check.relative_difference > difference or not check.drop <= points:
            raise ValueError(refusal(path, check, difference, points))
    return Exported(path, format, shipped.about, shipped.runtime, check, tuple(tried))


def check_free(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise ValueError(f"{path} exists: say --force to replace it, or give another --out")


def find_format(name: str, precision: str) -> Format:
    """Raises ValueError, in one line, for a format or a precision that cannot be written here."""
    if name not in FORMATS:
        raise ValueError(f"no format named {name!r}: choose from {', '.join(FORMATS)}")
    found = FORMATS[name]
    if precision not in found.precisions:
        able = [each.name for each in FORMATS.values() if precision in each.precisions]
        hint = f", or {precision} in {', '.join(able)}" if able else ""
        raise ValueError(f"{name} in {precision}: use {', '.join(found.precisions)}{hint}")
    if why := found.missing():
        raise ValueError(why)
    return found


def allowed(precision: Kind, takes: Input) -> tuple[float, float]:
    """The largest difference of an answer as a share of the largest, and the points of top-1, that may be lost."""
    difference, points = DIFFERENCE[precision], DROP[precision]
    return (max(difference, RESIZED[0]), max(points, RESIZED[1])) if takes == "pictures" else (difference, points)


def compare(found: np.ndarray, expected: np.ndarray, labels: Sequence[int] = ()) -> Check:
    """Of answers (N, K), a file's and PyTorch's, and the true classes where they are known."""
    same = found.argmax(1) == expected.argmax(1)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    scores = [
        float(100 * (rows.argmax(1) == np.array(labels)).mean()) if labels else None for rows in (expected, found)
    ]
    return Check(
        images=len(expected),
        relative_difference=float(np.abs(found - expected).max() / np.abs(expected).max()),
        cosine=float(((found * expected).sum(1) / lengths).mean()),
        same_top1=int(same.sum()),
        top1=scores[0],
        file_top1=scores[1],
    )


def refusal(path: Path, check: Check, difference: float, points: float) -> str:
    if not check.relative_difference <= difference:
        return (
            f"{path} was not written: its answers differ from PyTorch's by {check.relative_difference:.1e} of the "
            f"largest, {difference:g} is allowed (on {check.images} images)"
        )
    return (
        f"{path} was not written: it loses {check.drop:.2f} points of top-1, {points:g} are allowed (on {check.images} "
        f"images): take another --precision, or allow more by --max-drop"
    )
