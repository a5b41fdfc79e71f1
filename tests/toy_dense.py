"""A task with a map of values for each image, as small as possible, for tests of files."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from bundles import COLOUR, settled
from PIL import Image
from torch import Tensor, nn

from fullstride.data.transforms.crop import view_geometry
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.tasks import TASKS
from fullstride.tasks.task import Metric, Score, Task


@dataclass(frozen=True)
class Brightest:
    """Where the first map is largest."""

    x: float
    y: float
    map: np.ndarray = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"brightest at {self.x:.1f} {self.y:.1f}"


class Head(nn.Module):
    """Maps -> (N, K, H, W) for the pixels of the input."""

    def __init__(self, channels: int, stride: int, classes: int):
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(channels, classes, 1)
        self.norm = nn.BatchNorm2d(classes)

    def forward(self, maps: tuple[Tensor, ...]) -> Tensor:
        h, w = (side * self.stride for side in maps[0].shape[-2:])
        return F.interpolate(self.norm(self.conv(maps[0])), (h, w), mode="bilinear")


class Error(Score):
    """The mean absolute distance of the first map from the targets, which are maps too."""

    def __init__(self) -> None:
        self.total, self.pixels = 0.0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += (outputs[:, 0] - targets).abs().sum().item()
        self.pixels += targets.numel()

    def merge(self, other: Self) -> None:
        self.total, self.pixels = self.total + other.total, self.pixels + other.pixels

    def compute(self) -> dict[str, float]:
        return {"error": self.total / self.pixels}


@dataclass(frozen=True)
class View:
    """The centre crop, and its mean over channels as the target."""

    view: Any

    @property
    def pre(self) -> Any:
        return self.view.pre

    def __call__(self, image: Any, target: Any, rng: Any, epoch: int = 0) -> tuple[Any, Any]:
        pixels, _ = self.view(image, target, rng)
        return pixels, torch.from_numpy(pixels).float().mean(-1)


class Dense(Task):
    name: ClassVar[str] = "dense"
    metric: ClassVar[Metric] = Metric("error", "error", higher_is_better=False)
    output_names: ClassVar[tuple[str, str]] = ("values", "values")

    def test_view(self, pre: Any) -> View:
        return View(super().test_view(pre))

    def collate(self, targets: list[Any]) -> Tensor:
        return torch.stack(targets) if targets else torch.empty(0)

    def head(self, net: Any) -> Head:
        return Head(net.channels[0], net.strides[0], 2)

    def loss(self, outputs: Any, targets: Any, teacher: Tensor | None = None) -> Tensor:
        return (outputs[:, 0] - targets).abs().mean()

    def score(self) -> Score:
        return Error()

    def agree(self, outputs: Tensor, expected: Tensor) -> Tensor:
        return outputs[:, 0].flatten(1).argmax(1) == expected[:, 0].flatten(1).argmax(1)

    def decode(
        self, outputs: Tensor, classes: Sequence[str], top: int
    ) -> list[tuple[Brightest, ...]]:
        rows = []
        for values in outputs[:, 0]:
            y, x = divmod(int(values.argmax()), values.shape[1])
            rows.append((Brightest(x + 0.5, y + 0.5, values.numpy()),))
        return rows

    def place(self, guesses: Any, size: tuple[int, int], pre: Any) -> tuple[Brightest, ...]:
        (guess,) = guesses
        ((x, y),) = view_geometry(size, pre).to_picture([(guess.x, guess.y)])
        return (Brightest(x, y, np.resize(guess.map, (size[1], size[0]))),)

    def draw(self, picture: Image.Image, guesses: Any, classes: Sequence[str]) -> Image.Image:
        drawn = picture.copy()
        drawn.putpixel((int(guesses[0].x), int(guesses[0].y)), (255, 0, 0))
        return drawn

    def maps(self, guesses: Any) -> Image.Image:
        return Image.fromarray((guesses[0].map > 0).astype(np.uint16))


def dense_bundle(monkeypatch, side: int = 64) -> Bundle:
    """A bundle of the task, which is in `TASKS` for the rest of a test."""
    monkeypatch.setitem(TASKS, "dense", Dense)
    torch.manual_seed(0)
    net = zoo.create("genet_tiny", classes=2)
    net.task_head = Dense().head(net)
    pre = COLOUR.__class__(resolution=side)
    names = {"name": "toy", "classes": ("a", "b"), "preprocessing": pre, "task": "dense"}
    return Bundle(settled(net, pre), **names)
