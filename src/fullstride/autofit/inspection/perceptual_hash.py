"""Do two images show the same? A hash selects pairs, and the correlation of thumbnails decides.

The hash has 64 bits: the signs of the lowest frequencies of a discrete cosine transform, relative
to their median, as Zauner describes ("Implementation and benchmarking of perceptual image hash
functions", 2010). It is similar for different images of one kind too, such as two shoes. So two
images show the same only if the distance of their thumbnails, 1 - correlation, is also much
smaller than the usual distance of similar images in the same data set.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

MAX_BITS = 12  # of 64 that may differ
# Distance / distance of the data set's similar images, at most. Measured on 10,000 training and
# 10,000 test images of Fashion-MNIST: three pairs are below, which show the same product, and
# different products begin at 0.045. A JPEG of quality 50 is below for all images (docs/log.md).
MAX_RATIO = 0.04
SAMPLE = 2000  # images that each one is compared with to know what is similar
SIMILAR = 0.01  # the share of the sample that is
# The usual distance is at least this, so that images at 0.002 always show the same: where all are
# frames of a few films, nothing is small beside the usual. On Fashion-MNIST it adds no pair.
LEAST_USUAL = 0.05
# Slight crops are tried for pairs that are not much farther apart, where similar images differ as
# much as photographs do: of products and solar cells a crop of one resembles another one.
CROPS = (0.0, 0.02, 0.04)  # shares of a side that are removed at each edge
MAX_CROPPED_RATIO = 0.35
LEAST_USUAL_OF_CROPS = 0.3
FEW = 20  # images of the sample, of which this share is too few
MIN_DEVIATION = 2.0  # of a thumbnail's values; an image of one colour looks like any other
POOL = 2  # pixels of a thumbnail / those that are compared, along a side
FREQUENCIES = 8  # of each direction
CHUNK = 1024  # images at once


@dataclass(frozen=True)
class Pictures:
    """What is compared of N images."""

    pooled: np.ndarray  # uint8 (N, side, side, C), with C of 1 or 3
    hashes: np.ndarray  # uint64 (N,)
    mirrored_hashes: np.ndarray  # uint64 (N,): of the images flipped left to right

    def __len__(self) -> int:
        return len(self.hashes)

    def subset(self, indices: np.ndarray) -> "Pictures":
        return Pictures(self.pooled[indices], self.hashes[indices], self.mirrored_hashes[indices])

    @cached_property
    def contrasted(self) -> np.ndarray:
        """bool (N,): whether the image is not of one colour."""
        flat = self.pooled.reshape(len(self), -1)
        chunks = [flat[i : i + CHUNK].std(1) for i in range(0, len(self), CHUNK)]
        return np.concatenate(chunks) >= MIN_DEVIATION

    @cached_property
    def usual_distance(self) -> np.ndarray:
        """float32 (N,): distance from each image to the similar ones of the data set.

        They are the closest hundredth of a sample; there are at least `FEW` of them, or in a small
        data set a fifth. 1, as of two images that have nothing in common, where it is too small.
        """
        (chosen,) = np.nonzero(self.contrasted)
        sample = chosen[np.linspace(0, len(chosen) - 1, min(len(chosen), SAMPLE)).astype(int)]
        usual = np.ones(len(self), np.float32)
        rank = max(round(SIMILAR * len(sample)), min(FEW, len(sample) // 5), 3)
        if len(sample) <= rank:
            return usual
        reference = self.vectors(sample).T
        for start in range(0, len(self), CHUNK):
            rows = np.arange(start, min(start + CHUNK, len(self)))
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
    """(N, side, side, C) twice -> float32 (N,): from the closest crop of `a` to all of `b`."""
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


def compared(thumbnails: np.ndarray) -> Pictures:
    """Of uint8 (N, side, side, C), with an even side and C of 1 or 3."""
    n, side, _, c = thumbnails.shape
    blocks = thumbnails.reshape(n, side // POOL, POOL, side // POOL, POOL, c)
    pooled = np.rint(blocks.mean((2, 4), dtype=np.float32)).astype(np.uint8)
    return Pictures(
        pooled, perceptual_hashes(thumbnails), perceptual_hashes(thumbnails[:, :, ::-1])
    )


def concatenated(parts: Sequence[Pictures]) -> Pictures:
    return Pictures(
        np.concatenate([part.pooled for part in parts]),
        np.concatenate([part.hashes for part in parts]),
        np.concatenate([part.mirrored_hashes for part in parts]),
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
    signs[:, 0] = False  # the mean, which says little
    return np.packbits(signs, axis=1).view(np.uint64)[:, 0]
