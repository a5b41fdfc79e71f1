"""Which of several trained networks should ship? The most accurate one that answers in time."""

from collections.abc import Mapping
from dataclasses import replace

from fullstride.measure.bench import ONLINE, bench
from fullstride.nets.bundle import Bundle


def most_accurate(bundles: Mapping[str, Bundle], budget_ms: float | None) -> tuple[str, Bundle, float | None]:
    """The bundle with the best test top-1 among those whose median latency of one image, here, is within the budget.

    Without a budget nothing is measured and the third value is None. Raises ValueError, with the
    times, where none fits, and where several are to be compared of which one has no test score.
    """
    fit, ms = dict(bundles), {}
    if budget_ms is not None:
        for name, bundle in bundles.items():
            pre = bundle.preprocessing
            measured = bench({name: bundle.net}, replace(ONLINE, resolution=pre.resolution), in_channels=pre.channels)
            ms[name] = measured[0].ms_p50
        fit = {name: bundle for name, bundle in bundles.items() if ms[name] <= budget_ms}
        if not fit:
            times = ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items())
            raise ValueError(f"nothing answers within {budget_ms:g} ms: {times}")
    if len(fit) > 1:
        for name, bundle in fit.items():
            if "top1" not in bundle.scores.get("test", {}):
                raise ValueError(f"{name} has no test score to be compared by: export it alone")
    best = max(fit, key=lambda name: fit[name].scores["test"]["top1"] if len(fit) > 1 else 0.0)
    return best, fit[best], ms.get(best)
