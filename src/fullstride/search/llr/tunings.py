"""The stages of a search that train: tunings, their regression, the selection and the winners."""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fullstride.latency.network_times import estimates
from fullstride.latency.profiles import Profile
from fullstride.latency.spec_operators import operators_of
from fullstride.nets import zoo
from fullstride.search.block_tuning import (
    TRAINING,
    TUNING,
    BlockTuning,
    NetworkTraining,
    TunedScore,
    training_trial,
)
from fullstride.search.llr.plan import (
    SearchJob,
    describe,
    design_of,
    final_choice,
    further_tunings,
    generator,
    master_choice,
    measure_structures,
    profile_of,
    random_structures,
    tuning_choice,
)
from fullstride.search.llr.results import (
    WHOLE,
    DeviceTimes,
    Finalist,
    Regression,
    Structure,
    Tuning,
    Variant,
    Winner,
)
from fullstride.search.structures.additive import AdditiveModel, fit, fit_paper
from fullstride.search.structures.proposals import fastest, next_structures, select
from fullstride.study.driver import run_stage
from fullstride.study.trials import Failure, Trial
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.scoring import score_bundle

AT_ONCE = 4  # trainings between two fits of the model
PROPOSE = 3  # purpose of random draws, beside those of `search_plan`
MASTER = "master"


def train_master(job: SearchJob) -> Generator[str, None, TunedScore]:
    """Train the MasterNet; its validation score is what everything is compared with."""
    trial = whole_trial(job, MASTER, tuple(job.space.start.tolist()))
    results = yield from job.run_named(TRAINING, {MASTER: trial})
    score = results[MASTER]
    if isinstance(score, Failure):
        raise ValueError(
            f"the MasterNet was not trained: {score.failure}; delete {trial.result} to try again"
        )
    return score


def whole_trial(
    job: SearchJob,
    name: str,
    structure: Structure,
    variant: Variant | None = None,
    recipe: RecipeChoice | None = None,
) -> Trial:
    """A training from random weights, by default as the MasterNet's."""
    return training_trial(
        job.trial_folder(name),
        NetworkTraining(
            spec=job.spec(structure, variant or job.home),
            data=job.data,
            recipe=recipe or master_choice(job, variant),
            seed=job.settings.seed,
            workers=job.workers,
        ),
    )


def tuning_trial(job: SearchJob, name: str, structure: Structure, place: int) -> Trial:
    """Exchange one place for that of `structure`, or all places for -1, and tune."""
    return training_trial(
        job.trial_folder(name),
        BlockTuning(
            master=job.trial_folder(MASTER) / "run",
            spec=job.spec(structure, job.home),
            again=job.parts(place),
            data=job.data,
            recipe=tuning_choice(job),
            seed=job.settings.seed,
            method=job.settings.tune,
            workers=job.workers,
        ),
    )


def run_tunings(
    job: SearchJob, rows: Mapping[str, tuple[Structure, int]]
) -> Generator[str, None, tuple[Tuning, ...]]:
    """Run the trials of `rows`: name of the trial -> structure and place."""
    trials = {name: tuning_trial(job, name, *row) for name, row in rows.items()}
    results = yield from job.run_named(TUNING, trials)
    return tuple(tuning_of(name, *row, result=results[name]) for name, row in rows.items())


def tuning_of(name: str, structure: Structure, place: int, result: TunedScore | Failure) -> Tuning:
    if isinstance(result, Failure):
        return Tuning(trial=name, structure=structure, place=place, failure=result.failure)
    return Tuning(trial=name, structure=structure, place=place, score=result.score)


def run_design(job: SearchJob) -> Generator[str, None, tuple[Tuning, ...]]:
    """The first design, one change at a time."""
    design = design_of(job)
    rows = {
        f"design-{number:03d}": (tuple(structure), place)
        for number, (structure, place) in enumerate(
            zip(design.structures.tolist(), design.places.tolist(), strict=True)
        )
    }
    return (yield from run_tunings(job, rows))


def run_whole(job: SearchJob) -> Generator[str, None, tuple[Tuning, ...]]:
    """Random structures, trained to the end from random weights."""
    rows = {
        f"whole-{number:02d}": tuple(structure)
        for number, structure in enumerate(random_structures(job).tolist())
    }
    trials = {name: whole_trial(job, name, structure) for name, structure in rows.items()}
    results = yield from job.run_named(TRAINING, trials)
    return tuple(tuning_of(name, row, WHOLE, results[name]) for name, row in rows.items())


def model_of(job: SearchJob, master: TunedScore, tunings: Sequence[Tuning]) -> AdditiveModel:
    """The regression on all tunings that have a score.

    Tunings of one place share a reference, which the control of the place determines, as a block
    that is trained again has another score than the MasterNet even if nothing was changed; so have
    structures of which all places are tuned. Trainings from random weights share that of the
    MasterNet, and their effects are those of the model.
    """
    scored = [each for each in tunings if each.score is not None]
    structures = np.array([each.structure for each in scored], int).reshape(
        -1, len(job.space.places)
    )
    scores = np.array([each.score for each in scored], float)
    if job.method.regression == "paper":
        if not scored:
            raise ValueError("no tuning has a score: see the failures of the trials")
        return fit_paper(job.space, structures, scores, master.score)
    own = job.space.start[None]
    structures = np.concatenate([own, structures]) if scored else own
    scores = np.append(master.score, scores)
    groups = np.array([0, *(each.place - WHOLE for each in scored)])
    tuned = groups > 0
    if job.method.baseline == "master":
        groups[:] = 0
    if WHOLE not in {each.place for each in scored}:  # all that is known is by tunings
        tuned = None
    return fit(job.space, structures, scores, groups=groups, tuned=tuned)


def regress(
    job: SearchJob, master: TunedScore, tunings: Sequence[Tuning]
) -> Generator[str, None, Regression]:
    """The pseudo-gradients with their standard errors."""
    model = model_of(job, master, tunings)
    yield f"fitted to {len(tunings)} tunings"
    return Regression(
        slopes=model.slopes(),
        reference=model.reference,
        noise=model.noise if math.isfinite(model.noise) else None,
        tunings=len(tunings),
        failures=tuple(f"{each.trial}: {each.failure}" for each in tunings if each.failure),
    )


def tune_further(
    job: SearchJob, master: TunedScore, times: DeviceTimes, tunings: Sequence[Tuning]
) -> Generator[str, None, tuple[Tuning, ...]]:
    """Tune structures within the budget that the model proposes, four between two fits.

    They differ from the MasterNet at several places, so all of their parts are new, and the first
    one is their control, the MasterNet's own structure. Proposals are stored before they are run,
    so that a search that was killed goes on with the same ones.
    """
    left, further = further_tunings(job, design_of(job)), list[Tuning]()
    number = 0
    while left > 0:
        number += 1
        control = [tuple(job.space.start.tolist())] if number == 1 else []
        model = model_of(job, master, (*tunings, *further))
        tried = [each.structure for each in (*tunings, *further)]
        count = min(AT_ONCE, left) - len(control)
        work = propose(job, times, model, tried, number, count)
        rows: tuple[Structure, ...] = yield from run_stage(
            job.folder, f"proposals_{number}", tuple[Structure, ...], work
        )
        if not rows and not control:
            yield "all structures within the budget have been tuned"
            break
        named = {
            f"round-{number:02d}-{index}": (row, -1) for index, row in enumerate([*control, *rows])
        }
        further += yield from run_tunings(job, named)
        left -= len(named)
    return tuple(further)


def propose(
    job: SearchJob,
    times: DeviceTimes,
    model: AdditiveModel,
    tried: Sequence[Structure],
    number: int,
    count: int,
) -> Generator[str, None, tuple[Structure, ...]]:
    """Up to `count` structures within the budget that were not tried."""
    variant = job.home
    if not fits(job, times.profile, variant):  # a smaller resolution may
        variant = next(each for each in job.variants if fits(job, times.profile, each))
    rows = next_structures(
        model,
        job.tables(times.profile, variant),
        job.budget.ms_per_image,
        np.array(tried),
        generator(job, PROPOSE, number),
        count=count,
        method="greedy" if job.method.next == "greedy" else "thompson",
    )
    yield f"refit {number}: {len(rows)} structures to tune"
    return tuple(tuple(row) for row in rows.tolist())


def fits(job: SearchJob, profile: Profile, variant: Variant, ratio: float = 1.0) -> bool:
    """Whether any structure is within the budget, by estimates times `ratio`."""
    tables = job.tables(profile, variant)
    return ratio * float(tables(fastest(job.space, tables)[None])[0]) <= job.budget.ms_per_image


# The best structures within the budget are selected, measured and trained.


NORMAL_95 = 1.96  # standard deviations
SELECT = 4  # purpose of random draws, beside those of the other stages
CORRECTIONS = 3  # measurements of finalists at most, each after another selection
UNUSED = 0.1  # of the budget: a larger share calls for another selection
FINAL = "final"


def select_all(
    job: SearchJob, master: TunedScore, times: DeviceTimes, tunings: Sequence[Tuning]
) -> Generator[str, None, tuple[Finalist, ...]]:
    """The best structures of each variant by the regression, the best predicted first."""
    model = model_of(job, master, tunings)
    rows: list[Finalist] = []
    for variant in job.variants:
        if not fits(job, times.profile, variant):
            yield f"{variant}: nothing fits {job.budget}"
            continue
        chosen = select_in(job, model, times.profile, variant)
        rows += chosen
        yield f"{variant}: the best is predicted at {chosen[0].predicted:.2f} %"
    return tuple(rows)


def select_in(
    job: SearchJob, model: AdditiveModel, profile: Profile, variant: Variant, ratio: float = 1.0
) -> list[Finalist]:
    """The top of one variant, with intervals of score and time.

    `ratio` is that of measured times to the estimates near the budget.
    """
    tables, budget = job.tables(profile, variant), job.budget
    number = job.variants.index(variant)
    selection = select(
        job.space,
        model.gains(),
        tables,
        budget.ms_per_image / ratio,
        top=job.settings.finalists,
        count=job.settings.count,
        rng=generator(job, SELECT, number),
    )
    scores, errors = model.predict(selection.structures)
    specs = [job.spec(row, variant) for row in selection.structures]
    rows = estimates([operators_of(each) for each in specs], profile, [budget.batch] * len(specs))
    finalists: list[Finalist] = []
    for structure, spec, score, error, ms, time, bounds in zip(
        selection.structures.tolist(),
        specs,
        scores.tolist(),
        np.nan_to_num(errors, posinf=100.0).tolist(),
        (ratio * selection.ms).tolist(),
        rows,
        map(job.space.active_bounds, selection.structures),
        strict=True,
    ):
        reach = NORMAL_95 * error
        finalists.append(
            Finalist(
                structure=tuple(structure),
                resolution=variant.resolution,
                kernel=variant.kernel,
                network=describe(spec),
                predicted=score,
                low=score - reach,
                high=score + reach,
                ms=ms,
                ms_low=ms * time.low / time.ms_per_image,
                ms_high=ms * time.high / time.ms_per_image,
                bound=time.bound,
                at_bounds=bounds,
            )
        )
    return finalists


def measure_finalists(
    job: SearchJob,
    master: TunedScore,
    times: DeviceTimes,
    tunings: Sequence[Tuning],
    finalists: Sequence[Finalist],
) -> Generator[str, None, tuple[Finalist, ...]]:
    """The finalists that are within the budget when they are measured here.

    Where none of a variant is, or all leave a share of the budget unused, the profile is fitted
    once more with the new times, and the selection is repeated by it. On another device nothing
    can be measured: the estimates stay.

    Raises ValueError if nothing measured is within the budget.
    """
    if not job.settings.is_here:
        return tuple(finalists)
    model, results = model_of(job, master, tunings), dict[tuple[Structure, Variant], Finalist]()
    every, rows, inside = list(times.measured), list(finalists), list[Finalist]()
    for attempt in range(CORRECTIONS):
        measured = yield from measure_structures(job, [(f.structure, f.variant) for f in rows])
        every += measured
        for each, time in zip(rows, measured, strict=True):
            results[each.structure, each.variant] = replace(
                each, ms=time.ms, ms_low=time.low, ms_high=time.high, measured=True, bound=""
            )
        inside = within_budget(job, results.values())
        again = [each for each in job.variants if misses_budget(job, results.values(), each)]
        if not again or attempt + 1 == CORRECTIONS:
            break
        yield f"{len(inside)} of {len(results)} are within the budget: the times are corrected"
        profile, rows = profile_of(job, every), []
        for variant in again:
            ratio = ratio_of(job, profile, results.values(), variant)
            if fits(job, profile, variant, ratio):
                rows += select_in(job, model, profile, variant, ratio)
        rows = [each for each in rows if (each.structure, each.variant) not in results]
        if not rows:
            break
    if not inside:
        fastest = min(each.ms for each in results.values())
        raise ValueError(
            f"none of {len(results)} structures fits {job.budget} when it is measured: the fastest "
            f"took {fastest:.4g} ms; the machine may be busy, or the budget too small"
        )
    return tuple(inside)


def misses_budget(job: SearchJob, measured: Iterable[Finalist], variant: Variant) -> bool:
    """Whether, maybe by wrong estimates, no network is within the budget, or all far below."""
    limit = job.budget.ms_per_image
    ms = [each.ms for each in measured if each.variant == variant]
    return not ms or min(ms) > limit or max(ms) < (1 - UNUSED) * limit


def ratio_of(
    job: SearchJob, profile: Profile, measured: Iterable[Finalist], variant: Variant
) -> float:
    """Of measured times to their estimates by `profile`: the median of a variant's finalists."""
    rows = [each for each in measured if each.variant == variant]
    if not rows:
        return 1.0
    estimated = job.tables(profile, variant)(np.array([each.structure for each in rows]))
    return float(np.median([each.ms for each in rows] / estimated))


def within_budget(job: SearchJob, finalists: Iterable[Finalist]) -> list[Finalist]:
    """By variant, the best predicted first."""
    rows = [each for each in finalists if each.ms <= job.budget.ms_per_image]
    return sorted(rows, key=lambda each: (job.variants.index(each.variant), -each.predicted))


def train_winners(
    job: SearchJob, finalists: Sequence[Finalist]
) -> Generator[str, None, tuple[Winner, ...]]:
    """Train the best predicted of each variant to the end, by the MasterNet's recipe."""
    chosen: dict[str, Finalist] = {}
    for variant in job.variants:
        rows = [each for each in finalists if each.variant == variant][: job.method.winners]
        chosen |= {f"winner-{variant.name}-{number}": each for number, each in enumerate(rows)}
    trials = {
        name: whole_trial(job, name, each.structure, each.variant) for name, each in chosen.items()
    }
    results = yield from job.run_named(TRAINING, trials)
    return tuple(winner_of(name, each, results[name]) for name, each in chosen.items())


def winner_of(name: str, finalist: Finalist, result: TunedScore | Failure) -> Winner:
    if isinstance(result, Failure):
        return Winner(trial=name, finalist=finalist, score=None, failure=result.failure)
    return Winner(trial=name, finalist=finalist, score=result.score)


def best_of(winners: Sequence[Winner]) -> Winner:
    """The most accurate in validation; of equal ones the fastest. Raises ValueError for none."""
    trained = [each for each in winners if each.score is not None]
    if not trained:
        reasons = "; ".join(f"{each.trial}: {each.failure}" for each in winners[:2])
        raise ValueError(f"none of {len(winners)} winners was trained: {reasons}")
    return max(trained, key=lambda each: (each.score, -each.finalist.ms))


def train_final(job: SearchJob, best: Winner) -> Generator[str, None, Winner]:
    """The network of a search by the last recipe, if there is one; else the winner as it is."""
    if not job.method.final:
        return best
    recipe = final_choice(job, best.finalist.variant)
    trial = whole_trial(job, FINAL, best.finalist.structure, best.finalist.variant, recipe)
    results = yield from job.run_named(TRAINING, {FINAL: trial})
    return best_of([winner_of(FINAL, best.finalist, results[FINAL])])


def score_test(job: SearchJob, best: Winner) -> Generator[str, None, dict[str, float]]:
    """The scores of the network of a search on the test images, which nothing has read before."""
    images = job.data.test
    if not len(images):
        return {}
    yield f"scoring {best.trial} on {len(images):,} test images"
    bundle = zoo.load(bundle_path(job, best))
    return dict(score_bundle(bundle, images, job.devices[0]).scores)


def bundle_path(job: SearchJob, best: Winner) -> Path:
    return job.trial_folder(best.trial) / "run" / "bundle"
