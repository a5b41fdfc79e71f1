"""Finds images that show the same as an image of another split or class, block by block.

Only the closest partner of each image is stored, so that memory grows with the number of images,
not of pairs.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from fullstride.data.dataset import DataSet, Images, UnreadableImage
from fullstride.data.loader import FILES_PER_WORKER, exit_on_interrupt
from fullstride.data.readers.decode import HAD_ALPHA, Crop, Size, decode_crop
from fullstride.data.readers.videos import MiddleFrame
from fullstride.io.console import count_of
from fullstride.io.writing import allow_open_files
from fullstride.study.trials import Work

# A hash selects pairs of images that may show the same, and the correlation of thumbnails decides.
#
# The hash has 64 bits: the signs of the lowest frequencies of a discrete cosine transform, relative
# to their median, as Zauner describes ("Implementation and benchmarking of perceptual image hash
# functions", 2010). Different images of one kind, such as two shoes, have similar hashes too. So
# two images show the same only if the distance of their thumbnails, 1 - correlation, is also much
# smaller than the usual distance of similar images in the same data set.

MAX_BITS = 12  # most of 64 that differ
# Most distance / usual distance of similar images of the data set. Measured on 10,000 training and
# 10,000 test images of Fashion-MNIST: three pairs are below, which show the same product, and
# different products begin at 0.045. A JPEG of quality 50 is below for all images (docs/log.md).
MAX_RATIO = 0.04
SAMPLE = 2000  # images with which each image is compared to find the usual distance
SIMILAR = 0.01  # share of the sample that counts as similar
# The usual distance is at least this, so that images at 0.002 always show the same, also if all
# images are frames of a few films. On Fashion-MNIST this adds no pair.
LEAST_USUAL = 0.05
# Slight crops are tried for pairs that are not much farther apart, if similar images differ as much
# as photographs do: a crop of one product or solar cell resembles another one.
CROPS = (0.0, 0.02, 0.04)  # shares of a side that are removed at each edge
MAX_CROPPED_RATIO = 0.35
LEAST_USUAL_OF_CROPS = 0.3
FEW = 20  # least similar images, if the share `SIMILAR` of the sample has fewer
MIN_DEVIATION = 2.0  # of a thumbnail's values; an image of one colour looks like any other
POOL = 2  # pixels of a thumbnail / compared pixels, along a side
FREQUENCIES = 8  # of each direction
HASH_CHUNK = 1024  # images at once


@dataclass(frozen=True)
class ComparedImages:
    """The compared data of N images."""

    pooled: np.ndarray  # uint8 (N, side, side, C), with C of 1 or 3
    hashes: np.ndarray  # uint64 (N, 2): of the images, and of the images flipped left to right

    def __len__(self) -> int:
        return len(self.hashes)

    def subset(self, indices: np.ndarray) -> "ComparedImages":
        return ComparedImages(self.pooled[indices], self.hashes[indices])

    @cached_property
    def contrasted(self) -> np.ndarray:
        """bool (N,): whether the image is not of one colour."""
        flat = self.pooled.reshape(len(self), -1)
        chunks = [flat[i : i + HASH_CHUNK].std(1) for i in range(0, len(self), HASH_CHUNK)]
        return np.concatenate(chunks) >= MIN_DEVIATION

    @cached_property
    def usual_distance(self) -> np.ndarray:
        """float32 (N,): distance from each image to the similar images of the data set.

        Similar images are the closest hundredth of a sample, but at least `FEW`, or a fifth of a
        small data set. 1, the distance of unrelated images, if the data set is too small.
        """
        (chosen,) = np.nonzero(self.contrasted)
        sample = chosen[np.linspace(0, len(chosen) - 1, min(len(chosen), SAMPLE)).astype(int)]
        usual = np.ones(len(self), np.float32)
        rank = max(round(SIMILAR * len(sample)), min(FEW, len(sample) // 5), 3)
        if len(sample) <= rank:
            return usual
        reference = self.vectors(sample).T
        for start in range(0, len(self), HASH_CHUNK):
            rows = np.arange(start, min(start + HASH_CHUNK, len(self)))
            correlation = self.vectors(rows) @ reference
            closest = np.partition(correlation, -rank, axis=1)[:, -rank]
            usual[rows] = np.clip(1 - closest, LEAST_USUAL, 1)
        return usual

    def vectors(self, indices: np.ndarray, mirrored: bool = False) -> np.ndarray:
        """float32 (len(indices), features), of mean 0 and length 1."""
        pooled = self.pooled[indices]
        if mirrored:
            pooled = pooled[:, :, ::-1]
        return unit_vectors(pooled)

    def distances(self, a: np.ndarray, b: np.ndarray, mirrored: bool = False) -> np.ndarray:
        """float32 (pairs,): 1 - correlation of the images `a` with `b`, or with mirrored `b`."""
        return 1 - np.einsum("pf,pf->p", self.vectors(a), self.vectors(b, mirrored))

    def same(
        self, a: np.ndarray, b: np.ndarray, distances: np.ndarray, mirrored: bool = False
    ) -> np.ndarray:
        """bool (pairs,): whether the images `a` show the same as `b`, by their `distances`."""
        usual = np.minimum(self.usual_distance[a], self.usual_distance[b])
        same = distances <= MAX_RATIO * usual
        rows = np.flatnonzero(
            ~same & (distances <= MAX_CROPPED_RATIO * usual) & (usual >= LEAST_USUAL_OF_CROPS)
        )
        images = self.pooled[a[rows]], self.pooled[b[rows]]
        if mirrored:
            images = images[0], images[1][:, :, ::-1]
        for whole, other in (images, images[::-1]):
            same[rows] |= cropped_distances(whole, other) <= MAX_RATIO * usual[rows]
        return same & self.contrasted[a] & self.contrasted[b]


def unit_vectors(pixels: np.ndarray) -> np.ndarray:
    """(N, ...) -> float32 (N, features), of mean 0 and length 1."""
    vectors = pixels.reshape(len(pixels), math.prod(pixels.shape[1:])).astype(np.float32)
    vectors -= vectors.mean(1, keepdims=True)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)


def cropped_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N, side, side, C) twice -> float32 (N,): distances of the closest crop of `a` to `b`."""
    side, channels_first = a.shape[1], a.astype(np.float32).transpose(0, 3, 1, 2)
    vectors = unit_vectors(b.transpose(0, 3, 1, 2))
    crops = [crop_matrix(side, low, high) for low in CROPS for high in CROPS]
    closest = np.full(len(a), 2, np.float32)
    for rows in crops:
        resized = rows @ channels_first
        for columns in crops:
            correlation = np.einsum("pf,pf->p", unit_vectors(resized @ columns.T), vectors)
            np.minimum(closest, 1 - correlation, out=closest)
    return closest


def crop_matrix(side: int, low: float, high: float) -> np.ndarray:
    """float32 (side, side): removes these shares of a line of pixels, by linear interpolation."""
    places = low * side + (np.arange(side) + 0.5) * (1 - low - high) - 0.5
    distances = np.abs(np.clip(places, 0, side - 1)[:, None] - np.arange(side))
    return np.maximum(1 - distances, 0).astype(np.float32)


def compared(thumbnails: np.ndarray) -> ComparedImages:
    """The compared data of thumbnails: uint8 (N, side, side, C), side even, C of 1 or 3."""
    n, side, _, c = thumbnails.shape
    blocks = thumbnails.reshape(n, side // POOL, POOL, side // POOL, POOL, c)
    pooled = np.rint(blocks.mean((2, 4), dtype=np.float32)).astype(np.uint8)
    both = (perceptual_hashes(each) for each in (thumbnails, thumbnails[:, :, ::-1]))
    return ComparedImages(pooled, np.stack([*both], 1))


def concatenated(parts: Sequence[ComparedImages]) -> ComparedImages:
    return ComparedImages(
        np.concatenate([part.pooled for part in parts]),
        np.concatenate([part.hashes for part in parts]),
    )


def perceptual_hashes(thumbnails: np.ndarray) -> np.ndarray:
    """uint8 (N, side, side, C) -> uint64 (N,)"""
    side = thumbnails.shape[1]
    steps = (np.arange(side) + 0.5) * np.pi / side
    cosines = np.cos(np.arange(FREQUENCIES)[:, None] * steps).astype(np.float32)
    cosines[0] *= np.sqrt(0.5)
    weights = np.array([0.299, 0.587, 0.114] if thumbnails.shape[3] == 3 else [1], np.float32)
    gray = thumbnails.astype(np.float32) @ weights
    waves = (cosines @ gray @ cosines.T).reshape(len(gray), -1)
    signs = waves > np.median(waves[:, 1:], axis=1, keepdims=True)
    signs[:, 0] = False  # the mean is not distinctive
    return np.packbits(signs, axis=1).view(np.uint64)[:, 0]


ROWS, COLUMNS = 256, 4096  # hashes that are compared at once
CHUNK = 4096  # pairs whose thumbnails are compared at once
MAX_COMPARED = 200_000  # images; if there are more, only different splits are compared


class Pairs(NamedTuple):
    """P pairs of images that show the same."""

    a: np.ndarray  # int64 (P,)
    b: np.ndarray  # int64 (P,)
    distances: np.ndarray  # float32 (P,)
    mirrored: np.ndarray  # bool (P,)

    def where(self, rows: np.ndarray) -> "Pairs":
        return Pairs(*(values[rows] for values in self))

    def swapped(self) -> "Pairs":
        return self._replace(a=self.b, b=self.a)


@dataclass(frozen=True)
class Partners:
    """The closest image in some set for each of N images."""

    index: np.ndarray  # int64 (N,); -1: none
    distances: np.ndarray  # float32 (N,)
    mirrored: np.ndarray  # bool (N,)

    @staticmethod
    def none(images: int) -> "Partners":
        return Partners(
            np.full(images, -1), np.full(images, np.inf, np.float32), np.zeros(images, bool)
        )

    def update(self, pairs: Pairs) -> None:
        """Take `b` as the partner of `a` if it is closer, or as close and earlier."""
        order = np.lexsort((pairs.b, pairs.distances, pairs.a))
        pairs = pairs.where(order)
        pairs = pairs.where(np.diff(pairs.a, prepend=-1) > 0)
        before, distance = self.index[pairs.a], self.distances[pairs.a]
        is_first = (pairs.distances == distance) & (pairs.b < before)
        pairs = pairs.where((pairs.distances < distance) | is_first)
        self.index[pairs.a] = pairs.b
        self.distances[pairs.a] = pairs.distances
        self.mirrored[pairs.a] = pairs.mirrored


class Matches(NamedTuple):
    by_split: tuple[Partners, ...]  # the closest image in each split, for images of other splits
    by_class: Partners  # the closest image of another class


def find_matches(
    pictures: ComparedImages, in_split: np.ndarray, classes: np.ndarray, mirror: bool
) -> Work[Matches]:
    """The partners of each picture in other splits, and in another class.

    Yields lines of progress.

    Args:
        pictures: N different pictures.
        in_split: bool (N, splits): whether a picture is in a split.
        classes: int64 (N,): class of a picture; -1: none, or several.
        mirror: Whether mirrored pictures show the same.
    """
    n, splits = in_split.shape
    matches = Matches(tuple(Partners.none(n) for _ in range(splits)), Partners.none(n))
    split_bits = np.packbits(in_split, axis=1, bitorder="little")[:, 0]
    elsewhere = in_split.sum(1, keepdims=True) > in_split  # in another split than this one

    def concern(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Whether pairs are in several splits or in two classes."""
        of_class = classes[a], classes[b]
        apart = (of_class[0] != of_class[1]) & (of_class[0] >= 0) & (of_class[1] >= 0)
        return apart | (np.bitwise_count(split_bits[a] | split_bits[b]) > 1)

    everywhere = n <= MAX_COMPARED
    rows = np.arange(n) if everywhere else np.nonzero(in_split[:, 1:].any(1))[0]
    begin = last = time.monotonic()
    for start in range(0, len(rows), ROWS):
        for pairs in near_pairs(pictures, rows[start : start + ROWS], everywhere, mirror, concern):
            for each in (pairs, pairs.swapped()):
                for split, partners in enumerate(matches.by_split):
                    partners.update(each.where(in_split[each.b, split] & elsewhere[each.a, split]))
                a, b = classes[each.a], classes[each.b]
                matches.by_class.update(each.where((a != b) & (a >= 0) & (b >= 0)))
        if (now := time.monotonic()) - last > REPORT_S:
            last, left = now, max(0.0, 1 - (start + ROWS) / len(rows))
            done = 1 - left * left if everywhere else 1 - left
            seconds = (now - begin) * (1 / done - 1)
            yield f"{done:.0%} of the images compared, {seconds:,.0f} s left"
    return matches


def near_pairs(
    pictures: ComparedImages,
    rows: np.ndarray,
    later: bool,
    mirror: bool,
    concern: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Iterator[Pairs]:
    """The pairs of pictures in `rows`, which are sorted, with all or only with `later` pictures.

    `concern` maps the indices of pairs to whether they are compared.
    """
    (columns,) = np.nonzero(pictures.contrasted)
    columns = columns[columns > rows[0]] if later else columns
    rows = rows[pictures.contrasted[rows]]
    for start in range(0, len(columns), COLUMNS):
        block = columns[start : start + COLUMNS]
        for mirrored in (False, True) if mirror else (False,):
            hashes = pictures.hashes[block, int(mirrored)]
            bits = np.bitwise_count(pictures.hashes[rows, :1] ^ hashes)
            near = np.flatnonzero(bits <= MAX_BITS)  # in two dimensions it is ten times slower
            i, j = np.divmod(near, len(block))
            a, b = rows[i], block[j]
            is_wanted = (a < b if later else a != b) & concern(a, b)
            a, b = a[is_wanted], b[is_wanted]
            for first in range(0, len(a), CHUNK):
                chunk = slice(first, first + CHUNK)
                distances = pictures.distances(a[chunk], b[chunk], mirrored)
                same = pictures.same(a[chunk], b[chunk], distances, mirrored)
                flags = np.full(len(distances), mirrored)
                yield Pairs(a[chunk], b[chunk], distances, flags).where(same)


# Each image of a data set is decoded once, to a thumbnail of 32 x 32.

SPLITS = ("train", "val", "test")
SIDE = 32  # pixels of a thumbnail
BLOCK = 64  # images that a worker returns at once
REPORT_S = 10.0  # between two lines of progress


class Facts(NamedTuple):
    """Facts about one image, beside its thumbnail."""

    shorter_side: int  # pixels
    longer_side: int
    digest: bytes  # of the size and the decoded pixels
    reduced: bool  # whether a JPEG was decoded at a fraction of its size
    had_alpha: bool  # whether pixels are transparent


@dataclass(frozen=True)
class ImageIndex:
    """The N readable images of a data set: train, then validation, then test."""

    data: DataSet
    pictures: ComparedImages
    splits: np.ndarray  # int64 (N,): index in SPLITS
    indices: np.ndarray  # int64 (N,): index in the split
    facts: tuple[Facts, ...]
    unreadable: dict[str, str]  # name -> reason

    def place(self, number: int) -> tuple[Images, int]:
        """The images of an image's split, and its index in them."""
        return getattr(self.data, SPLITS[self.splits[number]]), int(self.indices[number])


def index_images(data: DataSet, workers: int = 0) -> Work[ImageIndex]:
    """Decode all images in `workers` processes, or in this one for 0.

    Yields lines of progress. Raises ValueError if no image can be read.
    """
    parts: list[ComparedImages] = []
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
                yield (
                    f"{done:,} of {count_of(total, 'image')}, {done / (now - start):,.0f} images/s"
                )
    if not facts:
        name, reason = next(iter(unreadable.items()), ("", "there is none"))
        among = count_of(total, "image")
        raise ValueError(f"none of the {among} can be read; the first, {name!r}: {reason}")
    rate = total / max(time.monotonic() - start, 1e-9)
    yield f"{count_of(total, 'image')} decoded, {rate:,.0f} images/s"
    return ImageIndex(
        data, concatenated(parts), np.array(splits), np.array(indices), tuple(facts), unreadable
    )


def same_pixels(all_images: ImageIndex) -> np.ndarray:
    """int64 (N,): for each image the first image with the same pixels, perhaps itself.

    JPEGs that are equal when decoded at a fraction of their size are decoded whole.
    """
    first = np.arange(len(all_images.facts))
    by_digest: dict[bytes, list[int]] = {}
    for index, facts in enumerate(all_images.facts):
        by_digest.setdefault(facts.digest, []).append(index)
    for same in by_digest.values():
        if len(same) > 1 and not any(all_images.facts[index].reduced for index in same):
            first[same] = same[0]
        elif len(same) > 1:
            by_pixels: dict[bytes, int] = {}
            for index in same:
                images, own = all_images.place(index)
                with suppress(UnreadableImage):  # it may be too large to be decoded whole
                    whole = pixel_digest(images.picture(own))
                    first[index] = by_pixels.setdefault(whole, index)
    return first


def read_thumbnail(images: Images, index: int, channels: int) -> tuple[np.ndarray, Facts]:
    """The thumbnail of one image, uint8 (SIDE, SIDE, channels). Raises UnreadableImage."""
    sizes: list[Size] = []

    def whole(size: Size) -> Crop:
        sizes.append(size)
        return Crop((0, 0, *size), (SIDE, SIDE))

    # of a video, its middle frame
    is_video = isinstance(images.read, MiddleFrame)
    source = images.picture(index) if is_video else images.source(index)
    if isinstance(source, Image.Image):
        image, crop = source, whole(source.size)
    else:
        image, crop = decode_crop(
            source, channels, whole, oversampling=2, background=images.background
        )
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=crop.box)
    size, digest = sizes[0], pixel_digest(image)
    facts = Facts(min(size), max(size), digest, image.size != size, HAD_ALPHA in image.info)
    return np.asarray(small).reshape(SIDE, SIDE, channels), facts


def pixel_digest(image: Image.Image) -> bytes:
    digest = hashlib.blake2b(f"{image.mode} {image.size}".encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.digest()


Result = tuple[np.ndarray, Facts] | str  # a thumbnail with facts, or why there is none
Block = tuple[ComparedImages | None, list[Facts | str]]  # images in order; None: all are unreadable


@dataclass(frozen=True)
class _Thumbnails(Dataset[Result]):
    images: Images
    channels: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Result:
        try:
            return read_thumbnail(self.images, index, self.channels)
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
        generator=torch.Generator(),  # keeps the global seed, as the loader draws from it
    )


def _block(results: list[Result]) -> Block:
    thumbnails = [result[0] for result in results if not isinstance(result, str)]
    facts = [result if isinstance(result, str) else result[1] for result in results]
    return compared(np.stack(thumbnails)) if thumbnails else None, facts
