"""Predicts a window that slides over the frames of a long video."""

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

ROUNDING_S = 1e-6  # times of frames are multiples of a time base, in floating point


class Window(NamedTuple):
    start_s: float  # time of its first frame, from the first frame of the video on
    end_s: float  # and of its last frame
    pixels: np.ndarray  # uint8 (T, H, W, C)


@dataclass(frozen=True)
class WindowPrediction(Prediction):
    """What a task predicts for a part of a video, best first."""

    start_s: float = 0.0  # times of its first and its last frame, from the first of the video on
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
    """One prediction each `every_s` seconds of a video of any length, while it is decoded.

    A window is a clip of the network, `frames` with `frame_stride` between them. The first one ends
    where the video has so many frames, and others at the first frame that is a multiple of
    `every_s` later or more. Frames are decoded once, in order, and those of one window are held, at
    the network's resolution. A video shorter than a window has one row, for the clip that repeats
    it.

    Args:
        model: A bundle of a network of clips, or an exported file.
        video: The path of a file, or frames with rising times, such as a camera's.
        every_s: Seconds of the video from a row to the next one.
        top: The number of classes in a row.
        device: Where a bundle computes; an exported file has its own device.
        tta: With flip, the mean of the probabilities of a window and of its mirror image.

    Raises UnreadableImage where the video breaks, after the rows before that place, and ValueError
    for a network of images.
    """
    pre, task = model.preprocessing, task_of(model)
    if not pre.frames:
        raise ValueError("streaming needs a network of clips, and this one takes images")
    if not 0 < every_s < math.inf:
        raise ValueError(f"every_s {every_s:g}: use a number of seconds above 0")
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
    """`stream` of several videos; one that breaks ends with a row that has the reason."""
    for path in videos:
        try:
            yield from stream(model, path, every_s=every_s, top=top, device=device, tta=tta)
        except UnreadableImage as error:
            yield Prediction(str(path), unreadable=error.reason)


def windows(frames: Iterable[TimedFrame], pre: Preprocessing, every_s: float) -> Iterator[Window]:
    """The windows of `stream`, as they are complete."""
    span = (pre.frames - 1) * pre.frame_stride + 1
    held: deque[tuple[float, np.ndarray]] = deque(maxlen=span)
    first = due = None  # times of the last frames of the first window and of the next one
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
