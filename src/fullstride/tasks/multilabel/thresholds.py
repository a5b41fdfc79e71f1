"""From which probability on has an image a label? Thresholds chosen on the minival, by label."""

import numpy as np

DEFAULT = 0.5
MIN_IMAGES = 10  # with a label, and without, to choose its threshold
LIMITS = (1e-6, 1 - 1e-6)


def choose_thresholds(probability_nk: np.ndarray, has_nk: np.ndarray) -> tuple[float, ...]:
    """For each label the threshold of the highest F1; `DEFAULT` for one with too few images."""
    columns = zip(probability_nk.T, has_nk.T, strict=True)
    return tuple(best_threshold(probability_n, has_n) for probability_n, has_n in columns)


def best_threshold(probability_n: np.ndarray, has_n: np.ndarray) -> float:
    """The threshold of the highest F1, of equal ones the highest, and `DEFAULT` for few images.

    It is in the middle between two probabilities of images, so that rounding does not decide.
    """
    if min(has_n.sum(), (~has_n).sum()) < MIN_IMAGES:
        return DEFAULT
    order = np.argsort(-probability_n, kind="stable")
    falling = probability_n[order].astype(np.float64)
    cuts = np.append(np.flatnonzero(np.diff(falling)), len(falling) - 1)  # the last image above
    hits = has_n[order].cumsum()[cuts]
    best = cuts[(2 * hits / (cuts + 1 + hits[-1])).argmax()]
    below = falling[best + 1] if best + 1 < len(falling) else 0.0
    return float(np.clip((falling[best] + below) / 2, *LIMITS))
