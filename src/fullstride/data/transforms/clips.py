"""Views of videos: a random clip in training, and clips all over a video in evaluation.

A clip is `pre.frames` frames, `pre.frame_stride` apart. A shorter video repeats from its first
frame on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image

from fullstride.data.readers.decode import Box, Size, UnreadableImage
from fullstride.data.readers.videos import Video, open_video
from fullstride.data.transforms.crop import (
    MAX_PIXELS,
    Augmentation,
    RandomBox,
    in_mode,
    random_crop_box,
    resized_size,
    test_view,
    train_view,
    view_offset,
)
from fullstride.data.transforms.image_ops import KERNELS
from fullstride.nets.preprocessing import Preprocessing

ClipSource = Path | bytes | np.ndarray  # a file, its bytes, or decoded frames
Starts = Literal["inclusive", "slowfast"]  # see `clip_starts`


@dataclass(frozen=True)
class OfClips:
    """The network's preprocessing, which must be of clips."""

    pre: Preprocessing

    def __post_init__(self) -> None:
        if not self.pre.frames:
            raise ValueError("clips of 0 frames: the network takes pictures; give one of clips")


@dataclass(frozen=True)
class ClipTrainView(OfClips):
    """A clip from a random frame on, with the same crop and augmentation in all frames.

    Every possible first frame is equally likely. Without `short_side` the crop is drawn as for
    images; with it the shorter side of the video is resized to a random number of pixels, and a
    square of `pre.resolution` pixels is cropped (the scale jitter of arXiv:1409.1556, usual for
    videos). Operations of the augmentation are drawn once for a clip.
    """

    augmentation: Augmentation = Augmentation()
    short_side: tuple[int, int] | None = None  # least and largest; None: random resized crop

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.short_side:
            least, most = self.short_side
            if not self.pre.resolution <= least <= most:
                raise ValueError(
                    f"short_side {self.short_side}: use two rising numbers of pixels from the "
                    f"resolution, {self.pre.resolution}, on"
                )

    def __call__(
        self, image: ClipSource, target: Any, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, Any]:
        """A video file, its bytes or a folder of frames -> uint8 (T, H, W, C)."""
        box: RandomBox = random_crop_box
        if self.short_side:
            least, most = self.short_side
            box = partial(jittered_box, self.pre.resolution / int(rng.integers(least, most + 1)))
        with open_video(image) as video:
            start = int(rng.integers(_free(video.frames, self.pre) + 1))
            seed = int(rng.integers(2**63))

            def view(frame: Image.Image) -> np.ndarray:
                # the same draws for each frame
                frame_rng = np.random.default_rng(seed)
                return train_view(frame, self.pre, self.augmentation, frame_rng, box)[None]

            numbers = clip_numbers([start], self.pre, video.frames)
            return _pixels(video, numbers, view)[0, 0], target


@dataclass(frozen=True)
class ClipTestView(OfClips):
    """The clip in the middle of the video, with each frame through `test_view`."""

    def __call__(
        self, image: ClipSource, target: Any, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, Any]:
        """A video file, its bytes or a folder of frames -> uint8 (T, H, W, C)."""
        with open_video(image) as video:
            numbers = clip_numbers([_free(video.frames, self.pre) // 2], self.pre, video.frames)
            return _pixels(video, numbers, lambda f: test_view(f, self.pre)[None])[0, 0], target


@dataclass(frozen=True)
class ViewsOfVideo(OfClips):
    """Clips all over a video, each with crops all over its frames: uint8 (V, T, H, W, C).

    V counts the crops of the first clip, then the crops of the second clip. Three crops are at the
    left, in the centre and at the right, or at the top, in the centre and at the bottom of a video
    that is taller than wide, with the shorter side resized as in `test_view`.
    """

    clips: int = 10
    crops: Literal[1, 3] = 3
    starts: Starts = "inclusive"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clips < 1 or self.crops not in (1, 3) or self.starts not in get_args(Starts):
            raise ValueError(
                f"{self.clips} clips, {self.crops} crops and starts {self.starts!r}: use 1 clip or "
                f"more, 1 or 3 crops, and {' or '.join(get_args(Starts))}"
            )
        if self.crops > 1 and self.pre.fit != "crop":
            raise ValueError(f"{self.crops} crops of frames that are no crops: use 1")

    def __call__(
        self, image: ClipSource, target: Any, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, Any]:
        with open_video(image) as video:
            span = self.pre.frames * self.pre.frame_stride
            starts = clip_starts(video.frames, span, self.clips, self.starts)
            numbers = clip_numbers(starts, self.pre, video.frames)
            pixels = _pixels(video, numbers, self._crops)
            return pixels.reshape(-1, *pixels.shape[2:]), target

    def _crops(self, frame: Image.Image) -> np.ndarray:
        """(crops, H, W, C) of a frame."""
        if self.crops == 1:
            return test_view(frame, self.pre)[None]
        side, (w, h) = self.pre.resolution, resized_size(frame.size, self.pre)
        if w * h > MAX_PIXELS:
            long_side, short_side = max(frame.size), min(frame.size)
            reason = f"its frames are too long and thin, {long_side} x {short_side} pixels"
            raise UnreadableImage("video", reason)
        whole = in_mode(frame, self.pre.channels).resize((w, h), KERNELS[self.pre.kernel])
        pixels = np.asarray(whole).reshape(h, w, self.pre.channels)
        left, top = view_offset((w, h), self.pre)
        places = [(0, top), (left, top), (w - side, top)]
        if h > w:
            places = [(left, 0), (left, top), (left, h - side)]
        return np.stack([pixels[y : y + side, x : x + side] for x, y in places])


def clip_starts(frames: int, span: int, clips: int, rule: Starts) -> list[int]:
    """The first frames of `clips` clips, of `span` frames each, all over a video of `frames`.

    "inclusive": evenly from the first possible start to the last one, as in TensorFlow's model
    garden, vision/ops/preprocess_ops_3d.py. "slowfast": the share i / clips of the last possible
    start, which is never reached, as in PySlowFast, slowfast/datasets/decoder.py. Both round down.
    By both rules a single clip starts at the first frame, and so do all clips of a video shorter
    than the span.
    """
    last = max(0, frames - span)
    parts = max(1, clips - 1) if rule == "inclusive" else clips
    return [last * clip // parts for clip in range(clips)]


def clip_numbers(starts: list[int], pre: Preprocessing, frames: int) -> np.ndarray:
    """The frames of clips from `starts` on, in a repeating video of `frames`: int (clips, T)."""
    return (np.array(starts)[:, None] + np.arange(pre.frames) * pre.frame_stride) % frames


def jittered_box(
    share: float, size: Size, augmentation: Augmentation, rng: np.random.Generator
) -> Box:
    """A random square inside the frame, with sides of `share` times the shorter side of `size`."""
    side = share * min(size)
    left, top = ((each - side) * rng.random() for each in size)
    return left, top, min(left + side, size[0]), min(top + side, size[1])


def _free(frames: int, pre: Preprocessing) -> int:
    """The last possible first frame of a clip inside of a video; 0 for a shorter video."""
    return max(0, frames - ((pre.frames - 1) * pre.frame_stride + 1))


def _pixels(
    video: Video, numbers: np.ndarray, view: Callable[[Image.Image], np.ndarray]
) -> np.ndarray:
    """Apply `view`, frame -> (crops, H, W, C), to `numbers` (clips, T): (clips, crops, T, H, W, C).

    Each frame is decoded once, and only its views are held.
    """
    unique, pixels = np.unique(numbers), np.empty(0, np.uint8)
    for number, frame in zip(unique, video.read(unique.tolist()), strict=True):
        views = view(frame)
        if not pixels.size:
            clips, frames = numbers.shape
            pixels = np.empty((clips, len(views), frames, *views.shape[1:]), np.uint8)
        pixels.swapaxes(1, 2)[numbers == number] = views
    return pixels
