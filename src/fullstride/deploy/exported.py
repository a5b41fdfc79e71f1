"""What is in an exported file? What it answers, what it wants to see, and where it came from."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from fullstride.nets.preprocessing import Preprocessing
from fullstride.storage import MAX_JSON_BYTES

Input = Literal["normalised", "pixels", "pictures"]
Kind = Literal["fp32", "bf16", "fp16", "int8"]


@dataclass(frozen=True, kw_only=True)
class About:
    """What travels with a file. In the file each field is a string: itself, or its JSON."""

    name: str
    classes: tuple[str, ...]  # in the order of the answers
    preprocessing: Preprocessing
    scores: Mapping[str, Any]  # of the bundle: split -> score -> value
    source: str = ""
    licence: str = ""
    precision: Kind = "fp32"
    # normalised: float32 (N, C, H, W) in, logits out. pixels: uint8 (N, H, W, C) of the network's resolution in,
    # probabilities out. pictures: the same of any one size, which the file resizes.
    input: Input = "normalised"
    device: str = "cpu"  # that a program of PyTorch is for; other engines choose
    kept_float: tuple[str, ...] = ()  # layers of an int8 file that are not int8

    def strings(self) -> dict[str, str]:
        told = asdict(self)
        return {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in told.items()
        }

    @classmethod
    def read(cls, told: Mapping[str, str], path: Path) -> "About":
        """Raises ValueError, in one line, for what `strings` would not have written."""
        try:
            if sum(map(len, told.values())) > MAX_JSON_BYTES:
                raise ValueError("it says too much of itself")
            known: dict[str, Any] = {f.name: told[f.name] for f in fields(cls)}
            for key in ("classes", "preprocessing", "scores", "kept_float"):
                known[key] = json.loads(known[key])
            for key in ("classes", "kept_float"):
                known[key] = tuple(map(str, known[key]))
            pre = known["preprocessing"]
            pre |= {key: tuple(map(float, pre[key])) for key in ("mean", "std")}
            pre |= {"resolution": int(pre["resolution"]), "crop": float(pre["crop"])}
            about = cls(
                **{**known, "preprocessing": Preprocessing(**pre), "scores": dict(known["scores"])}
            )
            for part in (about, about.preprocessing):
                for key, kind in get_type_hints(type(part)).items():
                    if get_origin(kind) is Literal and getattr(part, key) not in get_args(kind):
                        raise ValueError(f"{key} {getattr(part, key)!r}")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} was not written by `fullstride export`: {type(error).__name__} {error}"
            ) from None
        return about


Run = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Shipped:
    """An exported file, ready to answer."""

    path: Path
    about: About
    engine: Run
    runtime: str  # the program that runs it, its version and threads

    def run(self, images: np.ndarray) -> np.ndarray:
        """(N, ...) of what `about.input` says -> (N, K) float32. Raises ValueError where that is not what comes out."""
        shape, side = tuple(images.shape), self.preprocessing.resolution
        try:
            found = self.engine(images)
        except Exception as error:  # each engine has kinds of its own
            raise ValueError(
                f"{self.path} takes no images of {shape}: it was made for {side} x {side} pixels "
                f"({type(error).__name__})"
            ) from error
        if found.shape != (len(images), len(self.classes)):
            raise ValueError(
                f"{self.path} answers {shape} with {found.shape}, it has {len(self.classes)} classes"
            )
        return found

    @property
    def classes(self) -> tuple[str, ...]:
        return self.about.classes

    @property
    def preprocessing(self) -> Preprocessing:
        return self.about.preprocessing


class Engine(nn.Module):
    """A file where a network is expected that is only measured: it has no parameters, and copies are itself."""

    def __init__(self, shipped: Shipped):
        super().__init__()
        self.shipped = shipped
        self.runtime = f"{shipped.runtime}, {shipped.about.precision}"

    def random_images(self, batch: int, resolution: int) -> Tensor:
        """What the file takes, of random content, on the CPU."""
        channels = self.shipped.preprocessing.channels
        if self.shipped.about.input == "normalised":
            return torch.randn(batch, channels, resolution, resolution)
        return torch.randint(256, (batch, resolution, resolution, channels), dtype=torch.uint8)

    def forward(self, images: Tensor) -> Tensor:
        return self.answer(images)  # pyright: ignore[reportCallIssue, reportArgumentType, reportReturnType]

    @torch.compiler.disable
    def answer(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.shipped.run(images.numpy()))

    def train(self, mode: bool = True) -> "Engine":
        if mode:
            raise ValueError(
                f"{self.shipped.path} cannot be trained: measure it by online, throughput or genet"
            )
        return super().train(mode)

    def __deepcopy__(self, memo: object) -> "Engine":
        return self
