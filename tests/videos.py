"""Videos of moving shapes, written by PyAV, and their frames as they were drawn."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image


def drawn(frames: int, size: tuple[int, int] = (64, 48), seed: int = 0) -> Iterator[np.ndarray]:
    """Frames of a square that moves over a texture: uint8 (H, W, 3)."""
    w, h = size
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:h, :w]
    smooth = np.stack([x * 200 / w, y * 200 / h, (x + y) % 200], -1)
    texture = np.clip(smooth + rng.normal(0, 6, (h, w, 3)), 0, 255).astype(np.uint8)
    side = max(2, h // 4)
    for number in range(frames):
        frame = texture.copy()
        left, top = 2 * number % (w - side), (seed + number) % (h - side)
        frame[top : top + side, left : left + side] = (250, 5 * number % 250, 20)
        yield frame


def write_video(
    path: Path | BytesIO,
    frames: int = 20,
    size: tuple[int, int] = (64, 48),
    *,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    times: list[int] | None = None,  # of each frame, in units of 1 / rate
    rate: int = 25,
    turn: int = 0,  # degrees to the left that a player is told to turn the frames
    form: str | None = None,
    seed: int = 0,
    options: Mapping[str, str] | None = None,
) -> Path | BytesIO:
    """A video of `drawn` frames."""
    with av.open(path, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=dict(options or {}))
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        if turn:
            stream.set_display_rotation(turn)
        for number, pixels_hwc in enumerate(drawn(frames, size, seed)):
            frame = av.VideoFrame.from_ndarray(pixels_hwc, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[number], Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_frames(folder: Path, frames: int = 20, size: tuple[int, int] = (64, 48), **how) -> Path:
    """A folder of the frames as PNGs, whose natural order is not that of the alphabet."""
    folder.mkdir(parents=True)
    for number, pixels in enumerate(drawn(frames, size, **how)):
        Image.fromarray(pixels).save(folder / f"img{number}.png")
    return folder


def all_frames(source: Path | bytes) -> np.ndarray:
    """All frames by the shortest program: (T, H, W, 3), as they are stored."""
    with av.open(BytesIO(source) if isinstance(source, bytes) else source) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])
