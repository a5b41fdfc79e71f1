"""The stages of a search that train: tunings, their regression, the selection and the winners."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fullstride.io.console import count_of, verb_of
from fullstride.latency.estimator import operators_of
from fullstride.latency.network_times import estimates
from fullstride.latency.profiles import Profile
from fullstride.measure.budget import best, within
from fullstride.nets import zoo
from fullstride.search import block_tuning
from fullstride.search.llr.plan import (
    WHOLE,
    DeviceTimes,
    Finalist,
    Regression,
    SearchJob,
    Structure,
    Tuning,
    Variant,
    Winner,
    describe,
    measure_structures,
    profile_of,
)
from fullstride.search.structures import proposals
from fullstride.search.structures.proposals import AdditiveModel
from fullstride.study.driver import Results, run_stage
from fullstride.study.trials import Failure, Trial, Work
from fullstride.train.scoring import score_bundle

AT_ONCE = 4  # trainings between two fits of the model
# Purposes of random draws, apart from the purposes in `plan`.
PROPOSE, SELECT = 3, 4
MASTER, FINAL = "master", "final"  # trials


def train_master(job: SearchJob, done: Results) -> Work[block_tuning.TunedScore]:
    """Train the MasterNet, whose validation score is the reference."""
    trial = whole_trial(job, MASTER, job.start, job.home)
    (score,) = yield from job.run(block_tuning.TRAINING, [trial])
    if isinstance(score, Failure):
        raise ValueError(
            f"the MasterNet was not trained: {score.failure}; delete {trial.result} to try again"
        )
    return score


def whole_trial(
    job: SearchJob, name: str, structure: Structure, variant: Variant, final: bool = False
) -> Trial:
    """A training from random weights, by the MasterNet's recipe or, if `final`, the last recipe."""
    choice = job.final_choice if final else job.master_choice
    training = block_tuning.NetworkTraining(
        spec=job.spec(structure, variant),
        data=job.data,
        recipe=choice(variant),
        seed=job.settings.seed,
        workers=job.options.workers,
    )
    return block_tuning.training_trial(job.trial_folder(name), training)


def tuning_trial(job: SearchJob, name: str, structure: Structure, place: int) -> Trial:
    """Exchange the `place` of the MasterNet by `structure`, or all places for -1, and tune."""
    training = block_tuning.BlockTuning(
        spec=job.spec(structure, job.home),
        data=job.data,
        recipe=job.tuning_choice,
        seed=job.settings.seed,
        workers=job.options.workers,
        master=job.trial_folder(MASTER) / "run",
        again=job.parts(place),
        method=job.settings.tune,
    )
    return block_tuning.training_trial(job.trial_folder(name), training)


def score_of(result: block_tuning.TunedScore | Failure) -> tuple[float | None, str]:
    """The score of a trial, or None and the reason."""
    return (None, result.failure) if isinstance(result, Failure) else (result.score, "")


def run_tunings(
    job: SearchJob, rows: Mapping[str, tuple[Structure, int]]
) -> Work[tuple[Tuning, ...]]:
    """Run the trials of `rows`: name of the trial -> structure and place."""
    trials = [tuning_trial(job, name, *row) for name, row in rows.items()]
    results = yield from job.run(block_tuning.TUNING, trials)
    named = zip(rows.items(), results, strict=True)
    return tuple(Tuning(name, *row, *score_of(result)) for (name, row), result in named)


def run_design(job: SearchJob, done: Results) -> Work[tuple[Tuning, ...]]:
    structures, places = job.design.structures.tolist(), job.design.places.tolist()
    rows = zip(map(tuple, structures), places, strict=True)
    return (yield from run_tunings(job, {f"design-{n:03d}": row for n, row in enumerate(rows)}))


def run_whole(job: SearchJob, done: Results) -> Work[tuple[Tuning, ...]]:
    rows = {f"whole-{n:02d}": tuple(row) for n, row in enumerate(job.random_structures.tolist())}
    trials = [whole_trial(job, name, row, job.home) for name, row in rows.items()]
    results = yield from job.run(block_tuning.TRAINING, trials)
    named = zip(rows.items(), results, strict=True)
    return tuple(Tuning(*each, WHOLE, *score_of(result)) for each, result in named)


def model_of(
    job: SearchJob, master: block_tuning.TunedScore, tunings: Sequence[Tuning]
) -> AdditiveModel:
    """The regression on all tunings that have a score.

    Tunings of one place share a reference, which the place's control determines, as retraining a
    block changes the score even if its design stays; so do structures with all places tuned.
    Trainings from random weights share the MasterNet's reference and the model's effects.
    """
    scored = [each for each in tunings if each.score is not None]
    structures = np.array([each.structure for each in scored], int).reshape(
        -1, len(job.space.places)
    )
    scores = np.array([each.score for each in scored], float)
    if job.method.regression == "paper":
        if not scored:
            raise ValueError("no tuning has a score: see the failures of the trials")
        return proposals.fit_paper(job.space, structures, scores, master.score)
    own = job.space.start[None]
    structures = np.concatenate([own, structures]) if scored else own
    scores = np.append(master.score, scores)
    groups = np.array([0, *(each.place - WHOLE for each in scored)])
    tuned = groups > 0
    if job.method.baseline == "master":
        groups[:] = 0
    if WHOLE not in {each.place for each in scored}:  # all scores are of tunings
        tuned = None
    return proposals.fit(job.space, structures, scores, groups=groups, tuned=tuned)


def tunings_of(done: Results) -> tuple[Tuning, ...]:
    """All tunings so far, and the trainings from random weights."""
    return (*done["design"], *done.get("whole", ()), *done.get("sequential", ()))


def regress(job: SearchJob, done: Results) -> Work[Regression]:
    tunings = tunings_of(done)
    model = model_of(job, done["master"], tunings)
    yield f"fitted to {count_of(len(tunings), 'tuning')}"
    return Regression(
        slopes=model.slopes(),
        reference=model.reference,
        noise=model.noise if math.isfinite(model.noise) else None,
        failures=tuple(f"{each.trial}: {each.failure}" for each in tunings if each.failure),
    )


def tune_further(job: SearchJob, done: Results) -> Work[tuple[Tuning, ...]]:
    """Tune structures within the budget that the model proposes, four between two fits.

    They differ from the MasterNet at several places, so all of their parts are new; the first
    structure is their control, the MasterNet's own. Proposals are stored before they run, so that a
    killed search resumes with the same ones.
    """
    left, further, number = job.further_tunings, list[Tuning](), 0
    times, tunings = done["times"], tunings_of(done)
    while left > 0:
        number += 1
        control = [job.start] if number == 1 else []
        every, count = (*tunings, *further), min(AT_ONCE, left) - len(control)
        model = model_of(job, done["master"], every)
        work = propose(job, times, model, every, number, count)
        rows: tuple[Structure, ...] = yield from run_stage(
            job.folder, f"proposals_{number}", tuple[Structure, ...], work
        )
        if not rows and not control:
            yield "all structures within the budget have been tuned"
            break
        chosen = [*control, *rows]
        further += yield from run_tunings(
            job, {f"round-{number:02d}-{i}": (row, -1) for i, row in enumerate(chosen)}
        )
        left -= len(chosen)
    return tuple(further)


def propose(
    job: SearchJob,
    times: DeviceTimes,
    model: AdditiveModel,
    tried: Sequence[Tuning],
    number: int,
    count: int,
) -> Work[tuple[Structure, ...]]:
    """Up to `count` new structures within the budget, in the home variant if any fits there."""
    variants = (job.home, *job.variants)
    variant = next(each for each in variants if fits(job, times.profile, each))
    rows = proposals.next_structures(
        model,
        job.tables(times.profile, variant),
        job.budget.ms_per_image,
        np.array([each.structure for each in tried]),
        job.draws(PROPOSE, number),
        count=count,
        method="greedy" if job.method.next == "greedy" else "thompson",
    )
    yield f"refit {number}: {count_of(len(rows), 'structure')} to tune"
    return tuple(tuple(row) for row in rows.tolist())


def fits(job: SearchJob, profile: Profile, variant: Variant, ratio: float = 1.0) -> bool:
    """Whether any structure is within the budget, by estimates times `ratio`."""
    return ratio * job.fastest_ms(profile, variant) <= job.budget.ms_per_image


# The best structures within the budget are selected, measured and trained.

NORMAL_95 = 1.96  # standard deviations
CORRECTIONS = 3  # most measurements of finalists, each after another selection
UNUSED = 0.1  # largest unused share of the budget without another selection


def select_all(job: SearchJob, done: Results) -> Work[tuple[Finalist, ...]]:
    """The best structures of each variant by the regression, the best first."""
    model, profile = model_of(job, done["master"], tunings_of(done)), done["times"].profile
    rows: list[Finalist] = []
    for variant in job.variants:
        if not fits(job, profile, variant):
            yield f"{variant}: nothing fits {job.budget}"
            continue
        chosen = select_in(job, model, profile, variant)
        rows += chosen
        yield f"{variant}: the best is predicted at {chosen[0].predicted:.2f} %"
    return tuple(rows)


def select_in(
    job: SearchJob, model: AdditiveModel, profile: Profile, variant: Variant, ratio: float = 1.0
) -> list[Finalist]:
    """The best structures of one variant, with intervals of score and time.

    `ratio` is measured time / estimated time near the budget.
    """
    selection = proposals.select(
        job.space,
        model.gains(),
        job.tables(profile, variant),
        job.budget.ms_per_image / ratio,
        top=job.settings.finalists,
        count=job.settings.count,
        rng=job.draws(SELECT, job.variants.index(variant)),
    )
    scores, errors = model.predict(selection.structures)
    reaches = NORMAL_95 * np.nan_to_num(errors, posinf=100.0)
    specs = [job.spec(row, variant) for row in selection.structures]
    batches = [job.budget.batch] * len(specs)
    times = estimates([*map(operators_of, specs)], profile, batches)
    numbers = (each.tolist() for each in (scores, reaches, ratio * selection.ms))
    return [
        Finalist(
            structure=tuple(row.tolist()),
            variant=variant,
            network=describe(spec),
            predicted=score,
            low=max(0.0, score - reach),
            high=min(100.0, score + reach),
            ms=ms,
            ms_low=ms * time.low / time.ms_per_image,
            ms_high=ms * time.high / time.ms_per_image,
            bound=time.bound,
            at_bounds=job.space.active_bounds(row),
        )
        for row, spec, time, score, reach, ms in zip(
            selection.structures, specs, times, *numbers, strict=True
        )
    ]


def measure_finalists(job: SearchJob, done: Results) -> Work[tuple[Finalist, ...]]:
    """The finalists that are within the budget by measurements here.

    If no finalist of a variant is within the budget, or all are far below, the profile is fitted
    again with the new times, and the selection is repeated. On another device, where nothing can be
    measured, the estimates stay.

    Raises ValueError if no measured finalist is within the budget.
    """
    if not job.settings.is_here:
        return done["selection"]
    model = model_of(job, done["master"], tunings_of(done))
    results = dict[tuple[Structure, Variant], Finalist]()
    every, rows, inside = [*done["times"].measured], [*done["selection"]], list[Finalist]()
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
        are = verb_of(len(inside), "are")
        yield f"{len(inside)} of {len(results)} {are} within the budget: the times are corrected"
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
            f"none of {count_of(len(results), 'structure')} fits {job.budget} when it is measured: "
            f"the fastest took {fastest:.4g} ms; the machine may be busy, or the budget too small"
        )
    return tuple(inside)


def misses_budget(job: SearchJob, measured: Iterable[Finalist], variant: Variant) -> bool:
    """Whether no measured network of a variant is within the budget, or all are far below."""
    limit = job.budget.ms_per_image
    ms = [each.ms for each in measured if each.variant == variant]
    return not ms or min(ms) > limit or max(ms) < (1 - UNUSED) * limit


def ratio_of(
    job: SearchJob, profile: Profile, measured: Iterable[Finalist], variant: Variant
) -> float:
    """The median ratio of a variant's measured times to their estimates by `profile`."""
    rows = [each for each in measured if each.variant == variant]
    if not rows:
        return 1.0
    estimated = job.tables(profile, variant)(np.array([each.structure for each in rows]))
    return float(np.median([each.ms for each in rows] / estimated))


def within_budget(job: SearchJob, finalists: Iterable[Finalist]) -> list[Finalist]:
    """The finalists within the budget by variant, the best predicted first."""
    rows = within(finalists, lambda each: each.ms, job.budget.ms_per_image)
    return sorted(rows, key=lambda each: (job.variants.index(each.variant), -each.predicted))


def train_winners(job: SearchJob, done: Results) -> Work[tuple[Winner, ...]]:
    """Train the best predicted structures of each variant to the end, by the MasterNet's recipe."""
    chosen: dict[str, Finalist] = {}
    for variant in job.variants:
        rows = [each for each in done["measured"] if each.variant == variant][: job.method.winners]
        chosen |= {f"winner-{variant.name}-{number}": each for number, each in enumerate(rows)}
    return (yield from train_finalists(job, chosen))


def train_finalists(
    job: SearchJob, chosen: Mapping[str, Finalist], *, final: bool = False
) -> Work[tuple[Winner, ...]]:
    """Train finalists from random weights; `chosen`: name of the trial -> finalist."""
    trials = [whole_trial(job, n, f.structure, f.variant, final) for n, f in chosen.items()]
    results = yield from job.run(block_tuning.TRAINING, trials)
    named = zip(chosen.items(), results, strict=True)
    return tuple(Winner(*each, *score_of(result)) for each, result in named)


def best_of(winners: Sequence[Winner]) -> Winner:
    """The winner with the best validation score, the fastest of equals. Raises ValueError."""
    trained = [each for each in winners if each.score is not None]
    chosen = best(trained, lambda each: each.finalist.ms, lambda each: each.score or 0.0)
    if chosen is None:
        reasons = "; ".join(f"{each.trial}: {each.failure}" for each in winners[:2])
        raise ValueError(f"none of {count_of(len(winners), 'winner')} was trained: {reasons}")
    return chosen


def train_final(job: SearchJob, done: Results) -> Work[Winner]:
    """The best winner, trained again by the last recipe if there is one."""
    winner = best_of(done["winners"])
    if not job.method.final:
        return winner
    return best_of((yield from train_finalists(job, {FINAL: winner.finalist}, final=True)))


def score_test(job: SearchJob, done: Results) -> Work[dict[str, float]]:
    """The scores of the search's network on the test images, which are read only here."""
    images, winner = job.data.test, done["final"]
    if not len(images):
        return {}
    yield f"scoring {winner.trial} on {count_of(len(images), 'test image')}"
    bundle = zoo.load(bundle_path(job, winner))
    return dict(score_bundle(bundle, images, job.devices[0]).scores)


def bundle_path(job: SearchJob, winner: Winner) -> Path:
    return job.trial_folder(winner.trial) / "run" / "bundle"
