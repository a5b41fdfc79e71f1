"""Does the search without training find the best networks of a table of trained ones?

    python benchmarks/search_table.py --table nasbench_macro.csv --out benchmarks/search_table.json

The table is NAS-Bench-Macro (github.com/xiusu/NAS-Bench-Macro, Apache-2.0), which is not part of
the package: 8 places with 3 choices each, 6,561 networks, each trained on CIFAR-10 with three
seeds. Its columns are code, top1_seed0, top1_seed1, top1_seed2, params and macs.

Every method trains 40 networks; a training reads the accuracy of one seed, drawn anew. The method
then names the network within the budget whose reading was the highest. Its regret is the mean
accuracy of the best network within the budget less that of the one it names, both over the three
seeds. Budgets are the 25, 50 and 75 % quantiles of the MACs. The first 20 trainings are the columns
of 20. The rows of the JSON are written beside it as a table, with those of an earlier measurement
of other code on the same table.
"""

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from fullstride.io.writing import atomic_write, json_output, read_regular
from fullstride.measure.environment import Environment
from fullstride.search.structures.proposals import first_design, fit, next_structures
from fullstride.search.structures.space import Place, Space

OUTPUT = json_output("results of a benchmark", "environment", "rows")
PLACES, CHOICES = 8, 3
QUANTILES = (0.25, 0.5, 0.75)
TRAININGS = (20, 40)
REPETITIONS = 100
REFIT = 4  # trainings between two fits
LARGEST = 0.1  # share of the networks within the budget from which "random among the largest" draws
MASTER = "11111111"

# The same measurement by other code, mean of 150 to 200 repetitions: 20 trainings, 40 trainings.
EARLIER = {
    "random within budget": ((0.70, 0.51, 0.65), (0.48, 0.34, 0.52)),
    "regularised evolution": (None, (0.27, 0.27, 0.43)),
    "the largest that fit": ((0.76, 0.75, 0.35), (0.04, 0.14, 0.36)),
    "random among the largest that fit": ((0.25, 0.31, 0.30), (0.19, 0.27, 0.25)),
    "Gaussian process, UCB": (None, (0.10, 0.09, 0.26)),
    "one at a time, then the best predicted": ((0.10, 0.19, 0.34), (0.06, 0.09, 0.20)),
    "one at a time, refitted after every 4": ((0.09, 0.20, 0.34), (0.04, 0.06, 0.12)),
    "Thompson sampling on the additive model": ((0.13, 0.19, 0.27), (0.03, 0.09, 0.10)),
}


@dataclass(frozen=True, eq=False)
class Table:
    """Trained networks, in the lexicographic order of their codes."""

    name: str
    top1: np.ndarray  # (networks, seeds) percent
    macs: np.ndarray  # (networks,)

    def index(self, structures: np.ndarray) -> np.ndarray:
        return np.ravel_multi_index(tuple(structures.T), (CHOICES,) * PLACES)

    def costs(self, structures: np.ndarray) -> np.ndarray:
        return self.macs[self.index(structures)]

    def train(self, structures: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(n,) percent, each of one seed."""
        return self.top1[
            self.index(structures), rng.integers(self.top1.shape[1], size=len(structures))
        ]

    def within(self, budget: float) -> np.ndarray:
        """The structures that fit, the largest first."""
        order = np.argsort(-self.macs, kind="stable")
        fitting = order[self.macs[order] <= budget]
        return np.stack(np.unravel_index(fitting, (CHOICES,) * PLACES), axis=1)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The regrets of one method, in points."""

    method: str
    measured_by: str  # "this package", or "earlier"
    regrets: dict[str, list[float] | None]  # trainings -> mean at each budget
    standard_errors: dict[str, list[float] | None]


def read_table(path: Path) -> Table:
    """Raises ValueError if the file is not that table."""
    lines = csv.DictReader(read_regular(path, 10_000_000).decode().splitlines())
    try:
        rows = {
            row["code"]: [float(row[f"top1_seed{seed}"]) for seed in range(3)]
            + [float(row["macs"])]
            for row in lines
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}: give a CSV with code, top1_seed0..2 and macs") from None
    codes = ["".join(row) for row in table_space(MASTER).all().astype(str).tolist()]
    if sorted(rows) != codes:
        raise ValueError(f"{path} has {len(rows)} codes, not the {len(codes)} of NAS-Bench-Macro")
    numbers = np.array([rows[code] for code in codes])
    return Table(path.stem, numbers[:, :3], numbers[:, 3])


def planted_table(seed: int = 0) -> Table:
    """A table of our own: accuracy saturates with the sum of the places' effects, less what
    neighbours spoil, and seeds deviate by 0.14 points."""
    rng = np.random.default_rng(seed)
    structures = table_space(MASTER).all()
    effects = np.cumsum(rng.gamma(2.0, 0.3, (PLACES, CHOICES)), axis=1)
    macs = np.cumsum(rng.gamma(2.0, 0.5, (PLACES, CHOICES)), axis=1)
    every = np.arange(PLACES)
    total = effects[every, structures].sum(axis=1)
    total += 0.1 * rng.standard_normal((PLACES - 1, CHOICES, CHOICES))[
        every[:-1], structures[:, :-1], structures[:, 1:]
    ].sum(axis=1)
    mean = 94 - 20 * np.exp(-0.35 * total)
    top1 = mean[:, None] + 0.14 * rng.standard_normal((len(mean), 3))
    return Table("planted", top1, 1e7 * macs[every, structures].sum(axis=1))


def table_space(master: str) -> Space:
    """Categories around `master`, a code: each place has a term for each other choice."""
    places = []
    for i, own in enumerate(map(int, master)):
        others = [choice for choice in range(CHOICES) if choice != own]
        terms = tuple(f"choice {choice}" for choice in others)
        places.append(Place(f"place {i}", CHOICES, own, np.eye(CHOICES)[:, others], terms))
    return Space(tuple(places))


# A method: (table, budget, trainings, rng) -> (n, M) structures and their scores, in order.
Trainings = tuple[np.ndarray, np.ndarray]
Method = Callable[[Table, float, int, np.random.Generator], Trainings]


def search(
    table: Table,
    budget: float,
    trainings: int,
    rng: np.random.Generator,
    *,
    master: str = MASTER,
    method: Literal["thompson", "greedy"] = "thompson",
    refit: int = REFIT,
) -> Trainings:
    """One at a time around `master`, then what the additive model proposes."""
    space = table_space(master)
    design = first_design(space, rng, control_each=False)
    structures = np.concatenate([space.start[None], design.structures])
    scores = table.train(structures, rng)
    while len(structures) < trainings:
        model = fit(space, structures, scores)
        new = next_structures(
            model,
            table.costs,
            budget,
            structures,
            rng,
            count=min(refit, trainings - len(structures)),
            method=method,
        )
        structures = np.concatenate([structures, new])
        scores = np.append(scores, table.train(new, rng))
    return structures, scores


def largest(table: Table, budget: float, trainings: int, rng: np.random.Generator) -> Trainings:
    structures = table.within(budget)[:trainings]
    return structures, table.train(structures, rng)


def draws(
    table: Table, budget: float, trainings: int, rng: np.random.Generator, *, share: float = 1.0
) -> Trainings:
    """Random ones among the largest `share` of those that fit."""
    pool = table.within(budget)
    pool = pool[: max(round(share * len(pool)), trainings)]
    structures = rng.permutation(pool)[:trainings]
    return structures, table.train(structures, rng)


BASELINES: dict[str, Method] = {
    "random within budget": draws,
    "the largest that fit": largest,
    "random among the largest that fit": partial(draws, share=LARGEST),
}
METHODS: dict[str, Method] = BASELINES | {
    "one at a time, then the best predicted": partial(search, method="greedy", refit=TRAININGS[-1]),
    "one at a time, refitted after every 4": partial(search, method="greedy"),
    "Thompson sampling on the additive model": search,
    "the same around 22222222, the largest": partial(search, master="22222222"),
    "the same around 12121212": partial(search, master="12121212"),
}


def regrets(
    method: Method, table: Table, budget: float, trainings: Sequence[int], repetitions: int
) -> np.ndarray:
    """(repetitions, trainings) points below the best within the budget, each of its own draws."""
    mean = table.top1.mean(axis=1)
    best = mean[table.macs <= budget].max()
    result = np.empty((repetitions, len(trainings)))
    for repetition in range(repetitions):
        rng = np.random.default_rng(repetition)
        structures, scores = method(table, budget, max(trainings), rng)
        scores = np.where(table.costs(structures) <= budget, scores, -np.inf)
        for column, number in enumerate(trainings):
            choice = scores[:number].argmax()
            # With no training inside, the method has nothing to name but the smallest network.
            row = structures[choice] if np.isfinite(scores[choice]) else table.within(budget)[-1]
            result[repetition, column] = best - mean[table.index(row[None])[0]]
    return result


def measure(name: str, table: Table, repetitions: int) -> Row:
    every = np.array(
        [
            regrets(METHODS[name], table, float(np.quantile(table.macs, q)), TRAININGS, repetitions)
            for q in QUANTILES
        ]
    )
    means, errors = every.mean(axis=1).T, every.std(axis=1).T / np.sqrt(repetitions)
    return Row(
        method=name,
        measured_by="this package",
        regrets={str(n): row.round(4).tolist() for n, row in zip(TRAININGS, means, strict=True)},
        standard_errors={
            str(n): row.round(4).tolist() for n, row in zip(TRAININGS, errors, strict=True)
        },
    )


def earlier_rows() -> list[Row]:
    empty = dict.fromkeys(map(str, TRAININGS))
    return [
        Row(
            method=name,
            measured_by="earlier",
            regrets={
                str(n): list(row) if row else None
                for n, row in zip(TRAININGS, numbers, strict=True)
            },
            standard_errors=empty,
        )
        for name, numbers in EARLIER.items()
    ]


def markdown(rows: Sequence[Row], table: Table, repetitions: int) -> str:
    head = ["method", "measured by"]
    head += [f"{n}: {q:.0%}" for n in TRAININGS for q in QUANTILES]
    lines = [
        f"Regret in points on the table {table.name}, by trainings and budget (quantile of MACs).",
        f"This package: mean of {repetitions} repetitions; earlier: other code, 150 to 200.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for row in rows:
        cells = [
            f"{value:.2f}" if value is not None else "-"
            for n in TRAININGS
            for value in (row.regrets[str(n)] or [None] * len(QUANTILES))
        ]
        lines.append(f"| {' | '.join([row.method, row.measured_by, *cells])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", type=Path, required=True, help="nasbench_macro.csv")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/search_table.json"))
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    arguments = parser.parse_args()
    table = read_table(arguments.table)
    own = []
    for name in METHODS:
        own.append(measure(name, table, arguments.repetitions))
        print(name, own[-1].regrets, flush=True)
    rows = [*earlier_rows(), *own]
    rows.sort(key=lambda row: [*EARLIER, *METHODS].index(row.method))
    result = dict(
        environment=asdict(Environment.here()),
        table=table.name,
        repetitions=arguments.repetitions,
        quantiles=QUANTILES,
        rows=[asdict(row) for row in rows],
    )
    with atomic_write(arguments.out, OUTPUT) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(rows, table, arguments.repetitions)
    arguments.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
