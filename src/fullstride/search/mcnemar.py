"""Is one network really better than another? McNemar's exact test on the same images."""


def mcnemar(one: str, other: str) -> float:
    """The two-sided p value of the hypothesis that two networks are equally accurate.

    Only images count that exactly one of the two classifies correctly: under the hypothesis each of
    them has either with probability 1/2 (McNemar 1947, in its exact form). Without such an image it
    is 1.

    Args:
        one: 1 or 0 for each image, whether the first network is correct.
        other: The same for the second network, of the same images.

    Raises ValueError if these are not the same number of images.
    """
    from scipy.stats import binomtest  # takes most of a second to import

    if len(one) != len(other):
        raise ValueError(
            f"a paired test of {len(one)} and {len(other)} images: give results on the same ones"
        )
    pairs = list(zip(one, other, strict=True))
    wins, losses = pairs.count(("1", "0")), pairs.count(("0", "1"))
    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
