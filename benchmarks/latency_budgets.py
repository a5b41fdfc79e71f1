"""How often does a choice by estimates overstep its budget, and what does measuring it change?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torchvision.models
from latency_tables import Case

from fullstride.latency.network_times import Estimate
from fullstride.latency.profiles import Fit
from fullstride.latency.select import Option, choose
from fullstride.measure.budget import Budget
from fullstride.tables import Published

BUDGETS = 30
OVERSTEP = 1.05
# torchvision's names -> timm's, where they differ
NAMES = {
    **{f"regnet_{kind}_{size}gf": f"regnet{kind}_{digits}" for kind in "xy" for size, digits in (
        ("16", "160"), ("1_6", "016"), ("32", "320"), ("3_2", "032"), ("8", "080"))},
    **{f"regnet_{kind}_{size}mf": f"regnet{kind}_00{size[0]}" for kind in "xy"
       for size in ("400", "800")},
    **{f"mnasnet{size}": f"mnasnet_{digits}" for size, digits in (
        ("0_5", "050"), ("0_75", "075"), ("1_0", "100"), ("1_3", "140"))},
    **{f"efficientnet_v2_{size}": f"tf_efficientnetv2_{size}" for size in "sml"},
    "mobilenet_v2": "mobilenetv2_100",
    "mobilenet_v3_large": "mobilenetv3_large_100",
    "mobilenet_v3_small": "mobilenetv3_small_100",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Oversteps:
    """Of choices for BUDGETS times between the fastest and the slowest networks."""

    table: str
    options: int
    best: int  # budgets that the choice oversteps by more than OVERSTEP
    best_regret: float  # points of top-1 below the best network that fits, mean
    said: float  # probability to stay inside, mean
    inside: float  # share of the choices that do
    lines: float  # networks that are named for measuring, mean
    measured: int  # budgets that the best of those, by their measured times, oversteps
    measured_regret: float


def accuracies() -> dict[str, float]:
    """Top-1 of torchvision's best weights by timm's names."""
    best = {}
    for name in torchvision.models.list_models(torchvision.models):
        weights = [each.meta["_metrics"] for each in torchvision.models.get_model_weights(name)]
        values = [
            metrics["ImageNet-1K"]["acc@1"] for metrics in weights if "ImageNet-1K" in metrics
        ]
        if values:
            best[NAMES.get(name, name)] = max(values)
    return best


def oversteps(
    title: str,
    cases: Sequence[Case],
    estimated: tuple[np.ndarray, np.ndarray, np.ndarray],
    fit: Fit,
) -> Oversteps:
    """`estimated`: seconds of the batch of each case, by numbers fitted without its family, and
    the ends of their intervals.
    """
    top1, options, times = accuracies(), [], {}
    for number, (case, *seconds) in enumerate(zip(cases, *estimated, strict=True)):
        if case.name not in top1:
            continue
        ms, low, high = (1e3 * float(each) / case.batch for each in seconds)
        network = Published(case.name, number, top1[case.name], "torchvision", "")
        time = Estimate(
            profile=title,
            work="inference",
            batch=1,
            ms_per_image=ms,
            low=low,
            high=high,
            device_ms=ms,
            host_ms=0.0,
            bound="memory",
            resolvable_ratio=fit.resolvable_ratio,
        )
        option = Option(network=network, estimate=time, published_ms=None, by="estimated")
        options.append(option)
        times[option.label] = case.ms_per_image
    ends = np.quantile(list(times.values()), (0.05, 0.95))
    rows = []
    for budget in np.geomspace(*ends, BUDGETS):
        inside = [o for o in options if times[o.label] <= budget]
        most = max(o.network.top1 for o in inside)
        choice = choose(options, Budget(ms_per_image=float(budget)))
        best, named = choice.best, choice.to_measure or (choice.best,)
        fits = [o for o in named if times[o.label] <= budget]
        last = max(fits or [best], key=lambda o: o.network.top1)
        rows.append(
            (
                times[best.label] > OVERSTEP * budget,
                most - best.network.top1,
                best.probability_within(budget),
                times[best.label] <= budget,
                len(choice.to_measure),
                times[last.label] > OVERSTEP * budget,
                most - last.network.top1,
            )
        )
    over, regret, said, share, lines, measured, measured_regret = np.array(rows, float).T
    return Oversteps(
        table=title,
        options=len(options),
        best=int(over.sum()),
        best_regret=float(regret.mean()),
        said=float(said.mean()),
        inside=float(share.mean()),
        lines=float(lines.mean()),
        measured=int(measured.sum()),
        measured_regret=float(measured_regret.mean()),
    )


def budgets_section(budgets: Sequence[Oversteps]) -> list[str]:
    """Lines of the page."""
    lines = [
        "",
        "## Choices within a budget",
        "",
        f"{BUDGETS} budgets from the fastest to the slowest of torchvision's networks, with the",
        "accuracies of its weights. Overstepped: the measured time is above the budget by more",
        "than 5 %. Regret: points of top-1 below the best network that fits. Measured: the best",
        "of the networks that `choose` names for measuring, by their measured times.",
        "",
        "| measured on | networks | overstepped | regret | probability said | inside | lines to "
        "measure | overstepped | regret |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {b.table} | {b.options} | {b.best} of {BUDGETS} | {b.best_regret:.2f} | {b.said:.2f} | "
        f"{b.inside:.2f} | {b.lines:.1f} | {b.measured} of {BUDGETS} | {b.measured_regret:.2f} |"
        for b in budgets
    ]
    return lines
