"""How many frames of clips per CPU-second does the loader bring, compared with plain PyAV?

    python benchmarks/video_decode.py --out benchmarks/video_decode.json

From a file to clips of 32 frames with stride 2 from a random frame on. The loader also crops,
resizes to 224 x 224 pixels and flips, in one process and one thread; its reader alone ends with RGB
pictures, as the others do. Plain PyAV jumps to the last
key frame before the clip, decodes up to its last frame, and converts its frames to RGB arrays; it
crops nothing. "PyAV, tuned" does so in one thread with one converter for all frames. Of a folder of
JPEGs, plain PyAV opens each file, and Pillow decodes it.

All pipelines read the same clips, and alternate in every round, so that a busy moment affects all
of them. CPU-seconds are user and system time of the process, with all its threads. Videos are 250
frames of H.264 by x264's defaults: a window moves over scikit-learn's two photographs, with noise.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import av
import numpy as np
import torch
from av.video.reformatter import VideoReformatter
from PIL import Image
from sklearn.datasets import load_sample_image

from fullstride.data.dataset import Images
from fullstride.data.loader import Batches, LoaderOptions
from fullstride.data.readers.videos import MiddleFrame, frame_names, open_video
from fullstride.data.transforms.clips import ClipTrainView
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import spread
from fullstride.nets.preprocessing import Preprocessing

FRAMES, NOISE, RATE, QUALITY = 250, 3.0, 30, 90
PRE = Preprocessing(resolution=224, frames=32, frame_stride=2)
SPAN = (PRE.frames - 1) * PRE.frame_stride + 1
OURS, READER, PLAIN = "fullstride, loader", "fullstride, reader alone", "PyAV, plain"
Decode = Callable[[Path, list[int]], list[np.ndarray]]  # the frames of these numbers


def drawn(size: tuple[int, int], seed: int) -> list[np.ndarray]:
    photo = load_sample_image(("china.jpg", "flower.jpg")[seed % 2])
    rng, (w, h) = np.random.default_rng(seed), size
    scale = 1.25 * max(w / photo.shape[1], h / photo.shape[0])
    large = Image.fromarray(photo).resize([round(scale * each) for each in photo.shape[1::-1]])
    pixels = np.asarray(large)
    noise = rng.normal(0, NOISE, (8, h, w, 3))
    frames = []
    for number in range(FRAMES):
        angle = 2 * np.pi * number / 180 + seed
        x = round((pixels.shape[1] - w) * (1 + np.cos(angle)) / 2)
        y = round((pixels.shape[0] - h) * (1 + np.sin(angle)) / 2)
        frame = pixels[y : y + h, x : x + w] + noise[number % 8]
        frames.append(np.clip(frame, 0, 255).astype(np.uint8))
    return frames


def write_file(path: Path, frames: list[np.ndarray]) -> None:
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=RATE)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def write_folder(path: Path, frames: list[np.ndarray]) -> None:
    path.mkdir()
    for number, pixels in enumerate(frames):
        Image.fromarray(pixels).save(path / f"{number:05}.jpg", quality=QUALITY)


def reader(path: Path, numbers: list[int]) -> list[np.ndarray]:
    with open_video(path) as video:
        return [np.asarray(picture) for picture in video.read(numbers)]


def plain_file(path: Path, numbers: list[int], tuned: bool = False) -> list[np.ndarray]:
    converter = VideoReformatter()
    with av.open(path) as container:
        stream = container.streams.video[0]
        step = round(1 / (RATE * stream.time_base))
        if tuned:
            stream.codec_context.thread_type, stream.codec_context.thread_count = "NONE", 1
        container.seek(numbers[0] * step, stream=stream)
        wanted, pixels = {number * step for number in numbers}, []
        for frame in container.decode(stream):
            if frame.pts in wanted:
                if tuned:
                    rgb = converter.reformat(frame, format="rgb24", threads=1)
                    pixels.append(rgb.to_ndarray())
                else:
                    pixels.append(frame.to_ndarray(format="rgb24"))
            if len(pixels) == len(numbers):
                break
    return pixels


def plain_folder(path: Path, numbers: list[int]) -> list[np.ndarray]:
    names, pixels = frame_names(path), []
    for number in numbers:
        with av.open(path / names[number]) as container:
            frame = next(container.decode(video=0))
            pixels.append(frame.to_ndarray(format="rgb24"))
    return pixels


def pillow_folder(path: Path, numbers: list[int]) -> list[np.ndarray]:
    names = frame_names(path)
    return [np.asarray(Image.open(path / names[number]).convert("RGB")) for number in numbers]


def cases(folder: Path, videos: int) -> dict[str, tuple[list[Path], dict[str, Decode]]]:
    """The videos of each case, and what else decodes them."""
    made = {}
    of_files = {
        READER: reader,
        PLAIN: plain_file,
        "PyAV, tuned": lambda path, numbers: plain_file(path, numbers, tuned=True),
    }
    of_folders = {READER: reader, PLAIN: plain_folder, "Pillow": pillow_folder}
    for name, size, write, others in (
        ("MP4, 340 x 256", (340, 256), write_file, of_files),
        ("MP4, 640 x 360", (640, 360), write_file, of_files),
        ("JPEGs, 340 x 256", (340, 256), write_folder, of_folders),
    ):
        paths = []
        for seed in range(videos):
            suffix = ".mp4" if write is write_file else ""
            paths.append(folder / f"{len(made)}-{seed}{suffix}")
            write(paths[-1], drawn(size, seed))
        made[name] = paths, others
    return made


def rates(paths: list[Path], others: dict[str, Decode], number: int) -> dict[str, float]:
    """Frames per CPU-second of each pipeline, over the clips of an epoch."""
    names = tuple(map(str, paths))
    images = Images(names, (0,) * len(names), MiddleFrame(Path), Path)
    found = {}
    start = time.process_time()
    batches = Batches(
        images, ClipTrainView(PRE), LoaderOptions(batch=1), to_x=lambda pixels, pre: pixels
    )
    clips = sum(len(batch.x) for batch in batches.epoch(number))
    found[OURS] = PRE.frames * clips / (time.process_time() - start)
    assert clips == len(paths)
    starts = [  # the first draw of the view
        int(np.random.default_rng([0, number, index]).integers(FRAMES - SPAN + 1))
        for index in range(len(paths))
    ]
    for name, decode in others.items():
        start, count = time.process_time(), 0
        for path, first in zip(paths, starts, strict=True):
            count += len(decode(path, [*range(first, first + SPAN, PRE.frame_stride)]))
        found[name] = count / (time.process_time() - start)
        assert count == PRE.frames * len(paths)
    return found


def measure(videos: int, rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        every = cases(Path(folder), videos)
        kilobits = {
            name: statistics.mean(
                sum(each.stat().st_size for each in ([path] if path.is_file() else path.iterdir()))
                for path in paths
            )
            * 8
            / 1000
            / (FRAMES / RATE)
            for name, (paths, _) in every.items()
        }
        values: dict[str, dict[str, list[float]]] = {name: {} for name in every}
        for number in range(rounds + 1):  # the first is a warmup
            for name, (paths, others) in every.items():
                for pipeline, rate in rates(paths, others, number).items():
                    if number:
                        values[name].setdefault(pipeline, []).append(rate)
    for name, each in values.items():
        for pipeline, samples in each.items():
            ratios = [a / b for a, b in zip(each[OURS], samples, strict=True)]
            rows.append(
                {
                    "videos": name,
                    "kilobits_per_s": round(kilobits[name]),
                    "pipeline": pipeline,
                    "frames_per_cpu_s": round(statistics.median(samples), 1),
                    "spread": round(spread(samples), 3),  # (p90 - p10) / median
                    "ours_to_this": round(statistics.median(ratios), 3),
                    "least": round(min(ratios), 3),
                    "most": round(max(ratios), 3),
                }
            )
    return rows


def page(result: dict) -> str:
    environment = result["environment"]
    packages = ", ".join(f"{name} {each}" for name, each in result["packages"].items())
    lines = [
        "# Frames of clips per CPU-second",
        "",
        "Written by `benchmarks/video_decode.py`, which says what each pipeline does: the loader",
        "also crops, resizes and flips, and the others only decode to RGB. Clips of 32 frames with",
        f"stride 2 of {result['protocol']['videos']} videos of {FRAMES} frames, medians of "
        f"{result['protocol']['rounds']} rounds.",
        "",
        "| videos | kbit/s | pipeline | frames per CPU-s | loader / this | least to most |",
        "|---|--:|---|--:|--:|---|",
    ]
    lines += [
        f"| {row['videos']} | {row['kilobits_per_s']} | {row['pipeline']} | "
        f"{row['frames_per_cpu_s']:.0f} | {row['ours_to_this']:.2f} | "
        f"{row['least']:.2f} to {row['most']:.2f} |"
        for row in result["rows"]
    ]
    lines += ["", f"{environment['device']}; {packages};"]
    lines.append(f"{environment['date'][:10]}, commit {environment['commit']}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--videos", type=int, default=6, help="of each kind")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="a JSON file to write, with a page beside it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "protocol": {"videos": args.videos, "rounds": args.rounds, "frames": FRAMES},
        "environment": asdict(Environment.here()),
        "packages": {name: version(name) for name in ("av", "pillow", "numpy", "torch")},
        "rows": measure(args.videos, args.rounds),
    }
    print(page(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(page(result))


if __name__ == "__main__":
    main()
