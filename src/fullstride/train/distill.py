"""What does a teacher say of the same images? Another network's probabilities, to be learned from."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from fullstride.data.dataset import DataSet
from fullstride.data.transforms.crop import Augmentation
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.train.recipe import RENAMED, Recipe


class TeacherProbabilities(Protocol):
    """Probabilities (N, K) for the images x (N, C, H, W), which are the views of the images `indices` in an epoch."""

    def __call__(self, x: Tensor, epoch: int, indices: Tensor) -> Tensor: ...


class Teacher(nn.Module):
    """A trained network that sees what the student sees: (N, C, H, W) as the student's input -> (N, K) probabilities.

    Images are brought from the student's mean and deviation to the teacher's own.
    """

    def __init__(self, bundle: Bundle, student: Preprocessing):
        super().__init__()
        self.net = bundle.net.eval().requires_grad_(False)
        own, pre = bundle.preprocessing, student

        def per_channel(values: tuple[float, ...]) -> Tensor:
            return torch.tensor(values).view(-1, 1, 1)

        scale = per_channel(pre.std) / per_channel(own.std)
        shift = (per_channel(pre.mean) - per_channel(own.mean)) / per_channel(own.std)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, epoch: int = 0, indices: Tensor | None = None) -> Tensor:
        return self.net(x * cast(Tensor, self.scale) + cast(Tensor, self.shift)).float().softmax(1)


def matching_teacher(
    bundle: Bundle, name: str, classes: tuple[str, ...], student: Preprocessing
) -> Teacher:
    """Raises ValueError, in one line, for a teacher of other classes or other image channels.

    Weights from elsewhere may call the same classes otherwise, so names decide only where they are the same ones
    in another order.
    """
    theirs = bundle.classes
    if len(theirs) != len(classes) or (theirs != classes and set(theirs) == set(classes)):
        shown = [f"{len(names)} ({', '.join(names[:3])}, ...)" for names in (theirs, classes)]
        raise ValueError(
            f"the teacher {name} knows the classes {shown[0]}, the images have {shown[1]}: take another"
        )
    if bundle.preprocessing.channels != student.channels:
        raise ValueError(
            f"the teacher {name} takes {bundle.preprocessing.channels} image channels, the student "
            f"{student.channels}: take another"
        )
    return Teacher(bundle, student)


def build_teacher(
    data: DataSet,
    pre: Preprocessing,
    recipe: Recipe,
    device: torch.device | str,
    cache: Path | None,
) -> TeacherProbabilities | None:
    """The recipe's teacher, if it has one; its answers are kept in the folder `cache`, if there is one."""
    if not recipe.teacher:
        if cache:
            raise ValueError(
                f"--teacher-cache {cache} without a teacher: set recipe.teacher, or leave it out"
            )
        return None
    teacher = matching_teacher(zoo.load(recipe.teacher), recipe.teacher, data.classes, pre).to(
        device
    )
    if cache is None:
        return teacher
    if recipe.mixup or recipe.cutmix or recipe.grow_from:
        raise ValueError(
            "--teacher-cache stores the probabilities of single images at the resolution: set "
            "recipe.mixup and recipe.cutmix to 0 and recipe.grow_from to None, or leave it out"
        )
    old_names = {new: old for old, new in RENAMED.items()}  # those of caches on disk
    decisive = [
        *(field.name for field in fields(Augmentation)),
        "decoder",
        "seed",
        "distinct_views",
        "precision",
    ]
    views = {
        "data": data.fingerprint,
        "mirror": data.mirror,
        "preprocessing": asdict(pre),
        **{old_names.get(name, name): getattr(recipe, name) for name in decisive},
    }
    return CachedTeacher(
        teacher, cache, len(data.train), views, recipe.distinct_views or math.ceil(recipe.epochs)
    )


class CachedTeacher:
    """A teacher whose answers are kept on disk, so that each view of an image is answered once for all students.

    `views` says what decides the pixels of a view beside the number of its image and its epoch; answers to other
    views, or of another teacher, lie in another folder of `folder`. There, a file for each epoch (of those after
    which views come again) holds K numbers of 16 bits for each image; a row of zeros is not answered yet. The
    rounded answer is learned from also where it was just given, so that a run that goes on repeats the same bits.
    """

    def __init__(
        self, teacher: Teacher, folder: Path, images: int, views: Mapping[str, Any], epochs: int
    ):
        self.teacher, self.epochs = teacher, epochs
        self.shape = images, teacher.net.spec.classes
        sees = {
            name: value.flatten().tolist() for name, value in teacher.named_buffers(recurse=False)
        }
        about = json.dumps(
            {"teacher": digest(teacher), **sees, "images": images, **views},
            sort_keys=True,
            indent=1,
        )
        self.folder = folder / hashlib.sha256(about.encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.bytes = 2 * images * self.shape[1]
        wanted = self.bytes * epochs - sum(
            path.stat().st_blocks * 512 for path in self.folder.glob("*.f16")
        )
        free = shutil.disk_usage(folder).free
        if wanted > free:
            raise ValueError(
                f"{folder} has {free / 2**30:,.1f} GiB free, the teacher's answers to {epochs} views of each image "
                f"take {wanted / 2**30:,.1f}: give another folder, or set recipe.distinct_views to fewer"
            )
        (self.folder / "about.json").write_text(about)
        self.opened: tuple[int, np.memmap] | None = None

    def __call__(self, x: Tensor, epoch: int, indices: Tensor) -> Tensor:
        kept, rows = self.file(epoch % self.epochs), indices.numpy()
        found = kept[rows].astype(np.float32)
        new = np.abs(found.sum(1) - 1) > 0.05  # zeros, or a row that was cut short
        if new.any():
            asked = torch.from_numpy(np.flatnonzero(new))
            kept[rows[new]] = self.teacher(x[asked.to(x.device)]).cpu().numpy()
            found = kept[rows].astype(np.float32)
        said = torch.from_numpy(found).to(x.device)
        return said / said.sum(1, keepdim=True)

    def file(self, view: int) -> np.memmap:
        if self.opened is None or self.opened[0] != view:
            path = self.folder / f"{view:05}.f16"
            path.touch()
            os.truncate(path, self.bytes)  # zeros, which take no place until they are written
            self.opened = view, np.memmap(path, np.float16, "r+", shape=self.shape)
        return self.opened[1]


def digest(net: nn.Module) -> str:
    """The same for the same weights."""
    found = hashlib.sha256()
    for name, value in sorted(net.state_dict(keep_vars=True).items()):
        found.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
