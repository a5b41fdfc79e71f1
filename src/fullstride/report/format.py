"""How is a number formatted for people, and what is its interval?"""

from collections.abc import Sequence
from dataclasses import fields
from math import floor, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullstride.tasks.confusion import ClassScore


def wilson(percent: float, images: int) -> tuple[float, float]:
    """The 95 % Wilson interval, in per cent, of an accuracy measured on `images` images.

    Unlike the normal approximation it stays within 0 to 100 and is not empty at 100 %.
    """
    from scipy.stats import binomtest  # takes most of a second to import

    if images < 1:
        raise ValueError(f"an accuracy on {images} images: use 1 or more")
    correct = round(percent / 100 * images)
    interval = binomtest(correct, images).proportion_ci(0.95, "wilson")
    return 100 * float(interval.low), 100 * float(interval.high)


def three_digits(value: float) -> str:
    """0.4213 -> 0.421, 31.389 -> 31.4, 2930.4 -> 2,930."""
    rounded = float(f"{value:.3g}")
    if rounded == 0 or abs(rounded) >= 1000:
        return f"{value:,.0f}"
    return f"{rounded:.{max(2 - floor(log10(abs(rounded))), 0)}f}"


def count(value: float) -> str:
    """1_082_032 -> 1.08 M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * unit:
            return f"{three_digits(value / unit)} {name}"
    return f"{value:.0f}"


def ms(value: float) -> str:
    return f"{three_digits(value)} ms"


def percent(value: float) -> str:
    return f"{value:.1f} %" if value < 99.95 or value == 100 else f"{value:.2f} %"


def class_columns(rows: "Sequence[ClassScore]") -> list[str]:
    """The header of a table by class; each type of rows has columns of its own."""
    return [rows[0].headers.get(each.name, each.name.replace("_", " ")) for each in fields(rows[0])]


def class_cells(row: "ClassScore") -> list[str]:
    values = (getattr(row, each.name) for each in fields(row))
    return [_cell(value) for value in values]


def _cell(value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
