"""How wrong are estimated times for families that were not fitted, and how wrong are FLOPs?

    python benchmarks/latency.py --timm DIR [--cache FILE] [--write]

DIR has timm's result tables (results/benchmark-*.csv of its repository, Apache-2.0), which are not
part of this one; "benchmark-" may be missing in their names. Writes latency.json and latency.md
beside this file, and with --write the profiles of the package.

Every table is split the same way, which was fixed before anything was fitted: leave one family out.
Families are those of PAPER (latency_tables.py) for GENet's tables, and timm's modules for timm's.
FLOPs and parameters alone have one factor per batch size, fitted to the same networks.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import timm
from latency_budgets import Oversteps, budgets_section, oversteps
from latency_moves import UNSEEN, Move, moves, moves_section
from latency_others import Others, evaluate_others, others_section
from latency_spreads import fit_spreads, inside
from latency_tables import (
    TABLES,
    Case,
    Table,
    Tracer,
    paper_cases,
    timm_cases,
    timm_file,
)
from scipy.stats import rankdata

from fullstride.io.writing import Output, atomic_write
from fullstride.latency.fitting import (
    error,
    fit,
    interval,
    left_out,
    resolvable_ratio,
)
from fullstride.latency.profiles import PROFILE, Fit, Profile
from fullstride.latency.roofline import bounds, prepare, sensitivities
from fullstride.measure.environment import Environment

WITH_OTHERS = ("RTX 3090 nhwc", "RTX 3090 nchw", "RTX 4090 nhwc", "RTX 4090 compiled")
PROFILES = Path(__file__).parents[1] / "src/fullstride/latency/device_profiles"


@dataclass(frozen=True, kw_only=True)
class Result:
    table: str
    networks: int
    families: int
    error: float  # percent, mean over batch sizes of the mean over networks
    rank: float  # correlation of the order of times, the least over batch sizes
    flops_error: float
    flops_rank: float
    params_error: float
    params_rank: float
    covered: float  # percent, of intervals for 90
    goal: float
    goal_rank: float
    by_batch: dict[int, tuple[float, float, float, float]]  # error, rank, of FLOPs, of parameters
    worst: dict[str, float]  # error of the families that are off by more than 20 %


def rank_of(estimated: np.ndarray, measured: np.ndarray) -> float:
    """Spearman's correlation."""
    return float(np.corrcoef(rankdata(estimated), rankdata(measured))[0, 1])


def best_factor(amount: np.ndarray, seconds: np.ndarray) -> float:
    """The factor with the least mean |estimate / measured - 1|, which is a weighted median."""
    ratio = seconds / amount
    order = np.argsort(ratio)
    share = np.cumsum(1 / ratio[order])
    return float(ratio[order][np.searchsorted(share, share[-1] / 2)])


def one_factor(amount: np.ndarray, seconds: np.ndarray, families: np.ndarray) -> np.ndarray:
    """Times in proportion to `amount`, by the best factor for the other families."""
    estimated = np.empty(len(seconds))
    for family in np.unique(families):
        own = families == family
        estimated[own] = amount[own] * best_factor(amount[~own], seconds[~own])
    return estimated


def evaluate(
    table: Table, cases: Sequence[Case]
) -> tuple[Result, Fit, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """With the estimated seconds of each case by numbers without its family, and their bounds."""
    work = prepare(
        [c.operators for c in cases],
        [c.batch for c in cases],
        table.machine,
        training=table.training,
    )
    seconds = np.array([case.seconds for case in cases])
    families = np.array([case.family for case in cases])
    parameters = table.parameters
    estimated = left_out(work, seconds, families, parameters)
    numbers, off = fit(work, seconds, parameters), np.log(seconds / estimated)
    sensitive = sensitivities(work, numbers, parameters.names)
    spreads = fit_spreads(sensitive, off, families, parameters)
    low, high = bounds(work, numbers, spreads)
    # timm's batches are as large as fits, which is one regime; the papers have several.
    groups = work.batch if table.paper else np.zeros(len(cases))
    macs = np.array([case.operators.total_macs for case in cases])
    weights = np.array([case.operators.total_weights for case in cases])
    by_batch: dict[int, tuple[float, float, float, float]] = {}
    ranks = []
    image = seconds / work.batch
    for group in np.unique(groups):
        own = groups == group
        flops, params = (one_factor(a[own], image[own], families[own]) for a in (macs, weights))
        rank = [rank_of(x, image[own]) for x in ((estimated / work.batch)[own], flops, params)]
        errors = [error(x, image[own]) for x in ((estimated / work.batch)[own], flops, params)]
        by_batch[int(group)] = (errors[0], rank[0], errors[1], errors[2])
        ranks.append(rank)
    mean, least = np.mean(list(by_batch.values()), axis=0), np.min(ranks, axis=0)
    by_family = {
        str(f): error(estimated[families == f], seconds[families == f]) for f in np.unique(families)
    }
    result = Result(
        table=table.title,
        networks=len({(c.name, id(c.operators)) for c in cases}),
        families=len(by_family),
        error=float(mean[0]),
        rank=float(least[0]),
        flops_error=float(mean[2]),
        flops_rank=float(least[1]),
        params_error=float(mean[3]),
        params_rank=float(least[2]),
        covered=100 * float(inside(work, numbers, off, families, parameters).mean()),
        goal=table.goal,
        goal_rank=table.rank,
        by_batch=by_batch if table.paper else {},
        worst={family: value for family, value in by_family.items() if value > 20},
    )
    all_low, all_high = interval(estimated, seconds, families)
    return (
        result,
        Fit(
            numbers={name: float(f"{value:.4g}") for name, value in numbers.items()},
            spreads={name: float(f"{value:.3g}") for name, value in spreads.items()},
            error=round(result.error, 1),
            low=round(all_low, 3),
            high=round(all_high, 3),
            resolvable_ratio=round(resolvable_ratio(estimated / work.batch, image, groups), 2),
            networks=result.networks,
            source="arXiv:2006.14090 Tables 7 to 9"
            if table.paper
            else f"timm, results/benchmark-{table.file}",
            software=table.software,
            note=table.note if table.training else "",
            full_batches=not table.paper,
            date=datetime.now(UTC).date().isoformat(),
        ),
        (estimated, low * estimated, high * estimated),
    )


def profiles(fits: Sequence[tuple[Table, Fit]]) -> dict[str, Profile]:
    by_name: dict[str, Profile] = {}
    for table, fitted in fits:
        if not table.profile:
            continue
        if table.training:
            by_name[table.profile] = replace(by_name[table.profile], training=fitted)
            continue
        by_name[table.profile] = Profile(
            name=table.profile,
            device=table.device,
            layout=table.layout,
            precision=table.precision,
            machine=table.machine,
            sheet=table.sheet,
            inference=fitted,
            note=table.note,
        )
    return by_name


ABOUT = """
Error: mean of |estimate / measured - 1| in percent; for GENet's tables the mean over batch sizes.
Rank: Spearman's correlation of times per image; for GENet's tables the least over batch sizes.
Every network was estimated by numbers fitted without its family. Inside: percent of times in the
90 % interval that the errors of the other families give. FLOPs, parameters: time in proportion to
them, by the factor with the least error on the other families, for each batch size.

Limitations:

- The split was fixed before anything was fitted. The form of the model (which classes of operators
  there are, which runtime merges what, how intervals count families) was chosen with these tables
  in view, so a family unlike all of these may be estimated worse. On GENet's five families about
  thirty forms were compared by their errors on families left out, so their errors here are somewhat
  optimistic.
- GENet's tables are of 2020 and rounded to 0.01 ms. Of their 34 networks 22 are in timm. Batch
  norms are taken as folded and SiLU as two passes, because only so do the times of EfficientNet
  fit. For the V100 one share of bandwidth was tried and two: with one the error is 12.1 and 82 %
  lie inside; two are used.
- TensorRT's profiles have a time per batch and a time per image that no operator explains; we
  interpret the latter as the copy of the image.
- timm's tables of torch 2.9 timed networks with merged branches (RepVGG, MobileOne, RepGhost,
  RepViT, GhostNetV3, FastViT and others), as their parameter counts show; those of torch 2.4 timed
  all branches. They are traced in that form.
- Training in nhwc (torch 1.12) is not reached: grouped convolutions and TResNet took several times
  as long there as in nchw. The training numbers of the profile rtx3090 are those of nchw.
- timm's tables have full batches only. Host time of a launch is assumed there, and small batches
  are extrapolated.
"""


def page(
    results: Sequence[Result],
    moved: Sequence[Move],
    others: Sequence[Others],
    budgets: Sequence[Oversteps],
    where: Environment,
) -> str:
    lines = [
        "## Estimated times of networks whose family was left out",
        "",
        "| measured on | networks | families | error | goal | rank | FLOPs | rank | parameters | "
        "rank | inside |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        met = "" if r.error <= r.goal else " (not reached)"
        ranked = "" if r.rank >= r.goal_rank else f" (goal {r.goal_rank}, not reached)"
        inside = "" if 85 <= r.covered <= 95 else " (goal 85 to 95)"
        lines.append(
            f"| {r.table} | {r.networks} | {r.families} | {r.error:.1f} | <= {r.goal:g}{met} | "
            f"{r.rank:.3f}{ranked} | {r.flops_error:.0f} | {r.flops_rank:.2f} | "
            f"{r.params_error:.0f} | {r.params_rank:.2f} | {r.covered:.0f} %{inside} |"
        )
    for r in results:
        if r.by_batch:
            lines += [
                "",
                f"{r.table}, by batch size:",
                "",
                "| | " + " | ".join(map(str, r.by_batch)) + " |",
            ]
            lines.append("| --- |" + " --- |" * len(r.by_batch))
            for i, label in enumerate(("error", "rank", "error of FLOPs", "error of parameters")):
                digits = 3 if label == "rank" else 1
                lines.append(
                    f"| {label} | "
                    + " | ".join(f"{row[i]:.{digits}f}" for row in r.by_batch.values())
                    + " |"
                )
    lines += ["", "Families that are off by more than 20 %:", ""]
    for r in results:
        if r.worst:
            lines.append(
                f"- {r.table}: "
                + ", ".join(f"{family} {value:.0f}" for family, value in r.worst.items())
            )
    lines += [*moves_section(moved), *others_section(others), *budgets_section(budgets)]
    lines += [
        ABOUT,
        f"torch {where.torch}, timm {timm.__version__}, {datetime.now(UTC).date().isoformat()}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--timm", type=Path, required=True, help="folder with timm's result tables")
    parser.add_argument("--unseen", type=Path, help="folder with tables that nothing is fitted to")
    parser.add_argument("--cache", type=Path, help="file for traced operators (.npz)")
    parser.add_argument("--write", action="store_true", help="write the profiles of the package")
    args = parser.parse_args()
    try:
        for table in TABLES:
            if table.file:
                timm_file(args.timm, table)
    except ValueError as error:
        raise SystemExit(f"latency.py: {error}") from None
    tracer = Tracer(args.cache)
    results, fits, cases, budgets, outside, unseen = [], [], {}, [], {}, {}
    for table in TABLES:
        cases[table.title] = (
            paper_cases(table, tracer) if table.paper else timm_cases(table, args.timm, tracer)
        )
        if table.title in WITH_OTHERS:
            outside[table.title] = timm_cases(table, args.timm, tracer, others=True)
        tracer.save()
        result, fitted, times = evaluate(table, cases[table.title])
        if table.title in WITH_OTHERS:
            budgets.append(oversteps(table.title, cases[table.title], times, fitted))
        results.append(result)
        fits.append((table, fitted))
        error_text = f"error {result.error:.1f} (goal {table.goal:g}), rank {result.rank:.3f}"
        print(f"{table.title}: {error_text}", flush=True)
    by_name = profiles(fits)
    for table in UNSEEN:
        if args.unseen:
            unseen[table.title] = timm_cases(table, args.unseen, tracer)
    moved = moves(by_name, cases, unseen)
    others = [
        evaluate_others(title, by_name[table.profile], outside[title], cases[title])
        for table in TABLES
        if (title := table.title) in WITH_OTHERS
    ]
    where = Environment.here()
    text = page(results, moved, others, budgets, where)
    print(text)
    here = Path(__file__).with_suffix(".md")
    for path, content in (
        (here, text),
        (
            here.with_suffix(".json"),
            json.dumps([asdict(r) for r in (*results, *moved, *others, *budgets)], indent=1),
        ),
    ):
        with atomic_write(path, Output("the results", "", lambda path: True)) as temporary:
            temporary.write_text(content + "\n" if not content.endswith("\n") else content)
    if args.write:
        for name, profile in by_name.items():
            PROFILE.save(PROFILES / f"{name}.json", profile)


if __name__ == "__main__":
    main()
