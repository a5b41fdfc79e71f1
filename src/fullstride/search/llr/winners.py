"""Which structures are the best within the budget, and which of them when they are trained?"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fullstride.data.dataset import Images
from fullstride.latency.network_times import estimates
from fullstride.latency.profiles import Profile
from fullstride.latency.spec_operators import operators_of
from fullstride.nets import zoo
from fullstride.search.llr.plan import (
    final_choice,
    generator,
    measure_structures,
    profile_of,
)
from fullstride.search.llr.search_folder import (
    DeviceTimes,
    Finalist,
    Structure,
    Tuning,
    Variant,
    Winner,
)
from fullstride.search.llr.search_job import SearchJob, describe
from fullstride.search.llr.tunings import fits, model_of, whole_trial
from fullstride.search.structures.additive import AdditiveModel
from fullstride.search.structures.select import select
from fullstride.search.trials import Failure
from fullstride.search.tuning.block_tuning import TRAINING, TunedScore
from fullstride.train.scoring import score_bundle

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
        top=job.settings.top,
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
        selection.bounds,
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
            ms: dict[str, float] = dict(ms=time.ms, ms_low=time.low, ms_high=time.high)
            results[each.structure, each.variant] = replace(each, **ms, measured=True, bound="")
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
    results = yield from job.run(TRAINING, trials)
    return tuple(winner_of(name, each, results[name]) for name, each in chosen.items())


def winner_of(name: str, finalist: Finalist, result: TunedScore | Failure) -> Winner:
    if isinstance(result, Failure):
        return Winner(trial=name, finalist=finalist, score=None, failure=result.failure)
    return Winner(trial=name, finalist=finalist, score=result.score)


def best_of(winners: Sequence[Winner]) -> Winner:
    """The most accurate on the minival; of equal ones the fastest. Raises ValueError for none."""
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
    results = yield from job.run(TRAINING, {FINAL: trial})
    return best_of([winner_of(FINAL, best.finalist, results[FINAL])])


def score_test(
    job: SearchJob, images: Images, best: Winner
) -> Generator[str, None, dict[str, float]]:
    """The scores of the network of a search on the test images, which nothing has read before."""
    if not len(images):
        return {}
    yield f"scoring {best.trial} on {len(images):,} test images"
    bundle = zoo.load(bundle_path(job, best))
    return dict(score_bundle(bundle, images, job.devices[0]).scores)


def bundle_path(job: SearchJob, best: Winner) -> Path:
    return job.trial_folder(best.trial) / "run" / "bundle"
