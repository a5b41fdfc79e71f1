"""Is a network of a kind that a profile was fitted on? What it runs that no fitted network did."""

from collections.abc import Mapping

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
# Power of the interval's bounds for a network that runs such operators.
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
