"""Predicts a sliding window over the frames of a long video."""

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.readers.videos import TimedFrame, timed_frames
from fullstride.data.transforms.clips import clip_numbers
from fullstride.data.transforms.crop import test_view
from fullstride.deploy.exported import Model
from fullstride.deploy.predict import Prediction, check_suffix, probabilities
from fullstride.deploy.settings import Tta
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import task_of

ROUNDING_S = 1e-6  # frame times are floating-point multiples of a time base


class Window(NamedTuple):
    start_s: float  # time of its first frame since the first frame of the video
    end_s: float  # time of its last frame
    pixels: np.ndarray  # uint8 (T, H, W, C)


@dataclass(frozen=True)
class WindowPrediction(Prediction):
    """A task's predictions for a part of a video, best first."""

    start_s: float = 0.0  # see `Window`
    end_s: float = 0.0

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{where}{self.start_s:.2f} to {self.end_s:.2f} s: {self.guesses_text}"

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "start_s": self.start_s, "end_s": self.end_s}


def stream(
    model: Model,
    video: str | os.PathLike[str] | Iterable[TimedFrame],
    *,
    every_s: float = 1.0,
    top: int = 5,
    device: torch.device | str = "cpu",
    tta: Tta = "none",
) -> Iterator[WindowPrediction]:
    """Yield one prediction per `every_s` seconds of a video of any length, while it is decoded.

    A window is one clip of the network, `frames` frames with a step of `frame_stride`. The first
    window ends as soon as the video has enough frames; each later window ends at the first frame at
    least another `every_s` later. Frames are decoded once, in order, and one window is in memory at
    the network's resolution. A video shorter than a window has one row, for a clip that repeats it.

    `video` is the path of a file, or frames with increasing times, such as a camera's. A row has
    `top` classes. `device` and `tta` are as in `predict`. Raises UnreadableImage at the place where
    the video is broken, and ValueError for a network of images.
    """
    pre, task = model.preprocessing, task_of(model)
    if not pre.frames:
        raise ValueError("streaming needs a network of clips, and this one takes images")
    if not 0 < every_s < math.inf:
        raise ValueError(f"every_s {every_s:g}: use a number of seconds above 0")
    if top < 1:
        raise ValueError(f"top {top}: use 1 or more")
    path = ""
    if isinstance(video, (str, os.PathLike)):
        path = os.fspath(video)
        check_suffix(Path(path), pre)
        video = timed_frames(Path(path))
    for window in windows(video, pre, every_s):
        rows = torch.from_numpy(probabilities(model, [window.pixels], device, tta=tta))
        (guesses,) = task.decode(rows, model.classes, top)
        yield WindowPrediction(path, guesses, start_s=window.start_s, end_s=window.end_s)


def stream_all(
    model: Model,
    videos: Iterable[Path],
    *,
    every_s: float,
    top: int,
    device: torch.device | str,
    tta: Tta = "none",
) -> Iterator[Prediction]:
    """`stream` several videos; a broken video ends with a row that has the reason."""
    for path in videos:
        try:
            yield from stream(model, path, every_s=every_s, top=top, device=device, tta=tta)
        except UnreadableImage as error:
            yield Prediction(str(path), unreadable=error.reason)


def windows(frames: Iterable[TimedFrame], pre: Preprocessing, every_s: float) -> Iterator[Window]:
    """Yield the windows of `stream` as soon as they are complete."""
    span = (pre.frames - 1) * pre.frame_stride + 1
    held: deque[tuple[float, np.ndarray]] = deque(maxlen=span)
    first = due = None  # end times of the first window and of the next window
    for seconds, picture in frames:
        held.append((seconds, test_view(picture, pre)))
        if len(held) < span or (due is not None and seconds < due):
            continue
        yield _window(held, pre)
        first = seconds if first is None else first
        rows = math.floor((seconds - first + ROUNDING_S) / every_s) + 1
        due = first + rows * every_s - ROUNDING_S
    if held and first is None:
        yield _window(held, pre)


def _window(held: deque[tuple[float, np.ndarray]], pre: Preprocessing) -> Window:
    (numbers,) = clip_numbers([0], pre, len(held))
    pixels = np.stack([held[number][1] for number in numbers])
    return Window(held[0][0], held[-1][0], pixels)
