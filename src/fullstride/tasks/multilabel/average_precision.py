"""How well are images ranked for each label? Average precisions, and an interval of their mean.

Letters: N images, K labels, B resamples of the images.
"""

from dataclasses import dataclass

import numpy as np

RESAMPLES = 200
MAX_BLOCK = 2**23  # numbers of a block of resamples: 32 MiB


def average_precisions(scores_nk: np.ndarray, has_nk: np.ndarray) -> np.ndarray:
    """(K,): the non-interpolated average precision of each label, from 0 to 1.

    It is the sum over distinct scores of (recall there - recall at the next higher one) * precision
    there, so that the order of images with equal scores has no influence. NaN for a label that no
    image has.
    """
    columns = zip(scores_nk.T, has_nk.T, strict=True)
    return np.array([_average_precision(scores_n, has_n) for scores_n, has_n in columns])


def _average_precision(scores_n: np.ndarray, has_n: np.ndarray) -> float:
    if not has_n.any():
        return float("nan")
    order, ends = _descending(scores_n)
    hits = has_n[order].cumsum()[ends]
    return float((np.diff(hits, prepend=0) * hits / (ends + 1)).sum() / hits[-1])


def _descending(scores_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The images by falling scores, and the place of the last one of each group of equal scores."""
    order = np.argsort(-scores_n, kind="stable")
    return order, np.append(np.flatnonzero(np.diff(scores_n[order])), len(order) - 1)


def bootstrap_interval(scores_nk: np.ndarray, has_nk: np.ndarray) -> tuple[float, float] | None:
    """The 95 % interval of the mean average precision: its percentiles over resamples of images.

    Images are drawn N times with replacement, with the same seed in every call. A resample in which
    no image has a label leaves that label out. None where resamples say nothing, as with one image.
    """
    number = len(scores_nk)
    columns = [
        _Ranking.of(scores_n, has_n)
        for scores_n, has_n in zip(scores_nk.T, has_nk.T, strict=True)
        if has_n.any()
    ]
    rng, means, step = np.random.default_rng(0), [], max(1, MAX_BLOCK // number)
    for start in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - start)
        drawn_bn = rng.multinomial(number, np.full(number, 1 / number), size)
        drawn_nb = np.ascontiguousarray(drawn_bn.T, dtype=np.int32)
        sums, present = np.zeros(size), np.zeros(size, int)
        for ranking in columns:
            precision_b, images_b = ranking.average_precision(drawn_nb)
            sums += precision_b
            present += images_b > 0
        means += (sums[present > 0] / present[present > 0]).tolist()
    if len(means) < RESAMPLES / 2 or number < 2:
        return None
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


@dataclass(frozen=True)
class _Ranking:
    """The images by falling scores for a label, in groups that end with those that have it."""

    order: np.ndarray  # images
    hits: np.ndarray  # those of them that have the label
    groups: np.ndarray  # the first image of each group, in `order`
    hit_groups: np.ndarray  # the same in `hits`

    @staticmethod
    def of(scores_n: np.ndarray, has_n: np.ndarray) -> "_Ranking":
        order, ends = _descending(scores_n)
        places = np.flatnonzero(has_n[order])
        group = np.searchsorted(ends, places)
        firsts = np.flatnonzero(np.diff(group, prepend=-1))
        last = ends[group[firsts]]
        return _Ranking(order[: last[-1] + 1], order[places], np.append(0, last[:-1] + 1), firsts)

    def average_precision(self, drawn_nb: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By resample, with images drawn so many times: the precision, and the images' number."""
        images = np.add.reduceat(drawn_nb[self.order], self.groups).cumsum(0)
        hits = np.add.reduceat(drawn_nb[self.hits], self.hit_groups)
        total = hits.cumsum(0)
        sums_b = (hits * total / np.maximum(images, 1)).sum(0)
        return sums_b / np.maximum(total[-1], 1), total[-1]
