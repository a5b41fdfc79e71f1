"""What do all images of a data set look like? Each is decoded once, to a thumbnail of 32 x 32."""

import hashlib
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from fullstride.autofit.inspection.perceptual_hash import Pictures, compared, concatenated
from fullstride.data.dataset import DataSet, Images, UnreadableImage
from fullstride.data.loader import FILES_PER_WORKER, exit_on_interrupt
from fullstride.data.readers.decode import Crop, Size, decode_crop
from fullstride.storage import allow_open_files

SPLITS = ("train", "minival", "test")
SIDE = 32  # pixels of a thumbnail
BLOCK = 64  # images that a worker returns at once
REPORT_S = 10.0  # between two lines of progress


class Facts(NamedTuple):
    """What is read of one image beside its thumbnail."""

    shorter_side: int  # pixels
    longer_side: int
    digest: bytes  # of the size and the decoded pixels
    reduced: bool  # whether a JPEG was decoded at a fraction of its size


@dataclass(frozen=True)
class Looks:
    """The N readable images of a data set: of train, then of minival, then of test, in order."""

    pictures: Pictures
    splits: np.ndarray  # int64 (N,): index in SPLITS
    indices: np.ndarray  # int64 (N,): index in the split
    facts: tuple[Facts, ...]
    unreadable: dict[str, str]  # name -> reason


def look_at_images(data: DataSet, workers: int = 0) -> Generator[str, None, Looks]:
    """Decode all images in `workers` processes, 0: in this one.

    Yields lines of progress. Raises ValueError if no image can be read.
    """
    parts: list[Pictures] = []
    splits, indices, facts, unreadable = [], [], [], {}
    total, done = sum(len(getattr(data, split)) for split in SPLITS), 0
    start = last = time.monotonic()
    for number, split in enumerate(SPLITS):
        images: Images = getattr(data, split)
        read = 0
        for block, results in _blocks(images, data.channels, workers):
            parts += [block] if block else []
            for index, result in enumerate(results, read):
                if isinstance(result, Facts):
                    splits.append(number)
                    indices.append(index)
                    facts.append(result)
                else:
                    unreadable[images.names[index]] = result
            read, done = read + len(results), done + len(results)
            if (now := time.monotonic()) - last > REPORT_S:
                last = now
                yield f"{done:,} of {total:,} images, {done / (now - start):,.0f} images/s"
    if not facts:
        name, reason = next(iter(unreadable.items()), ("", "there is none"))
        raise ValueError(f"none of the {total:,} images can be read; the first, {name!r}: {reason}")
    rate = total / max(time.monotonic() - start, 1e-9)
    yield f"{total:,} images decoded, {rate:,.0f} images/s"
    return Looks(concatenated(parts), np.array(splits), np.array(indices), tuple(facts), unreadable)


def same_pixels(data: DataSet, looks: Looks) -> np.ndarray:
    """int64 (N,): for each image the first one with the same pixels, which may be itself.

    JPEGs that were decoded at a fraction of their size, and are equal there, are decoded whole.
    """
    first = np.arange(len(looks.facts))
    by_digest: dict[bytes, list[int]] = {}
    for index, facts in enumerate(looks.facts):
        by_digest.setdefault(facts.digest, []).append(index)
    for same in by_digest.values():
        if len(same) > 1 and not any(looks.facts[index].reduced for index in same):
            first[same] = same[0]
        elif len(same) > 1:
            by_pixels: dict[bytes, int] = {}
            for index in same:
                images: Images = getattr(data, SPLITS[looks.splits[index]])
                with suppress(UnreadableImage):  # it may be too large to be decoded whole
                    whole = pixel_digest(images.picture(int(looks.indices[index])))
                    first[index] = by_pixels.setdefault(whole, index)
    return first


def look_at_image(images: Images, index: int, channels: int) -> tuple[np.ndarray, Facts]:
    """The thumbnail of one image, uint8 (SIDE, SIDE, channels). Raises UnreadableImage."""
    sizes: list[Size] = []

    def whole(size: Size) -> Crop:
        sizes.append(size)
        return Crop((0, 0, *size), (SIDE, SIDE))

    source = images.source(index)
    if isinstance(source, Image.Image):
        image, crop = source, whole(source.size)
    else:
        image, crop = decode_crop(source, channels, whole, oversampling=2)
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=crop.box)
    facts = Facts(min(sizes[0]), max(sizes[0]), pixel_digest(image), image.size != sizes[0])
    return np.asarray(small).reshape(SIDE, SIDE, channels), facts


def pixel_digest(image: Image.Image) -> bytes:
    digest = hashlib.blake2b(f"{image.mode} {image.size}".encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.digest()


Result = tuple[np.ndarray, Facts] | str  # a thumbnail and more, or why there is none
Block = tuple[Pictures | None, list[Facts | str]]  # of images in order; None: all are unreadable


@dataclass(frozen=True)
class _Thumbnails(Dataset[Result]):
    images: Images
    channels: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Result:
        try:
            return look_at_image(self.images, index, self.channels)
        except UnreadableImage as error:
            return error.reason


def _blocks(images: Images, channels: int, workers: int) -> Iterator[Block]:
    if not len(images):
        return
    workers = min(workers, len(images) // (2 * BLOCK))  # a process takes a while to start
    if workers:
        allow_open_files(16 + FILES_PER_WORKER * workers)
    yield from DataLoader(
        _Thumbnails(images, channels),
        batch_size=BLOCK,
        collate_fn=_block,
        num_workers=workers,
        worker_init_fn=exit_on_interrupt,
        generator=torch.Generator(),  # of its own, as the loader draws a seed from it
    )


def _block(results: list[Result]) -> Block:
    thumbnails = [result[0] for result in results if not isinstance(result, str)]
    facts = [result if isinstance(result, str) else result[1] for result in results]
    return compared(np.stack(thumbnails)) if thumbnails else None, facts
