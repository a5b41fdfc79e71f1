"""What is each change worth? Blocks are exchanged and tuned, and a model fits the scores."""

import math
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from fullstride.latency.profiles import Profile
from fullstride.search.llr.plan import (
    design_of,
    further_tunings,
    generator,
    master_choice,
    random_structures,
    tuning_choice,
)
from fullstride.search.llr.search_folder import (
    WHOLE,
    DeviceTimes,
    Regression,
    Slope,
    Structure,
    Tuning,
    Variant,
)
from fullstride.search.llr.search_job import SearchJob
from fullstride.search.structures.additive import AdditiveModel, fit, fit_paper
from fullstride.search.structures.proposals import next_structures
from fullstride.search.structures.select import fastest
from fullstride.search.study_folder import run_stage
from fullstride.search.trials import Failure, Trial
from fullstride.search.tuning.block_tuning import (
    TRAINING,
    TUNING,
    TunedScore,
    train_trial,
    tune_trial,
)
from fullstride.train.recipes.choice import RecipeChoice

AT_ONCE = 4  # trainings between two fits of the model
PROPOSE = 3  # purpose of random draws, beside those of `search_plan`
MASTER = "master"


def train_master(job: SearchJob) -> Generator[str, None, TunedScore]:
    """Train the MasterNet; its minival score is what everything is compared with."""
    trial = whole_trial(job, MASTER, tuple(job.space.start.tolist()))
    results = yield from job.run(TRAINING, {MASTER: trial})
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
    return train_trial(
        job.trial_folder(name),
        spec=job.spec(structure, variant or job.home),
        data=job.data,
        recipe=recipe or master_choice(job, variant),
        seed=job.settings.seed,
        workers=job.workers,
    )


def tuning_trial(job: SearchJob, name: str, structure: Structure, place: int) -> Trial:
    """Exchange one place for that of `structure`, or all places for -1, and tune."""
    return tune_trial(
        job.trial_folder(name),
        master=job.trial_folder(MASTER) / "run",
        spec=job.spec(structure, job.home),
        again=job.parts(place),
        data=job.data,
        recipe=tuning_choice(job),
        seed=job.settings.seed,
        method=job.settings.tune,
        workers=job.workers,
    )


def run_tunings(
    job: SearchJob, rows: Mapping[str, tuple[Structure, int]]
) -> Generator[str, None, tuple[Tuning, ...]]:
    """Run the trials of `rows`: name of the trial -> structure and place."""
    trials = {name: tuning_trial(job, name, *row) for name, row in rows.items()}
    results = yield from job.run(TUNING, trials)
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
    results = yield from job.run(TRAINING, trials)
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
    if job.method.reference == "master":
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
        slopes=tuple(
            Slope(
                place=each.place,
                term=each.term,
                value=each.value,
                standard_error=each.standard_error if math.isfinite(each.standard_error) else None,
            )
            for each in model.coefficients()
        ),
        reference=model.reference,
        noise=model.noise if math.isfinite(model.noise) else None,
        tunings=len(tunings),
        failures=tuple(f"{each.trial}: {each.failure}" for each in tunings if each.failure),
    )


def go_on(
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
