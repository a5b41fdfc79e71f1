"""How is a number written for people, and how sure is it?"""

from math import floor, log10, sqrt

Z95 = 1.959963984540054  # of the normal distribution, two-sided


def wilson(percent: float, images: int) -> tuple[float, float]:
    """The 95 % interval, in per cent, of an accuracy found on `images` images.

    Unlike the textbook's plus-or-minus it stays inside 0 to 100 and says something at 100 %.
    Source: Wilson, J. Am. Stat. Assoc. 22 (1927), 209.
    """
    if images < 1:
        raise ValueError(f"an accuracy on {images} images: use 1 or more")
    p, z2 = percent / 100, Z95**2 / images
    middle = (p + z2 / 2) / (1 + z2)
    half = Z95 / (1 + z2) * sqrt(p * (1 - p) / images + z2 / (4 * images))
    return 100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0)


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
