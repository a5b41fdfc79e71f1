"""How does a network leave Python? As a file of some format, compared with the original on images before it is kept."""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from fullstride.data.dataset import Images
from fullstride.deploy.exported import About, Input, Kind, Shipped
from fullstride.deploy.fold_batch_norm import folded
from fullstride.deploy.formats import FORMATS, recognised
from fullstride.deploy.formats.base import Format, last_line
from fullstride.deploy.int8 import release, sensitivity
from fullstride.deploy.job import STRIDE, Backend, Job
from fullstride.deploy.predict import WholePictures, answers, inputs, logits, softmax
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.storage import atomic_write, remove

# What a file may differ by: its answers, as the largest difference / the largest answer, and its top-1, in points.
# A format that computes otherwise than it says shows in the first; what an application feels is the second.
DIFFERENCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 0.2, "int8": float("inf")}
DROP = {"fp32": 0.0, "fp16": 0.2, "bf16": 0.2, "int8": 0.5}
RESIZED = (
    0.05,
    0.2,
)  # the same for files that resize pictures, where a level of brightness is rounded otherwise
MOST_KEPT = 0.5  # share of the layers of an int8 file that may stay in float
Tuning = Callable[[nn.Module], nn.Module]  # a folded network -> one that loses less in int8
Say = Callable[[str], None]  # what is done with a line about work that goes on


@dataclass(frozen=True)
class Decoded(Sequence[Image.Image]):
    """Some of `images`, decoded whenever they are asked for: of photographs few fit in memory."""

    images: Images
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self.images.picture(index) for index in self.indices[place]]
        return self.images.picture(self.indices[place])


@dataclass(frozen=True)
class Sample:
    """Real images to compare answers on, with their classes where they are known."""

    pictures: Sequence[Image.Image]
    labels: Sequence[int] = ()

    def __post_init__(self) -> None:
        if len(self.labels) not in (0, len(self.pictures)):
            raise ValueError(
                f"{len(self.labels)} labels for {len(self.pictures)} pictures: give one for each, or none"
            )


@dataclass(frozen=True)
class Check:
    """How a file's answers compare with those of the network in PyTorch on the same images."""

    images: int
    relative_difference: float  # largest absolute difference of an answer / largest absolute answer
    cosine: float  # mean over images, of the two vectors of answers
    same_top1: int  # images on which both name the same class
    top1: float | None = (
        None  # percent of the images that PyTorch names rightly; None: their classes are not known
    )
    file_top1: float | None = None

    @property
    def drop(self) -> float:
        """Points of top-1 that the file is worse by; where classes are not known, how often it says another one."""
        if self.top1 is None or self.file_top1 is None:
            return 100 * (1 - self.same_top1 / self.images)
        return max(0.0, self.top1 - self.file_top1)


@dataclass(frozen=True)
class Original:
    """What a file is made of and compared with: one for all files of a bundle that take the same."""

    net: nn.Module  # with its batch norms folded
    shown: Sequence[np.ndarray]  # the pictures of the sample as a file takes them
    expected: np.ndarray  # (N, K), PyTorch's answers


@dataclass(frozen=True)
class Exported:
    """A file that passed, and what was seen of it."""

    path: Path
    format: str
    about: About
    runtime: str
    check: Check
    tried: tuple[tuple[int, float], ...]  # of int8: layers in float -> points lost


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
    original: Original | None = None,
    say: Say = lambda line: None,
) -> Exported:
    """Write `bundle` to `path`, in evaluation mode with batch norms folded, if the file answers as the bundle does.

    It is written beside its place, opened by the program that will run it, and asked about all pictures of `sample`.
    Raises ValueError, and keeps what stood there before, if an answer differs by more than `DIFFERENCE` of the
    largest, or top-1 by more than `max_drop` points (None: `DROP`). An int8 file takes its ranges from the pictures
    `calibration`; where it loses more than that, layers are put back into float one by one, the most sensitive first.
    Before that, `finetune` may train the folded network for int8; what it raises FloatingPointError for is left out.

    `takes` is what goes into the file (see `About`); with `any_size` sides may be any multiples of 32. `device` is
    where programs of PyTorch (aoti, pt2) compute; other engines choose. `original` is made here where it is not given.
    """
    kind = find_format(format, precision)
    if device != "cpu" and not kind.runs_code:
        raise ValueError(
            f"{format} computes where its engine does, device {device!r} is for aoti and pt2: leave it out"
        )
    check_free(path, force, kind.suffix)
    if backend != "onnx" and kind.name != "triton-server":
        raise ValueError(f"--backend {backend} is for --format triton-server: leave it out")
    if max_drop is not None and not max_drop >= 0:
        raise ValueError(f"--max-drop {max_drop:g}: use 0 or more points")
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
        raise ValueError(
            "int8 needs images to take its ranges from: give some of the same kind by --calibration"
        )
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
    original = original or original_of(bundle, sample, takes)
    ranges = as_taken(takes, bundle.preprocessing, calibration) if precision == "int8" else ()
    job = Job(original.net, about, original.shown[0], any_size, backend, ranges)
    difference, points = allowed(precision, takes)
    points = points if max_drop is None else max_drop

    with atomic_write(path) as beside:
        last: list[tuple[Shipped, Check]] = []

        def attempt(kept: Sequence[str] = ()) -> float:
            remove(beside)
            write(kind, replace(job, about=replace(about, kept_float=tuple(kept))), beside)
            shipped = kind.open(beside, threads or torch.get_num_threads())
            check = compare(answers(shipped, original.shown), original.expected, sample.labels)
            last[:] = [(shipped, check)]
            if precision == "int8":
                say(f"layers in float: {len(kept)}, points of top-1 lost: {check.drop:.2f}")
            return check.drop

        drop = attempt()
        if precision == "int8" and drop > points and finetune:
            try:
                job = replace(job, net=finetune(job.net))
                drop = attempt()
            except FloatingPointError as error:
                say(f"training for int8 came to nothing: {error}")
        tried = [(0, drop)]
        if precision == "int8" and drop > points:
            say(
                "each layer is tried alone in int8, those that spoil most go back to float, one more each time"
            )
            seen = torch.from_numpy(
                np.concatenate(list(inputs("normalised", bundle.preprocessing, calibration)))
            )
            order = [name for name, _ in sensitivity(job.net, seen)]
            tried += release(attempt, points, order[: int(MOST_KEPT * len(order))])
        ((shipped, check),) = last
        if (
            not check.relative_difference <= difference or not check.drop <= points
        ):  # not a number: neither
            raise ValueError(refusal(path, check, difference, points))
    return Exported(path, format, shipped.about, shipped.runtime, check, tuple(tried))


def original_of(bundle: Bundle, sample: Sample, takes: Input) -> Original:
    shown = as_taken(takes, bundle.preprocessing, sample.pictures)
    plain = (
        shown
        if takes == "normalised"
        else inputs("normalised", bundle.preprocessing, sample.pictures)
    )
    expected = logits(bundle, plain)
    return Original(
        folded(bundle.net), shown, expected if takes == "normalised" else softmax(expected)
    )


def as_taken(
    takes: Input, pre: Preprocessing, pictures: Sequence[Image.Image]
) -> Sequence[np.ndarray]:
    """`inputs`, to be gone through again and again; whole pictures are decoded each time, for they may be large."""
    return (
        WholePictures(pre, pictures) if takes == "pictures" else list(inputs(takes, pre, pictures))
    )


def write(kind: Format, job: Job, path: Path) -> None:
    """Raises ValueError, in one line, for what the libraries that write a format cannot take."""
    try:
        kind.write(job, path)
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # of dozens of kinds, with pages of text
        if (
            shutil.disk_usage(path.parent).free < 2**20
        ):  # some libraries say no more than that a stream failed
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        name = f"{kind.name} in {job.about.precision}"
        raise ValueError(
            f"{job.about.name} cannot be written as {name}: {last_line(error)}"
        ) from error


def check_free(path: Path, force: bool, suffix: str = "") -> None:
    """Raises ValueError where a file with `suffix`, or a folder, must not go to `path`."""
    if suffix and path.suffix != suffix:
        raise ValueError(f"{path} would not be recognised: give an --out that ends in {suffix}")
    if path.exists() and not force:
        raise ValueError(f"{path} exists: say --force to replace it, or give another --out")
    if path.is_dir() and (suffix or (recognised(path) is None and any(path.iterdir()))):
        raise ValueError(f"{path} is a folder with something else in it: give another --out")


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
    return (
        (max(difference, RESIZED[0]), max(points, RESIZED[1]))
        if takes == "pictures"
        else (difference, points)
    )


def compare(found: np.ndarray, expected: np.ndarray, labels: Sequence[int] = ()) -> Check:
    """Of answers (N, K), a file's and PyTorch's, and the true classes where they are known."""
    same = found.argmax(1) == expected.argmax(1)
    scores = [
        float(100 * (rows.argmax(1) == np.array(labels)).mean()) if labels else None
        for rows in (expected, found)
    ]
    with np.errstate(all="ignore"):  # answers that are no numbers are refused
        lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
        difference = float(np.abs(found - expected).max() / np.abs(expected).max())
        cosine = float(((found * expected).sum(1) / lengths).mean())
    return Check(
        images=len(expected),
        relative_difference=difference,
        cosine=cosine,
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
