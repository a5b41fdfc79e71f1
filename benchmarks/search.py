"""Is a searched network better than simple choices, when all are trained for real?

    python benchmarks/search.py digits --work WORK --out benchmarks/search_digits.json
    python benchmarks/search.py fashion --data DATA --work WORK --out benchmarks/search_fashion.json

A search around genet_tiny with few training images, so that accuracy does not saturate, and a
budget of a share of the MasterNet's time measured here. Then, each fully trained by the same recipe
with so many seeds, and scored on the test images, which no choice has seen:

- the network of the search
- the MasterNet scaled by width to the same measured time
- random within the budget: another structure for each seed
- the largest that fits: the most multiply-adds of 2,000 random structures within the budget
- random among the largest: of the hundredth of them with the most multiply-adds

All of these are within the budget as measured here: estimates by which structures are drawn are
corrected by the times of twenty of them, twice.

The Spearman correlation is that of the regression's prediction with the validation split of random
structures of the space that are trained fully, once each. Times are measured here, on a quiet
machine; `--device PROFILE` estimates them instead. `--quick` is a short version, whose
numbers say little. WORK has all runs, so that a stopped benchmark goes on. DATA has Fashion-MNIST's
four IDX files, as for defaults.py; the digits are in the package.
"""

import argparse
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from defaults import find_file
from scipy.stats import rankdata

from fullstride.data.dataset import DataSet, open_data
from fullstride.io.console import print_parts
from fullstride.io.writing import atomic_write, json_output
from fullstride.latency.devices import load_profile
from fullstride.latency.estimator import Estimator, operators_of
from fullstride.latency.profiles import Profile
from fullstride.measure.budget import HERE
from fullstride.measure.environment import Environment
from fullstride.nets import zoo
from fullstride.nets.spec import NetSpec
from fullstride.search.block_tuning import TRAINING, NetworkTraining, TunedScore, training_trial
from fullstride.search.llr.plan import DeviceTimes, SearchJob, Tuning, describe, find_master
from fullstride.search.llr.study import SEARCH
from fullstride.search.llr.times import find_label, measure_specs
from fullstride.search.llr.tunings import model_of
from fullstride.search.settings import SearchSettings
from fullstride.study.driver import read_seconds, run_stage, run_study, saved_stage
from fullstride.study.settings import StudyOptions
from fullstride.study.trials import local_devices
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.scoring import score_bundle

OUTPUT = json_output("results of a benchmark", "environment", "networks", "spearman")
POOL, LARGEST = 2_000, 0.01  # random structures within the budget, and the share that is largest
TIMED, CORRECTIONS = 20, 3  # structures that are timed at once to correct estimates, and how often
CHUNK, MOST = 500_000, 200_000_000  # structures that are drawn at once, and in all
SHARE = 0.7  # of the MasterNet's measured time: the budget
WIDTHS = tuple(0.4 + 0.05 * step for step in range(15))  # multiples of the MasterNet's


@dataclass(frozen=True, kw_only=True)
class Case:
    train: int  # images
    val: int
    side: int
    epochs: float
    batch: int


Rows = np.ndarray[Any, Any]  # (N, M) structures, the number of a choice at each of M places
Choices = dict[str, tuple[str, ...]]  # choice -> spec of each seed, as JSON


CASES = {
    "digits": Case(train=200, val=800, side=16, epochs=40, batch=32),
    "fashion": Case(train=4000, val=2000, side=20, epochs=12, batch=64),
}
QUICK = {
    "digits": Case(train=100, val=300, side=16, epochs=12, batch=32),
    "fashion": Case(train=200, val=500, side=28, epochs=3, batch=64),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A choice of a network, trained with several seeds."""

    choice: str
    networks: tuple[str, ...]
    ms: tuple[float, ...]  # per image, measured here in turn with the others
    test: tuple[float, ...]  # top-1 of each seed


def open_case(name: str, case: Case, source: Path | None) -> DataSet:
    """Few images to train on; more than usual of the rest to choose by."""
    if name == "digits":
        data = open_data("digits")
    elif source is None:
        raise ValueError(f"{name} needs --data FOLDER, see --help")
    else:
        file = find_file(source, "train-images-idx3-ubyte*", "Debian's dataset-fashion-mnist")
        data = open_data(str(file.parent))
    order = np.random.default_rng(0).permutation(len(data.train)).tolist()
    train, rest = order[: case.train], order[case.train : case.train + case.val]
    return replace(data, train=data.train.subset(train), val=data.train.subset(rest))


def run(generator: Generator[str, None, Any]) -> Any:
    """The result of a stage, whose lines are printed."""
    while True:
        try:
            print(next(generator), flush=True)
        except StopIteration as stop:
            return stop.value


def time_all(
    specs: Sequence[NetSpec], settings: SearchSettings, work: Path
) -> Generator[str, None, list[float]]:
    """ms per image of each: measured here, or by the profile."""
    if not settings.is_here:
        return Estimator(load_profile(settings.target), 1).many(specs).tolist()
    label = find_label(settings.format)
    times = yield from measure_specs(specs, 1, label, work / "scratch")
    return [time.ms for time in times]


def master_ms(data: DataSet, settings: SearchSettings, work: Path) -> float:
    """The time of the MasterNet, measured once."""
    spec = replace(find_master(settings, data), resolution=settings.resolutions[0])

    def first() -> Generator[str, None, float]:
        return (yield from time_all([spec], settings, work))[0]

    return run(run_stage(work, "master_ms", float, first()))


def scaled_by_width(job: SearchJob, ms: float) -> NetSpec:
    """The MasterNet with the largest multiple of its widths that takes at most `ms` here."""
    master = replace(job.space.master, resolution=job.home.resolution)
    specs = [master.scaled(width=width) for width in WIDTHS]
    times = run(time_all(specs, job.settings, job.folder))
    fits = [spec for spec, time in zip(specs, times, strict=True) if time <= ms]
    return fits[-1] if fits else specs[0]


def random_within(job: SearchJob, profile: Profile, rng: np.random.Generator, ms: float) -> Rows:
    """(`POOL`, M) random structures whose estimated time is at most `ms`; fewer if few are."""
    tables, rows = job.tables(profile, job.home), [np.empty((0, len(job.space.start)), int)]
    for _ in range(MOST // CHUNK):
        random = job.space.random(rng, CHUNK)
        rows.append(random[tables(random) <= ms])
        if sum(map(len, rows)) >= POOL:
            break
    return np.concatenate(rows)[:POOL]


def by_macs(job: SearchJob, rows: Rows) -> Rows:
    """The structures with the most multiply-adds first."""
    macs = [operators_of(job.spec(row, job.home)).macs.sum() for row in rows]
    return rows[np.argsort(-np.array(macs))]


def within_as_measured(
    job: SearchJob, profile: Profile, ms: float, *, largest: bool
) -> list[NetSpec]:
    """Random structures of the budget, or the largest of them, that take at most `ms` here.

    The times of the first ones correct the estimates by which the next ones are drawn.
    """
    rng, ratio, fits = np.random.default_rng(1), 1.0, list[NetSpec]()
    for _ in range(CORRECTIONS):
        pool = random_within(job, profile, rng, ms / ratio)
        rows = by_macs(job, pool)[: round(LARGEST * len(pool))] if largest else pool
        rows = rows[:TIMED]
        if not len(rows):
            break
        specs = [job.spec(row, job.home) for row in rows]
        times = np.array(run(time_all(specs, job.settings, job.folder)))
        fits = [spec for spec, time in zip(specs, times, strict=True) if time <= ms]
        ratio = float(np.median(times / job.tables(profile, job.home)(rows)))
    if not fits:
        raise ValueError(f"no random structure takes at most {ms:.4g} ms here")
    return fits


def choices(
    job: SearchJob, best: NetSpec, ms: float, seeds: int
) -> Generator[str, None, dict[str, tuple[str, ...]]]:
    """The network of each choice for each seed, as JSON."""
    profile = saved_stage(job.folder, "times", DeviceTimes).profile
    yield f"structures that take at most {ms:.4g} ms here"
    random = within_as_measured(job, profile, ms, largest=False)
    largest = within_as_measured(job, profile, ms, largest=True)
    order = np.random.default_rng(1).choice(len(largest), seeds)
    table = {
        "searched": [best] * seeds,
        "MasterNet scaled by width": [scaled_by_width(job, ms)] * seeds,
        "random within the budget": (random * seeds)[:seeds],
        "the largest that fits": largest[:1] * seeds,
        "random among the largest": [largest[i] for i in order],
    }
    return {name: tuple(spec.to_json() for spec in specs) for name, specs in table.items()}


def train_all(job: SearchJob, networks: Mapping[str, tuple[NetSpec, int]]) -> dict[str, TunedScore]:
    """Train each network from its seed; by name."""
    trials = [
        training_trial(
            job.folder / "baselines" / name,
            NetworkTraining(
                spec=spec,
                data=job.data,
                recipe=job.master_choice(job.home),
                seed=seed,
                workers=job.options.workers,
            ),
        )
        for name, (spec, seed) in networks.items()
    ]
    return dict(zip(networks, run(job.run(TRAINING, trials)), strict=True))


def compare(job: SearchJob, data: DataSet, best: NetSpec, ms: float, seeds: int) -> list[Row]:
    """All choices, trained with the same seeds and scored on the test images."""
    stage = run_stage(job.folder / "baselines", "choices", Choices, choices(job, best, ms, seeds))
    table = {
        name: [NetSpec.from_json(text) for text in texts] for name, texts in run(stage).items()
    }
    trials = {
        f"{choice.replace(' ', '-')}-{seed}": (spec, seed)
        for choice, specs in table.items()
        for seed, spec in enumerate(specs)
    }
    train_all(job, trials)
    unique = list({spec.to_json(): spec for specs in table.values() for spec in specs}.values())
    times = run(time_all(unique, job.settings, job.folder))
    ms_of = {spec.to_json(): time for spec, time in zip(unique, times, strict=True)}

    def test(name: str) -> float:
        bundle = zoo.load(job.folder / "baselines" / name / "run" / "bundle")
        return score_bundle(bundle, data.test, job.devices[0]).scores["top1"]

    return [
        Row(
            choice=choice,
            networks=tuple(dict.fromkeys(map(describe, specs))),
            ms=tuple(dict.fromkeys(ms_of[spec.to_json()] for spec in specs)),
            test=tuple(test(f"{choice.replace(' ', '-')}-{seed}") for seed, _ in enumerate(specs)),
        )
        for choice, specs in table.items()
    ]


def correlation(job: SearchJob, master: TunedScore, tunings: Sequence[Tuning], count: int) -> Any:
    """Spearman's correlation of prediction and validation of random structures, trained fully."""
    rows = job.space.random(np.random.default_rng(2), count)
    trials = {f"random-{n:02d}": (job.spec(row, job.home), 0) for n, row in enumerate(rows)}
    scores = [each.score for each in train_all(job, trials).values()]
    predicted, _ = model_of(job, master, tunings).predict(rows)
    # Spearman's is Pearson's correlation of the ranks.
    spearman = np.corrcoef(rankdata(predicted), rankdata(scores))[0, 1]
    return float(spearman), list(zip(predicted.tolist(), scores, strict=True))


def markdown(result: Mapping[str, Any]) -> str:
    lines = ["| network | ms | test top-1 | seeds |", "|---|---|---|---|"]
    for row in result["networks"]:
        spread = f" ± {stdev(row['test']):.2f}" if len(row["test"]) > 1 else ""
        ms = f"{min(row['ms']):.3f}" + (f" to {max(row['ms']):.3f}" if len(row["ms"]) > 1 else "")
        score = f"{mean(row['test']):.2f}{spread}"
        lines.append(f"| {row['choice']} | {ms} | {score} | {len(row['test'])} |")
    return "\n".join(
        [
            f"# Search of {result['data']}, measured for real",
            "",
            f"`python benchmarks/search.py`; {result['environment']['device']}, "
            f"{result['environment']['date'][:10]}{', the short version' * result['quick']}.",
            "",
            "Times are " + ("measured." if result["device"] == HERE else "estimates by a profile."),
            "",
            f"The MasterNet has {result['master_val']:.2f} % on the validation split and takes "
            f"{result['master_ms']:.3f} ms; the budget is {result['budget_ms']:.3f} ms. Spearman "
            f"of predictions and {len(result['random'])} random structures, trained fully: "
            f"{result['spearman']:.2f}.",
            "",
            *lines,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=[*CASES])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--format", default="", help="what is measured, as for `search`")
    parser.add_argument("--target", default=HERE, help="estimate by a profile: for a busy machine")
    parser.add_argument("--whole", type=int, default=24, help="as for `search`; default: 24")
    parser.add_argument("--quick", action="store_true")
    words = parser.parse_args()
    case = (QUICK if words.quick else CASES)[words.case]
    seeds, count = (1, 8) if words.quick else (3, 20)
    data = open_case(words.case, case, words.data)
    settings = SearchSettings(
        master="genet_tiny",
        budget_ms=1.0,
        format=words.format,
        target=words.target,
        resolutions=(case.side,),
        kernel_sizes=(),
        most_widths=12,
        samples=3 if words.quick else 9,
        trainings=25 if words.quick else None,
        measured=8 if words.quick and words.target == HERE else 16,
        whole=min(4, words.whole) if words.quick else words.whole,
        finalists=3 if words.quick else 5,
    )
    recipe = RecipeChoice("scratch", {"epochs": case.epochs, "batch_size": case.batch})
    own_ms = master_ms(data, settings, words.work)
    settings = replace(settings, budget_ms=SHARE * own_ms)
    folder = words.work / "search"
    options = StudyOptions(device="cpu", workers=0)
    last = None
    for last in run_study(SEARCH, data, folder, settings, recipe, options):
        print_parts(last.parts)
    assert last is not None
    job = SearchJob(
        folder=words.work / "search",
        data=data,
        settings=settings,
        recipe=recipe,
        options=options,
        devices=local_devices("cpu"),
    )
    best = last.result.best.finalist
    master = saved_stage(folder, "master", TunedScore)
    tunings = [
        tuning
        for name in ("design", "whole", "sequential")
        for tuning in saved_stage(folder, name, tuple[Tuning, ...])
    ]
    networks = compare(job, data, job.spec(best.structure, best.variant), SHARE * own_ms, seeds)
    spearman, random = correlation(job, master, tunings, count)
    result = dict(
        environment=asdict(Environment.here()),
        data=words.case,
        quick=words.quick,
        device=words.target,
        case=asdict(case),
        master_ms=own_ms,
        master_val=master.score,
        budget_ms=SHARE * own_ms,
        networks=[asdict(row) for row in networks],
        spearman=spearman,
        random=random,
        seconds=read_seconds(folder),
    )
    with atomic_write(words.out, OUTPUT) as temporary:
        temporary.write_text(json.dumps(result, indent=1))
    words.out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
