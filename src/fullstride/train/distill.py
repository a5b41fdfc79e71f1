"""Computes and caches a teacher's probabilities for distillation, and reads pseudo-labels."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.data.dataset import DataSet
from fullstride.data.prediction_store import KEY as STORE_KEY
from fullstride.data.prediction_store import StoreKey, pyarrow, read_key, read_table
from fullstride.data.transforms.crop import Augmentation
from fullstride.data.unlabelled import Unlabelled, open_unlabelled
from fullstride.io.console import print_note
from fullstride.io.records import MAX_JSON_BYTES
from fullstride.io.writing import Output, atomic_write, check_output, read_regular
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tables.class_names import ClassMatch, match_classes
from fullstride.train.recipes.recipe import Recipe

KEY = "about.json"  # in the folder of a cache
CHUNK_BYTES = 2**20


class TeacherProbabilities(Protocol):
    """Maps x (N, C, H, W), views of the images `indices` in an epoch, to probabilities (N, K)."""

    def __call__(self, x: Tensor, epoch: int, indices: Tensor) -> Tensor: ...


class Teacher(nn.Module):
    """A trained network on the student's input: (N, C, H, W) -> probabilities (N, K).

    The input is converted from the student's mean and standard deviation to the teacher's; a gray
    input (N, 1, H, W) becomes three equal channels for a teacher that takes RGB. It is resized to
    the teacher's resolution: at 12 x 12 pixels, a 32 x 32 teacher of digits is at chance.
    `outputs`: the teacher's output for each class of the student; by default the same order.
    """

    outputs: Tensor | None

    def __init__(
        self, bundle: Bundle, student: Preprocessing, outputs: tuple[int, ...] | None = None
    ):
        super().__init__()
        self.net = bundle.net.eval().requires_grad_(False)
        own = bundle.preprocessing

        def per_channel(values: tuple[float, ...]) -> Tensor:
            return torch.tensor(values).view(-1, *([1] if student.frames else []), 1, 1)

        scale = per_channel(student.std) / per_channel(own.std)
        shift = (per_channel(student.mean) - per_channel(own.mean)) / per_channel(own.std)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)
        same_size = own.resolution == student.resolution
        self.side = None if same_size else own.resolution
        order = None if outputs is None else torch.tensor(outputs)
        self.register_buffer("outputs", order, persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, epoch: int = 0, indices: Tensor | None = None) -> Tensor:
        x = x * cast(Tensor, self.scale) + cast(Tensor, self.shift)
        logits = self.net(x if self.side is None else resized(x, self.side)).float()
        return (logits if self.outputs is None else logits[:, self.outputs]).softmax(1)


def resized(x: Tensor, side: int) -> Tensor:
    """Resize (N, C, H, W) or (N, C, T, H, W) to `side` pixels."""
    pixels = x.flatten(1, -3)  # each frame and channel is resized alone
    pixels = F.interpolate(pixels, (side, side), mode="bilinear", antialias=True)
    return pixels.view(*x.shape[:-2], side, side)


def matching_teacher(
    bundle: Bundle, name: str, classes: tuple[str, ...], student: Preprocessing
) -> Teacher:
    """Build a teacher from `bundle` for the data set's `classes`, by `match_classes`.

    Raises ValueError if the number of classes or their names differ, and for a gray teacher of an
    RGB student.
    """
    match = match_teacher_classes(bundle, classes, f"the teacher {name}", "use another")
    if match.how:
        print_note(f"the classes of the teacher {name} are matched {match.how}")
    if bundle.preprocessing.channels < student.channels:
        raise ValueError(
            f"the teacher {name} takes gray images, the student RGB: use another teacher"
        )
    if (bundle.preprocessing.frames > 0) != (student.frames > 0):
        what = "clips and the student images" if student.frames == 0 else "images and not clips"
        raise ValueError(f"the teacher {name} takes {what}: use another teacher")
    return Teacher(bundle, student, None if match.is_identity else match.outputs)


def match_teacher_classes(
    teacher: Bundle | StoreKey, classes: tuple[str, ...], name: str, advice: str
) -> ClassMatch:
    """`match_classes` for as many classes. Raises ValueError with `name` and `advice`."""
    theirs = teacher.classes
    if len(theirs) != len(classes):
        its, data = (f"{len(names)} ({', '.join(names[:3])}, ...)" for names in (theirs, classes))
        raise ValueError(f"{name} has the classes {its}, the images have {data}: {advice}")
    try:
        return match_classes(theirs, classes, named=teacher.has_class_names)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; {advice}") from None


def build_teacher(
    data: DataSet,
    pre: Preprocessing,
    recipe: Recipe,
    device: torch.device | str,
    cache: Path | None,
) -> TeacherProbabilities | None:
    """Build the recipe's teacher, if any; with a folder `cache`, probabilities are stored there.

    Raises ValueError if the cache does not fit the recipe, or the teacher does not fit the data.
    """
    if not recipe.teacher:
        if cache:
            raise ValueError(
                f"--teacher-cache {cache} without a teacher: set recipe.teacher, or leave it out"
            )
        return None
    bundle = zoo.load(recipe.teacher)
    teacher = matching_teacher(bundle, recipe.teacher, data.classes, pre).to(device)
    if cache is None:
        return teacher
    if pre.frames:
        raise ValueError(f"--teacher-cache {cache} is for images, and not for clips: leave it out")
    if recipe.mixup or recipe.cutmix or recipe.resolutions(pre.resolution):
        raise ValueError(
            "--teacher-cache stores the probabilities of single images at the resolution: set "
            "recipe.mixup and recipe.cutmix to 0, recipe.grow_from to None and "
            "recipe.train_resolution_ratio to 1, or leave it out"
        )
    for name, off in (("balanced_sampling", 0), ("repeated_augmentation", 1)):
        if getattr(recipe, name) != off:
            raise ValueError(
                f"--teacher-cache stores one view of an image per epoch, and recipe.{name} draws "
                "several: leave out one of them"
            )
    names = [field.name for field in fields(Augmentation)]
    names += ["decoder", "seed", "distinct_views", "precision"]
    views = {
        "data": data.fingerprint,
        "mirror": data.mirror,
        "preprocessing": asdict(pre),
        **{name: getattr(recipe, name) for name in names},
    }
    epochs = recipe.distinct_views or math.ceil(recipe.epochs)
    return CachedTeacher(teacher, cache, len(data.train), views, epochs)


class CachedTeacher:
    """A teacher that stores its probabilities on disk, so that several runs compute them once.

    `views` is the key: everything that determines the pixels of a view, besides image and epoch.
    Each combination of key and teacher has a subfolder of `folder`, with a file for each of
    `epochs` epochs, after which views repeat. A file has K half-precision numbers per image; zeros
    mean that the image is not computed yet. The first call returns rounded probabilities too, so
    that resumed runs are reproducible.

    Nothing is written before the first probabilities. Raises ValueError if there is not enough disk
    space, or if the folder has something else in the cache's place.
    """

    def __init__(
        self, teacher: Teacher, folder: Path, images: int, views: Mapping[str, Any], epochs: int
    ):
        self.teacher, self.epochs = teacher, epochs
        self.shape = images, teacher.net.spec.classes
        buffers = teacher.named_buffers(recurse=False)
        conversion = {name: value.flatten().tolist() for name, value in buffers}
        own = {"teacher": digest(teacher), "side": teacher.side, "images": images}
        key = json.dumps({**own, **conversion, **views}, sort_keys=True, indent=1)
        self.folder = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        self.key = key.encode()
        self.output = Output(
            "the key of a cache",
            ".json",
            lambda path: read_regular(path, MAX_JSON_BYTES) == self.key,
        )
        check_output(self.folder / KEY, self.output)
        self.bytes = 2 * images * self.shape[1]
        written = sum(path.stat().st_blocks * 512 for path in self.folder.glob("*.f16"))
        parent = next((each for each in (folder, *folder.parents) if each.exists()), folder)
        missing, free = self.bytes * epochs - written, shutil.disk_usage(parent).free
        if missing > free:
            raise ValueError(
                f"{folder} has {free / 2**30:,.1f} GiB free, the teacher's probabilities of "
                f"{epochs} views of each image need {missing / 2**30:,.1f}: give another folder, "
                "or set recipe.distinct_views to fewer"
            )
        self.open_file: tuple[int, np.memmap] | None = None

    def __call__(self, x: Tensor, epoch: int, indices: Tensor) -> Tensor:
        cache, rows = self.probabilities(epoch % self.epochs), indices.numpy()
        rounded = cache[rows].astype(np.float32)
        missing = np.abs(rounded.sum(1) - 1) > 0.05  # zeros, or a partially written row
        if missing.any():
            places = torch.from_numpy(np.flatnonzero(missing))
            cache[rows[missing]] = self.teacher(x[places.to(x.device)]).cpu().numpy()
            rounded = cache[rows].astype(np.float32)
        probabilities = torch.from_numpy(rounded).to(x.device)
        return probabilities / probabilities.sum(1, keepdim=True)

    def probabilities(self, view: int) -> np.memmap:
        """The file of one view of each image, as an array (images, K)."""
        if self.open_file is None or self.open_file[0] != view:
            with atomic_write(self.folder / KEY, self.output) as temporary:
                temporary.write_bytes(self.key)
            path = self.folder / f"{view:05}.f16"
            allocate(path, self.bytes)
            self.open_file = view, np.memmap(path, np.float16, "r+", shape=self.shape)
        return self.open_file[1]


def allocate(path: Path, size: int) -> None:
    """Allocate `size` bytes of disk for a file, new bytes zero. Raises OSError if the disk is full.

    Otherwise, writing to the memory map of a file with holes on a full disk kills the process.
    """
    try:
        with path.open("ab") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                for start in range(file.tell(), size, CHUNK_BYTES):
                    file.write(bytes(min(CHUNK_BYTES, size - start)))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def digest(net: nn.Module) -> str:
    """A hash of the weights and their names."""
    weights = hashlib.sha256()
    for name, value in sorted(net.state_dict(keep_vars=True).items()):
        weights.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return weights.hexdigest()


# Pseudo-labels are a teacher's probabilities, stored by `fullstride data label` (Noisy Student,
# arXiv:1911.04252; ResNet-RS also trains on them, arXiv:2103.07579).


@dataclass(frozen=True)
class PseudoLabels:
    """The k most probable of K classes for each of M readable images."""

    key: StoreKey
    images_m: np.ndarray  # int64: index of the image in the data
    classes_mk: np.ndarray  # int64, the most probable first
    probabilities_mk: np.ndarray  # float32, from half precision

    def __len__(self) -> int:
        return len(self.images_m)

    @property
    def fingerprint(self) -> str:
        """A hash of the images and their labels."""
        whole = hashlib.sha256(self.key.data.encode())
        for array in (self.images_m, self.classes_mk, self.probabilities_mk):
            whole.update(array.tobytes())
        return whole.hexdigest()[:16]

    def for_classes(self, classes: tuple[str, ...]) -> "PseudoLabels":
        """Convert the labels to indices of a student's `classes`, by `match_classes`.

        Raises ValueError if the teacher has other classes.
        """
        advice = "label the images by a network of the data's classes"
        match = match_teacher_classes(self.key, classes, "the teacher of the pseudo-labels", advice)
        ours = np.argsort(match.outputs)  # index of the student's class of each output
        return PseudoLabels(self.key, self.images_m, ours[self.classes_mk], self.probabilities_mk)

    def dense(self, rows: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Probabilities (N, K) of N rows; the other K - k classes share the rest of 1.

        They are normalised, since stored sums are off by up to 0.5 % in half precision.
        """
        numbers = np.array(rows)
        indices = sent(torch.from_numpy(self.classes_mk[numbers]), device)
        values = sent(torch.from_numpy(self.probabilities_mk[numbers]), device)
        classes, stored = len(self.key.classes), indices.shape[1]
        left = (1 - values.sum(1, keepdim=True)).clamp_min(0) / max(1, classes - stored)
        spread = left.expand(-1, classes).clone() * (classes > stored)
        probabilities = spread.scatter_(1, indices, values)
        return probabilities / probabilities.sum(1, keepdim=True)


def sent(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy to `device` without waiting."""
    on_gpu = torch.device(device).type == "cuda"
    return (values.pin_memory() if on_gpu else values).to(device, non_blocking=True)


@dataclass(frozen=True)
class ClassCount:
    """The numbers of images for one class of a teacher."""

    name: str
    predicted: int  # images with this most probable class
    confident: int  # predicted images with enough confidence
    used: int  # confident images in training
    repeated: int  # repetitions of used images


@dataclass(frozen=True)
class LabelSelection:
    """Rows of pseudo-labels to train on, in ascending order, some repeated."""

    rows: np.ndarray
    by_class: tuple[ClassCount, ...]


def select(labels: PseudoLabels, min_confidence: float, per_class: int) -> LabelSelection:
    """Select `per_class` rows for each class, among rows with at least `min_confidence`.

    A class with more rows keeps the most confident, the first among ties; a class with fewer rows
    repeats all in turn; a class without rows stays empty. `per_class` 0 selects all rows once.
    Source: arXiv:1911.04252, with .3 and 130,000.
    """
    best, confidence = labels.classes_mk[:, 0], labels.probabilities_mk[:, 0]
    chosen, counts = [], []
    for index, name in enumerate(labels.key.classes):
        predicted = np.flatnonzero(best == index)
        confident = predicted[confidence[predicted] >= np.float16(min_confidence)]
        order = confident[np.argsort(-confidence[confident], kind="stable")]
        rows = order
        if per_class:
            rows = np.resize(order, per_class) if 0 < len(order) < per_class else order[:per_class]
        used = min(len(order), len(rows))
        counts.append(ClassCount(name, len(predicted), len(confident), used, len(rows) - used))
        chosen.append(rows)
    rows = np.sort(np.concatenate(chosen))
    return LabelSelection(rows, tuple(counts))


def read_pseudo_labels(store: Path) -> PseudoLabels:
    """Read a finished store of `fullstride data label`. Raises ValueError, in one line."""
    if not (store / STORE_KEY if store.is_dir() else store).exists():
        raise ValueError(f"no pseudo-labels at {store}: write them by `fullstride data label`")
    key = read_key(store)
    if key.kind != "pseudo_labels":
        raise ValueError(f"{store} has {key.kind}: give what `fullstride data label` wrote")
    table = read_table(store, ["classes", "probabilities"])
    valid = (table[name].is_valid().to_numpy() for name in ("classes", "probabilities"))
    numbers = np.flatnonzero(np.logical_and(*valid))
    taken = table.take(numbers)
    classes = _matrix(store, taken["classes"], np.int32).astype(np.int64)
    probabilities = _matrix(store, taken["probabilities"], np.float16).astype(np.float32)
    if classes.shape != probabilities.shape or not classes.shape[1] <= len(key.classes):
        raise ValueError(f"{store} has {classes.shape[1]} classes an image, it can have no more")
    ordered = np.sort(classes, axis=1)
    if (
        (classes.size and not 0 <= ordered.min() <= ordered.max() < len(key.classes))
        or (np.diff(ordered, axis=1) == 0).any()
        or not ((probabilities >= 0) & (probabilities <= 1)).all()
    ):
        raise ValueError(f"{store} has labels that are no probabilities of classes: label again")
    return PseudoLabels(key, numbers, classes, probabilities)


def _matrix(store: Path, column: Any, dtype: type) -> np.ndarray:
    """Convert an arrow column of equal-sized lists, without nulls, to (M, k)."""
    types = pyarrow().types
    kind = column.type
    if not types.is_fixed_size_list(kind) or kind.value_type.to_pandas_dtype() is not dtype:
        raise ValueError(f"{store} has a column of the type {kind}: label the images again")
    flat = column.combine_chunks().flatten()
    if flat.null_count or not kind.list_size:
        raise ValueError(f"{store} has labels without a value: label the images again")
    return flat.to_numpy(zero_copy_only=False).reshape(-1, kind.list_size)


def open_images_of(labels: PseudoLabels, store: Path) -> Unlabelled:
    """Open the labelled images. Raises ValueError if they are gone or have changed."""
    where = labels.key.where
    if not where:
        raise ValueError(f"{store} is of images in several places: label one folder or list")
    data = open_unlabelled(where)
    if data.fingerprint != labels.key.data:
        raise ValueError(
            f"{where} has other images than when {store} was written: label them again"
        )
    return data
