"""Writes scenes and clips as files for the readers of all tasks."""

import csv
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fullstride.data.readers.videos import check_decoder
from fullstride.examples.scenes import (
    FRAMES,
    KINDS,
    LOOK,
    SPLITS,
    STEPS,
    Look,
    Scene,
    split_clip,
    split_scene,
)
from fullstride.io.writing import MAX_JSON_BYTES, Output, atomic_write, has_keys, read_regular

COUNTS = {"train": 1000, "val": 200, "test": 500}
SIDES = (24, 4096)  # pixels
DESCRIPTION = "scenes of fullstride"


def _is_ours(folder: Path) -> bool:
    files = (folder / "annotations" / f"instances_{split}.json" for split in SPLITS)
    try:
        text = read_regular(next(filter(Path.is_file, files), folder), MAX_JSON_BYTES)
        return json.loads(text)["info"]["description"] == DESCRIPTION
    except (OSError, ValueError, KeyError, TypeError):
        return False


OUTPUT = Output(
    "a data set of scenes",
    "",
    _is_ours,
    (
        *(f"{split}/{name}" for split in SPLITS for name in ("*.png", "labels.csv")),
        "annotations/instances_*.json",
        "masks/classes.txt",
        "masks/*/*.png",
        "depth/*/*.png",
    ),
)


def write_scenes(
    folder: Path,
    counts: Mapping[str, int] = COUNTS,
    side: int = 96,
    seed: int = 0,
    kind: str = "digits",
    *,
    look: Look = LOOK,
    one_class: bool = False,
) -> None:
    """Write a data set of scenes for the tasks multilabel, detect, segment and depth.

    Each split has SPLIT/00000.png and so on, SPLIT/labels.csv, annotations/instances_SPLIT.json
    (COCO's format, with boxes and masks of visible pixels) and masks/SPLIT/00000.png, whose pixels
    are line numbers of masks/classes.txt, with 0 for "background". The kind "floor" also has
    depth/SPLIT/00000.png with 16-bit depths in millimetres, 0 where there is none.

    `kind` is "digits" before a photograph, or "floor" for digits that stand on a floor. Another
    `seed` gives other scenes of the same digits and photographs. An earlier data set of scenes in
    the folder is replaced. Raises ValueError in one line, also without the extra `examples`.
    """
    check_scenes(counts, side, seed)
    if kind not in KINDS:
        raise ValueError(f"scenes of the kind {kind!r}: use {' or '.join(KINDS)}")
    classes = ("digit",) if one_class else tuple("0123456789")
    with atomic_write(folder, OUTPUT) as temporary:
        for path in (temporary / "annotations", temporary / "masks"):
            path.mkdir(parents=True)
        (temporary / "masks" / "classes.txt").write_text("\n".join(("background", *classes, "")))
        for split, count in counts.items():
            scenes = (split_scene(number, side, seed, split, kind, look) for number in range(count))
            if one_class:
                scenes = (each._replace(labels=0 * each.labels) for each in scenes)
            _write_split(temporary, split, scenes, classes)


def check_scenes(counts: Mapping[str, int], side: int, seed: int) -> None:
    """Raise ValueError for splits, numbers, a side or a seed that scenes cannot have."""
    if others := [split for split in counts if split not in SPLITS]:
        raise ValueError(f"scenes have no split {others[0]!r}: use {', '.join(SPLITS)}")
    if wrong := [split for split, count in counts.items() if count < 1]:
        raise ValueError(f"{counts[wrong[0]]} scenes for {wrong[0]}: use at least 1")
    low, high = SIDES
    if not low <= side <= high:
        raise ValueError(f"scenes of {side} pixels a side: use {low} to {high}")
    if seed < 0:
        raise ValueError(f"seed {seed}: use 0 or more")


def _write_split(
    folder: Path, split: str, scenes: Iterable[Scene], classes: tuple[str, ...]
) -> None:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    rows = [("path", "labels")]
    for number, scene in enumerate(scenes):
        name, (height, width) = f"{number:05}.png", scene.mask.shape
        _save(folder / split / name, scene.image)
        numbers = np.array([0, *(scene.labels + 1)], np.uint8)  # class numbers, 0: none
        _save(folder / "masks" / split / name, numbers[scene.mask])
        if scene.depth is not None:
            _save(folder / "depth" / split / name, scene.depth)
        rows.append((name, ";".join(classes[label] for label in sorted({*scene.labels.tolist()}))))
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        annotations += [
            {"id": len(annotations) + index, "image_id": number, **_annotation(scene, index)}
            for index in range(1, len(scene.labels) + 1)
        ]
    with (folder / split / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    content = {
        "info": {"description": DESCRIPTION},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": index, "name": name} for index, name in enumerate(classes, 1)],
    }
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def _save(path: Path, pixels: np.ndarray, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def _annotation(scene: Scene, number: int) -> dict[str, Any]:
    """The COCO annotation of digit `number`, from 1, with a mask of uncompressed run lengths."""
    visible = scene.mask == number
    runs = [(value, len([*run])) for value, run in groupby(visible.T.ravel().tolist())]
    counts = [0] * bool(runs[0][0]) + [length for _, length in runs]  # of zeros, then of ones, ...
    left, top, right, bottom = scene.boxes[number - 1].tolist()
    return {
        "category_id": int(scene.labels[number - 1]) + 1,
        "bbox": [left, top, right - left, bottom - top],
        "area": int(visible.sum()),
        "iscrowd": 0,
        "segmentation": {"counts": counts, "size": [*visible.shape]},
    }


# ---- clips of motion: folders of frames, or videos, by class


MOTION_DESCRIPTION = "motion.json"
MIN_FRAMES, MAX_FRAMES = 2, 1000
RATE = 25  # frames per second of a video
MOTION_OUTPUT = Output(
    "a data set of clips",
    "",
    lambda folder: has_keys("directions", "frames", "seed")(folder / MOTION_DESCRIPTION),
    (
        MOTION_DESCRIPTION,
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

    A clip is a folder of frames, SPLIT/CLASS/00000/000.png and so on, or with `as_videos` a lossy
    H.264 file SPLIT/CLASS/00000.mp4. See `write_scenes` for the arguments. Raises ValueError in one
    line, also without the extras `examples` and, for videos, `video`.
    """
    check_scenes(counts, side, seed)
    if not MIN_FRAMES <= frames <= MAX_FRAMES:
        raise ValueError(f"clips of {frames} frames: use {MIN_FRAMES} to {MAX_FRAMES}")
    if as_videos:
        check_decoder()
        if side % 2:
            raise ValueError(f"videos of {side} pixels a side: H.264 needs an even number")
    with atomic_write(folder, MOTION_OUTPUT) as temporary:
        for split, count in counts.items():
            for number in range(count):
                clip = split_clip(number, side, seed, split, frames)
                place = temporary / split / clip.direction / f"{number:05}"
                place.parent.mkdir(parents=True, exist_ok=True)
                if as_videos:
                    _write_video(place.with_suffix(".mp4"), clip.pixels)
                    continue
                for index, frame in enumerate(clip.pixels):
                    _save(place / f"{index:03}.png", frame, compress_level=1)
        content = {"directions": [*STEPS], "frames": frames, "seed": seed}
        (temporary / MOTION_DESCRIPTION).write_text(json.dumps(content))


def _write_video(path: Path, pixels: np.ndarray) -> None:
    import av  # an optional extra

    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"crf": "10"})
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
