"""How do clips of motion become a data set? Folders of frames, or videos, by class."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from fullstride.data.readers.video_files import check_decoder
from fullstride.data.scenes.files import COUNTS, check_scenes
from fullstride.data.scenes.motion import FRAMES, STEPS, split_clip
from fullstride.data.scenes.sources import SPLITS
from fullstride.outputs import Output, has_keys
from fullstride.writing import atomic_write

DESCRIPTION = "motion.json"
MIN_FRAMES, MAX_FRAMES = 2, 1000
RATE = 25  # frames per second of a video
OUTPUT = Output(
    "a data set of clips",
    "",
    lambda folder: has_keys("directions", "frames", "seed")(folder / DESCRIPTION),
    (
        DESCRIPTION,
        *(f"{split}/*/*/*.png" for split in SPLITS),
        *(f"{split}/*/*.mp4" for split in SPLITS),
    ),
)


def write_motion(
    folder: Path,
    counts: Mapping[str, int] = COUNTS,
    side: int = 32,
    seed: int = 0,
    frames: int = FRAMES,
    *,
    as_videos: bool = False,
) -> None:
    """Write a data set for the task video: clips of four directions of motion.

    A clip is a folder of frames, SPLIT/CLASS/00000/000.png and so on.

    Args:
        folder: An earlier data set of clips there is replaced.
        counts: Clips by split, of "train", "val" and "test".
        side: Pixels of the squares.
        seed: Another one gives other clips of the same digits and photographs.
        frames: Of a clip.
        as_videos: Whether clips are files SPLIT/CLASS/00000.mp4, in H.264 with losses, instead.

    Raises ValueError in one line, also without the extras `examples` and, for videos, `video`.
    """
    check_scenes(counts, side)
    if not MIN_FRAMES <= frames <= MAX_FRAMES:
        raise ValueError(f"clips of {frames} frames: use {MIN_FRAMES} to {MAX_FRAMES}")
    if as_videos:
        check_decoder()
        if side % 2:
            raise ValueError(f"videos of {side} pixels a side: H.264 needs an even number")
    write = _write_video if as_videos else _write_frames
    with atomic_write(folder, OUTPUT) as temporary:
        for split, count in counts.items():
            for number in range(count):
                clip = split_clip(number, side, seed, split, frames)
                place = temporary / split / clip.direction
                place.mkdir(parents=True, exist_ok=True)
                write(place / f"{number:05}", clip.pixels)
        content = {"directions": [*STEPS], "frames": frames, "seed": seed}
        (temporary / DESCRIPTION).write_text(json.dumps(content))


def _write_frames(folder: Path, pixels: np.ndarray) -> None:
    folder.mkdir()
    for number, frame in enumerate(pixels):
        Image.fromarray(frame).save(folder / f"{number:03}.png", compress_level=1)


def _write_video(path: Path, pixels: np.ndarray) -> None:
    import av  # an optional extra

    with av.open(str(path) + ".mp4", "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"crf": "10"})
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
