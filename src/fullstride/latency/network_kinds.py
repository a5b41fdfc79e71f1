"""Is a network of a kind that a profile was fitted on? Its operators and their shares of time."""

from collections.abc import Mapping

import numpy as np

from fullstride.measure.cost.operators import KIND, OF_FRAMES, Operators

UNUSUAL = {  # operators that not every ConvNet has
    "norm": "batch norms apart from convolutions",
    "group_norm": "group norms",
    "statistics": "layer norms or softmax",
    "product": "attention",
}
# How names of ATen's operators begin that heads of tasks have, and which no profile was fitted on.
OUTSIDE = {
    OF_FRAMES: "convolutions of frames",
    "topk": "sorting",
    "gather": "choosing of candidates",
    "bmm": "suppression of boxes",
    "upsample": "resizing of maps",
    "roi_align": "regions of maps",
}
# Shares of a network's estimated time on the device from which the interval of a profile does not
# hold, by timm's tables for RTX 3090 and 4090 (benchmarks/latency.md). Of the fitted ConvNets 2 %
# are above one of them, of timm's other networks 91 to 93 %.
ATTENTION = 0.005
DEPTHWISE = 0.28
LARGE_DEPTHWISE = 0.1  # kernels above 7 x 7, which no fitted network but ConvMixer has
LARGE_TAPS = 49
# Power of the interval's bounds. With it 86 to 99 % of timm's other networks are inside, and 47 to
# 77 % without.
WIDENING = 3


def unfitted(
    operators: Operators, numbers: Mapping[str, float], *, microbenchmarks: bool = False
) -> list[str]:
    """Operators of a network that none of the fitted networks had, in words.

    Norms that were fitted have a number. Tables of networks with layer norms have a little
    attention too, but `microbenchmarks` have none.
    """
    fitted = {
        "norm": "norm" in numbers,
        **dict.fromkeys(("group_norm", "statistics"), "statistics" in numbers),
        "product": "statistics" in numbers and not microbenchmarks,
    }
    return [
        description
        for kind, description in UNUSUAL.items()
        if not fitted[kind] and (operators.kind == KIND[kind]).any()
    ]


def outside_fit(names: frozenset[str]) -> list[str]:
    """What no fitted network had among ATen's names of operators, in words."""
    return [
        words for start, words in OUTSIDE.items() if any(name.startswith(start) for name in names)
    ]


def unlike_fitted(operators: Operators, seconds: np.ndarray) -> list[str]:
    """Operators that take more of a network's time than in the fitted networks, in words.

    `seconds`: of each row of `operators` on the device.
    """
    depthwise = operators.kind == KIND["depthwise"]
    large = depthwise & (operators.macs > LARGE_TAPS * operators.written)
    rules = (
        ("attention", operators.kind == KIND["product"], ATTENTION),
        ("depthwise convolutions for much of its time", depthwise, DEPTHWISE),
        ("depthwise kernels above 7 x 7", large, LARGE_DEPTHWISE),
    )
    total = seconds.sum()
    return [words for words, rows, most in rules if seconds[rows].sum() > most * total]
