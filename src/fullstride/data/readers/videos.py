"""Decodes frames of videos: files, folders of frames, and arrays."""

import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from fullstride.data.readers.decode import SUFFIXES as PICTURES
from fullstride.data.readers.decode import Size, UnreadableImage, decode
from fullstride.io.console import reason
from fullstride.io.writing import open_regular

if TYPE_CHECKING:
    from av import Packet, VideoFrame, VideoStream
    from av.container import InputContainer


# ---- frames of a video file, which PyAV decodes from an open file or from bytes
#
# A file is never opened by name, and only in formats that hold their own pixels: playlists and
# lists of files would open other files, or addresses.


FORMATS = "mov,matroska,avi,mpeg,flv,asf"  # FFmpeg's names
# Formats whose packets have the times at which frames are shown. AVI has them if frames are stored
# in the order of showing; in MPEG files FFmpeg guesses some, and differently after a jump.
TIMED = ("mov", "matroska", "flv", "asf")
UNSHOWN = ("vp8",)  # codecs whose packets may have no frame to show

MAX_FRAMES = 2**20  # of a video: ten hours
MAX_MEGAPIXELS = 36.0  # of a frame; 8192 x 4320 has 35.4
MAX_WAIT_S = 120.0  # to list the frames, or to decode to the next one that is needed
# Key frames farther ahead are jumped to; the decoder reads some packets beyond a frame anyhow.
MIN_JUMP = 16
MICROSECONDS = 1e6  # in a second; FFmpeg's unit for whole files
# quarter turns to the left -> the operation that turns a frame upright
TURNS = {1: Image.Transpose.ROTATE_90, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_270}


@contextmanager
def open_stream(source: Path | bytes) -> Iterator[tuple["InputContainer", "VideoStream", str]]:
    """Open a file or bytes; yields the container, the first stream of pictures and a name."""
    check_decoder()
    name = "video bytes" if isinstance(source, bytes) else str(source)
    with unreadable(name):
        file = BytesIO(source) if isinstance(source, bytes) else open_regular(source)
    with file:
        with unreadable(name, "it is broken: "):
            container, stream = _open(file, name)
        with container:
            yield container, stream, name


def check_decoder() -> None:
    """Raise ValueError if PyAV is missing."""
    if find_spec("av") is None:
        raise ValueError("video files are decoded by PyAV: pip install 'fullstride[video]'")


class FrameIndex(NamedTuple):
    """The times of a stream's frames, in units of its time base."""

    times: Sequence[int]  # rising
    # times of the key frames, rising; (): only the decoder knows the frames, and always begins at
    # the first
    keys: Sequence[int] = ()


def _open(file: BinaryIO, name: str) -> tuple["InputContainer", "VideoStream"]:
    import av  # an optional extra
    from av.error import FFmpegError
    from av.stream import Disposition

    options = {
        "format_whitelist": FORMATS,
        "protocol_whitelist": "none",
        "max_pixels": str(round(1e6 * MAX_MEGAPIXELS)),
    }
    try:
        # the pictures are fine even if titles are not in UTF-8, for which PyAV 19 needs no argument
        lenient: Any = {"metadata_errors": "replace"} if int(av.__version__[:2]) < 19 else {}
        container = av.open(file, "r", options=options, **lenient)
    except FFmpegError as error:
        kinds = "an MP4, MOV, MKV, WebM, AVI, MPEG, FLV or WMV video"
        is_empty = not file.seek(0, os.SEEK_END)
        problem = "it is empty" if is_empty else f"it is not {kinds}, or broken"
        raise UnreadableImage(name, problem) from error
    try:
        covers = Disposition.attached_pic
        streams = [each for each in container.streams.video if not each.disposition & covers]
        if not streams:
            raise UnreadableImage(name, "it has no pictures, only sound or text")
        stream = streams[0]
        context = stream.codec_context
        if context is None:
            raise UnreadableImage(name, "its pictures are in a format that FFmpeg does not know")
        if context.width * context.height > 1e6 * MAX_MEGAPIXELS:
            raise UnreadableImage(
                name,
                f"its frames have {context.width} x {context.height} pixels, and "
                f"{MAX_MEGAPIXELS:g} megapixels are the limit",
            )
        # one thread: the processes of the loader share the cores
        context.thread_type, context.thread_count = "NONE", 1
    except BaseException:
        container.close()
        raise
    return container, stream


def index_of(container: "InputContainer", stream: "VideoStream", name: str) -> FrameIndex:
    """The times of all frames, from the headers of packets without decoding where possible."""
    deadline, context = _Deadline(name), stream.codec_context
    times, keys, ends = [], [], _Ends(container)
    trusted = context.name not in UNSHOWN and has_times(container, stream)
    for packet in container.demux():
        deadline.check()
        ends.include(packet)
        if packet.stream_index != stream.index:
            continue
        if packet.is_corrupt:
            raise UnreadableImage(name, f"it is cut short or damaged at frame {len(times)}")
        if not packet.size or packet.is_discard:
            continue
        if packet.pts is None or not trusted:
            break
        times.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
        _check_length(name, len(times))
    else:
        ends.check(name)
        if keys and len({*times}) == len(times):
            return FrameIndex(sorted(times), sorted(keys))
    container.seek(0)
    count = 0
    for _ in container.decode(stream):
        deadline.check()
        count += 1
        _check_length(name, count)
    rate, base = stream.average_rate, stream.time_base
    step = max(1, round(1 / (rate * base))) if rate and base else 1
    return FrameIndex(range(0, count * step, step))


def has_times(container: "InputContainer", stream: "VideoStream") -> bool:
    """Whether packets have the times at which frames are shown."""
    timed = TIMED if stream.codec_context.has_b_frames else (*TIMED, "avi")
    return any(each in timed for each in container.format.name.split(","))


@dataclass
class _Ends:
    """Recognises a file that is cut short by the last time of each stream so far."""

    container: "InputContainer"
    last: dict[int, int] = field(default_factory=dict)

    def include(self, packet: "Packet") -> None:
        if packet.pts is not None:
            number = packet.stream_index
            self.last[number] = max(self.last.get(number, 0), packet.pts)

    def check(self, name: str) -> None:
        length = (self.container.duration or 0) / MICROSECONDS
        streams = self.container.streams
        ends = (float(at * (streams[n].time_base or 0)) for n, at in self.last.items())
        end = max(ends, default=0.0)
        if end - (self.container.start_time or 0) / MICROSECONDS < 0.9 * length - 1:
            raise UnreadableImage(name, f"it is cut short after {end:.1f} of {length:.1f} s")


def in_order(
    container: "InputContainer", stream: "VideoStream", name: str
) -> Iterator["VideoFrame"]:
    """All frames, packet by packet, up to the end or to the place where the file is broken."""
    deadline, ends, count = _Deadline(name), _Ends(container), 0
    for packet in container.demux():
        deadline.check()
        ends.include(packet)
        if packet.stream.index != stream.index:
            continue
        for frame in stream.decode(packet):
            if frame.is_corrupt or packet.is_corrupt:
                raise UnreadableImage(name, f"it is cut short or damaged at frame {count}")
            count += 1
            yield frame
            deadline = _Deadline(name)
    ends.check(name)


@dataclass(frozen=True)
class FrameReader:
    container: "InputContainer"
    stream: "VideoStream"
    index: FrameIndex
    name: str

    def read(self, numbers: Iterable[int]) -> Iterator[Image.Image]:
        """The frames `numbers`, which rise; other frames are decoded only if these need them."""
        wanted = list(numbers)
        if not wanted:
            return
        size, done, key = None, 0, self._key(wanted[0])
        needed = {self.index.times[number] for number in wanted}
        picture_of = Pictures()
        with unreadable(self.name, "it is broken: "):
            while done < len(wanted):
                before = done
                for frame in self._decode(key, wanted[done:], needed):
                    if frame.is_corrupt:
                        raise UnreadableImage(self.name, self._at(wanted[done], "is damaged"))
                    picture = picture_of(frame)
                    size = check_size(self.name, picture.size, size)
                    done += 1
                    yield picture
                if done == len(wanted):
                    return
                if done > before:
                    key = self._key(wanted[done])
                elif key:  # the first frames after some key frames need frames before
                    key = 0
                else:
                    raise UnreadableImage(self.name, self._at(wanted[done], "cannot be decoded"))

    def _key(self, number: int) -> int:
        """The index of the last key frame up to a frame; 0 if there is none."""
        return max(0, bisect_right(self.index.keys, self.index.times[number]) - 1)

    def _at(self, number: int, what: str) -> str:
        return f"its frame {number} of {len(self.index.times)} {what}"

    def _decode(
        self, key: int, wanted: Sequence[int], needed: Collection[int]
    ) -> Iterator["VideoFrame"]:
        """The frames `wanted` from a key frame on, until one is missing or a jump is faster."""
        times, keys = self.index
        deadline, position = _Deadline(self.name), 0
        self._seek(key)
        for count, frame in enumerate(self._frames(needed)):
            deadline.check()
            shown = frame.pts if keys else times[min(count, len(times) - 1)]
            at = times[wanted[position]]
            if shown is not None and shown > at:
                return
            if shown == at:
                yield frame
                position += 1
                if position == len(wanted):
                    return
                ahead = self._key(wanted[position])
                if keys and bisect_right(times, keys[ahead]) - wanted[position - 1] > MIN_JUMP:
                    return
                deadline = _Deadline(self.name)

    def _seek(self, key: int) -> None:
        if self.index.keys:
            self.container.seek(self.index.keys[key], stream=self.stream)
        else:
            self.container.seek(0)

    def _frames(self, needed: Collection[int]) -> Iterator["VideoFrame"]:
        """The frames from here on, except unneeded frames that no other frame refers to."""
        context = self.stream.codec_context
        for packet in self.container.demux(self.stream):
            unused = packet.pts is not None and packet.pts not in needed
            skip = "NONREF" if self.index.keys and unused else "DEFAULT"
            if context.skip_frame != skip:
                context.skip_frame = skip
            yield from packet.decode()


class Pictures:
    """Converts decoded frames to upright RGB.

    Keeps libswscale's tables, which take longer to compute than converting a frame.
    """

    def __init__(self) -> None:
        from av.video.reformatter import VideoReformatter  # an optional extra

        self.reformatter = VideoReformatter()

    def __call__(self, frame: "VideoFrame") -> Image.Image:
        # RGB of four bytes would be faster, but libswscale omits columns at some widths
        rgb = self.reformatter.reformat(frame, format="rgb24", threads=1)
        picture = Image.fromarray(rgb.to_ndarray())
        turn = TURNS.get(round(frame.rotation / 90) % 4)
        return picture if turn is None else picture.transpose(turn)


def check_frames(name: str, frames: int) -> None:
    if frames < 2:
        count = "one frame" if frames else "no frames"
        raise UnreadableImage(name, f"it has {count}: a video has two or more")
    _check_length(name, frames)


def _check_length(name: str, frames: int) -> None:
    if frames > MAX_FRAMES:
        raise UnreadableImage(name, f"it has more than {MAX_FRAMES:,} frames: cut it into parts")


def check_size(name: str, size: Size, first: Size | None) -> Size:
    if first is not None and size != first:
        (w, h), (width, height) = first, size
        raise UnreadableImage(
            name, f"it has frames of {w} x {h} pixels and of {width} x {height}: cut it there"
        )
    return size


class _Deadline:
    """The time at which waiting for a frame ends."""

    def __init__(self, name: str):
        self.name, self.end = name, time.monotonic() + MAX_WAIT_S

    def check(self) -> None:
        if time.monotonic() > self.end:
            raise UnreadableImage(
                self.name, f"its next frame takes more than {MAX_WAIT_S:g} s: encode it again"
            )


@contextmanager
def unreadable(name: str, before: str = "") -> Iterator[None]:
    """Turn any error into UnreadableImage; FFmpeg and PyAV raise many kinds on a broken file."""
    try:
        yield
    except UnreadableImage:
        raise
    except Exception as error:
        raise UnreadableImage(name, f"{before}{reason(error, name)}") from error


SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".flv", ".3gp")
SUFFIXES += (".wmv",)


@dataclass(frozen=True)
class Video:
    """An open video: the number and the times of its frames, and a function that decodes them."""

    frames: int  # two or more
    rate: float | None  # frames per second, on average; None for a folder
    times: tuple[float, ...] | None  # seconds of each frame after the first; None for a folder
    # rising numbers of frames from 0 -> the frames, upright, of one size, "L" or "RGB"; lazily
    read: Callable[[Iterable[int]], Iterator[Image.Image]]


class TimedFrame(NamedTuple):
    seconds: float  # after the first frame
    picture: Image.Image  # upright, "L" or "RGB"


@contextmanager
def open_video(source: Path | bytes | np.ndarray) -> Iterator[Video]:
    """Open a video file, its bytes, a folder of frames in natural order, or uint8 (T, H, W, C).

    Frames are counted in the order of showing, whatever the time between them.

    Raises UnreadableImage, here or when frames are read, if the source is no video, broken, cut
    short, without pictures, larger than the limits above, or shorter than two frames.
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
    with open_stream(source) as (container, stream, name):
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

    Nothing is read ahead: the frames before the broken place of a file are yielded. Raises
    UnreadableImage there, and for sources that `open_video` refuses.
    """
    if isinstance(source, Path) and source.is_dir():
        raise UnreadableImage(str(source), "it is a folder of frames, which have no times")
    with open_stream(source) as (container, stream, name):
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
    """Reads the middle frame of the video with a name, as a picture of it."""

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
        shown = [each.name for each in entries if not each.name.startswith(".")]
        names = [name for name in shown if name.lower().endswith(PICTURES)]

    def natural(name: str) -> list[tuple[int, str]]:
        parts = re.split(r"(\d+)", name)
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    return sorted(names, key=lambda name: (natural(name), name))


def frames_size(folder: Path) -> int:
    """The bytes of the readable frames in a folder; 0 if there are none."""
    size = 0
    with suppress(OSError):  # the folder cannot be listed
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
