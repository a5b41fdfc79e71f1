"""Which images are the digits? Those in the package, split by their writers.

They are 1,797 gray handwritten digits of 8 x 8 pixels, the test set of "Optical Recognition of
Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI machine learning repository, CC BY 4.0),
unchanged from scikit-learn, which redistributes it.
"""

from functools import cache
from importlib import resources

import numpy as np
from PIL import Image

from fullstride.data.readers.listing import Sample
from fullstride.data.readers.splits import SplitRule, Splits

DIGITS = "digits"  # the name of the data set in the package
DIGIT_CLASSES = tuple("0123456789")


def split_digits(rule: SplitRule) -> Splits:
    """Split by position: the last 500 were written by other people."""
    if rule.group:
        raise ValueError(f"group {rule.group!r}: the digits have none; leave it out")
    if rule.test:
        raise ValueError(f"test {rule.test}: the digits have a test already; leave the share out")
    samples = [Sample(f"digits/{i:04}", int(k), 64) for i, k in enumerate(_digit_arrays()[1])]
    pool, test = samples[:1297], samples[1297:]
    count = 260 if rule.minival is None else round(rule.minival * len(pool))
    if rule.minival:
        count = min(max(1, count), len(pool) - 1)
    train, minival = pool[: len(pool) - count], pool[len(pool) - count :]
    return Splits(train + test, minival, []) if rule.test == 0 else Splits(train, minival, test)


def read_digit(name: str) -> Image.Image:
    images, _ = _digit_arrays()
    return Image.fromarray(
        np.rint(images[int(name.removeprefix("digits/"))] * (255 / 16)).astype(np.uint8)
    )


@cache
def _digit_arrays() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 8, 8) of 0..16 and their labels, in scikit-learn's order."""
    with (resources.files("fullstride.data") / "digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        return arrays["images"], arrays["labels"]
