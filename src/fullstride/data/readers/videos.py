"""Which frames are in a video, and what do they show? Files, folders of frames, and arrays."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from fullstride.data.readers.decode import SUFFIXES as PICTURES
from fullstride.data.readers.decode import UnreadableImage, decode
from fullstride.data.readers.video_files import (
    MAX_MEGAPIXELS,
    FrameReader,
    Pictures,
    check_frames,
    check_size,
    has_times,
    in_order,
    index_of,
    opened,
    unreadable,
)

SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".flv", ".3gp")
SUFFIXES += (".wmv",)


@dataclass(frozen=True)
class Video:
    """An open video: how many frames it has, when they are, and a function that decodes them."""

    frames: int  # two or more
    rate: float | None  # frames per second, on average; None for a folder, which does not say it
    times: tuple[float, ...] | None  # seconds of each frame after the first; None for a folder
    # rising numbers of frames, from 0 -> the frames, upright, of one size, "L" or "RGB"; lazily
    read: Callable[[Iterable[int]], Iterator[Image.Image]]


class TimedFrame(NamedTuple):
    seconds: float  # after the first frame
    picture: Image.Image  # upright, "L" or "RGB"


@contextmanager
def open_video(source: Path | bytes | np.ndarray) -> Iterator[Video]:
    """A video file, its bytes, a folder of frames in natural order, or uint8 (T, H, W, C).

    Frames are counted in the order in which they are shown, whatever the time between them.

    Raises UnreadableImage, here or where frames are read, for what is no video, broken, cut short,
    without pictures, larger than the limits above, or shorter than two frames.
    """
    if isinstance(source, np.ndarray):
        check_frames("array", len(source))
        pixels = source[..., 0] if source.shape[-1] == 1 else source
        yield Video(
            len(pixels), None, None, lambda numbers: map(Image.fromarray, pixels[[*numbers]])
        )
        return
    if isinstance(source, Path) and source.is_dir():
        yield _open_folder(source)
        return
    with opened(source) as (container, stream, name):
        with unreadable(name, "it is broken: "):
            index = index_of(container, stream, name)
            check_frames(name, len(index.times))
        first, base = index.times[0], float(stream.time_base or 0)
        times = tuple((each - first) * base for each in index.times)
        rate = (len(times) - 1) / times[-1] if times[-1] > 0 else None
        reader = FrameReader(container, stream, index, name)
        yield Video(len(times), rate, times, reader.read)


def timed_frames(source: Path | bytes) -> Iterator[TimedFrame]:
    """All frames of a video file, or its bytes, in order, each decoded once.

    Nothing is read ahead, so that of a broken file the frames before that place are yielded. Raises
    UnreadableImage there, and for what `open_video` refuses.
    """
    if isinstance(source, Path) and source.is_dir():
        raise UnreadableImage(str(source), "it is a folder of frames, which have no times")
    with opened(source) as (container, stream, name):
        frames, convert, number = in_order(container, stream, name), Pictures(), -1
        timed, first = has_times(container, stream), 0.0
        step = float(1 / stream.average_rate) if stream.average_rate else 0.0
        while True:
            with unreadable(name, "it is broken: "):
                frame = next(frames, None)
                if frame is None:
                    check_frames(name, min(number + 1, 2))  # of any length
                    return
                number += 1
                picture, seconds = convert(frame), frame.time
            if not timed or seconds is None:
                seconds = step * number
            first = first if number else seconds
            yield TimedFrame(seconds - first, picture)


@dataclass(frozen=True)
class MiddleFrame:
    """The frame in the middle of the video with a name, as the picture that stands for it."""

    file: Callable[[str], Path | bytes]

    def __call__(self, name: str) -> Image.Image:
        try:
            with open_video(self.file(name)) as video:
                return next(video.read([video.frames // 2]))
        except UnreadableImage as error:
            raise UnreadableImage(name, error.reason) from error


def frame_names(folder: Path) -> list[str]:
    """The pictures in a folder, in natural order: img2.jpg before img10.jpg."""
    with os.scandir(folder) as entries:
        names = [
            each.name
            for each in entries
            if each.name.lower().endswith(PICTURES) and not each.name.startswith(".")
        ]

    def natural(name: str) -> list[tuple[int, str]]:
        return [
            (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
        ]

    return sorted(names, key=lambda name: (natural(name), name))


def frames_size(folder: Path) -> int:
    """The bytes of the frames in a folder that can be reached; 0 where there are none."""
    size = 0
    with suppress(OSError):  # of a folder that cannot be listed
        for name in frame_names(folder):
            with suppress(OSError):  # a broken link is reported when it is read
                size += (folder / name).stat().st_size
    return size


def _open_folder(folder: Path) -> Video:
    with unreadable(str(folder)):
        names = frame_names(folder)
        check_frames(str(folder), len(names))

    def read(numbers: Iterable[int]) -> Iterator[Image.Image]:
        size = None
        for number in numbers:
            try:
                frame = decode(folder / names[number], 3, max_megapixels=MAX_MEGAPIXELS)
            except UnreadableImage as error:
                raise UnreadableImage(
                    str(folder), f"its frame {names[number]!r}: {error.reason}"
                ) from error
            size = check_size(str(folder), frame.size, size)
            yield frame

    return Video(len(names), None, None, read)
