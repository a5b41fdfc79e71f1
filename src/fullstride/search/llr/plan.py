"""How long do the networks take, and how long will a search? Both are known before it trains."""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from fullstride.latency.devices import load_profile
from fullstride.latency.profiles import Profile
from fullstride.search.llr.search_folder import (
    DeviceTimes,
    MeasuredStructure,
    PlannedTrainings,
    SearchPlan,
    Structure,
    Variant,
)
from fullstride.search.llr.search_job import SearchJob
from fullstride.search.llr.times_here import find_label, fit_profile, measure_specs
from fullstride.search.structures.proposals import Design, first_design
from fullstride.search.structures.select import fastest
from fullstride.search.tuning.block_tuning import PAPER_TUNING, SPEC_OUTPUT, tuning_recipe
from fullstride.train.batches import recipe_in_epochs
from fullstride.train.precise_statistics import MAX_IMAGES
from fullstride.train.prepare import prepare
from fullstride.train.recipe import Recipe
from fullstride.train.recipes.choice import RecipeChoice, case_of
from fullstride.train.run_times import RunTimes, time_run
from fullstride.writing import atomic_write, scratch_folder

FURTHER = 16  # tunings after the first design, by default: four refits
# Of a step, with that of the same network without a teacher, whose forward pass is a third.
TEACHER = 4 / 3
TUNING_SHARE = 0.25  # of the MasterNet's epochs
# Purposes of random draws, apart from each other and from those of later stages.
MEASURE, SAMPLE, RANDOM = 1, 2, 5


def generator(job: SearchJob, purpose: int, number: int = 0) -> np.random.Generator:
    """Draws that are a function of the seed and what they are for."""
    return np.random.default_rng([job.settings.seed, purpose, number])


def time_networks(job: SearchJob) -> Generator[str, None, DeviceTimes]:
    """The profile of the device; here one that is fitted to networks that are measured."""
    if not job.settings.is_here:
        return DeviceTimes(profile=load_profile(job.settings.device))
    rows: list[tuple[Structure, Variant]] = [
        (tuple(job.space.start.tolist()), each) for each in job.variants
    ]
    count = max(job.settings.measured, len(rows) + 6)
    others = job.space.random(generator(job, MEASURE), count - len(rows)).tolist()
    for number, row in enumerate(others):
        rows.append((tuple(row), job.variants[number % len(job.variants)]))
    measured = yield from measure_structures(job, rows)
    return DeviceTimes(profile=profile_of(job, measured), measured=tuple(measured))


def measure_structures(
    job: SearchJob, rows: list[tuple[Structure, Variant]]
) -> Generator[str, None, list[MeasuredStructure]]:
    """The times here of untrained networks."""
    specs = [job.spec(structure, variant) for structure, variant in rows]
    label = find_label(job.settings.format)
    scratch = job.folder / "times"
    times = yield from measure_specs(specs, job.budget.batch, label, scratch)
    return [
        MeasuredStructure(
            structure=structure,
            resolution=variant.resolution,
            kernel=variant.kernel,
            ms=time.ms,
            low=time.low,
            high=time.high,
        )
        for (structure, variant), time in zip(rows, times, strict=True)
    ]


def profile_of(job: SearchJob, measured: list[MeasuredStructure]) -> Profile:
    """Of this machine, by all that was measured."""
    specs = [job.spec(each.structure, each.variant) for each in measured]
    label = find_label(job.settings.format)
    return fit_profile(specs, [each.ms for each in measured], job.budget.batch, label)


def design_of(job: SearchJob) -> Design:
    """The first design: one change at a time, with a control of each place."""
    method, samples = job.method, job.settings.samples
    is_controlled = method.reference == "control"
    design = first_design(
        job.space,
        generator(job, SAMPLE),
        per_place=samples if is_controlled else samples + 1,
        control_each=is_controlled,
        spread=method.design == "spread",
    )
    about = design.places >= 0  # by the paper there is no control
    return Design(design.structures[about], design.places[about])


def random_structures(job: SearchJob) -> np.ndarray:
    """(n, M) structures that are trained to the end whatever the model says."""
    return job.space.random(generator(job, RANDOM), job.settings.whole)


def further_tunings(job: SearchJob, design: Design) -> int:
    """Tunings after the first design."""
    if job.method.next == "none":
        return 0
    most = job.settings.trainings
    return FURTHER if most is None else max(0, most - len(design.places))


def training_recipe(job: SearchJob) -> Recipe:
    """That of the MasterNet and the winners."""
    return master_choice(job).resolve(case_of(job.data)).recipe


def master_choice(job: SearchJob, variant: Variant | None = None) -> RecipeChoice:
    """The recipe of the MasterNet and of the winners, at their resolution."""
    side = (variant or job.home).resolution
    changes = {"resolution": side, **job.recipe.changes}
    return RecipeChoice(job.recipe.source or job.method.training, changes)


def tuning_choice(job: SearchJob) -> RecipeChoice:
    """Changes of the recipe by which exchanged blocks are tuned.

    By default a quarter of the MasterNet's epochs, as the paper's 30 of 120.
    """
    whole = recipe_in_epochs(job.data, training_recipe(job)).epochs
    changes: dict[str, object] = dict(epochs=TUNING_SHARE * whole)
    if job.method.tuning == "paper":
        changes = dict(PAPER_TUNING)
    if job.settings.tune_epochs is not None:
        changes["epochs"] = job.settings.tune_epochs
    return RecipeChoice("", changes)


def make_plan(job: SearchJob, times: DeviceTimes) -> Generator[str, None, SearchPlan]:
    """Measure steps of the MasterNet, and say how long all trainings will take.

    Raises ValueError, with the shortest time, where no structure is within the budget.
    """
    budget, master_ms, fastest_ms = job.budget, dict[str, float](), dict[str, float]()
    for variant in job.variants:
        tables = job.tables(times.profile, variant)
        master_ms[variant.name] = float(tables(job.space.start[None])[0])
        fastest_ms[variant.name] = float(tables(fastest(job.space, tables)[None])[0])
    if min(fastest_ms.values()) > budget.ms_per_image:
        raise ValueError(
            f"nothing fits {budget}: the fastest structure takes "
            f"{min(fastest_ms.values()):.4g} ms: give a larger budget, a smaller MasterNet or "
            "--resolutions"
        )
    yield "measuring the training of the MasterNet"
    run = measure_steps(job)
    design = design_of(job)
    tables = job.tables(times.profile, job.home)
    relative = float(tables(design.structures).mean() / master_ms[job.home.name])
    recipe, images = training_recipe(job), len(job.data.train)
    whole_s = seconds_of(job, run, recipe, recipe)
    tuned = tuning_choice(job).changes
    tuning = replace(tuning_recipe(images, recipe), **tuned)
    tune_s = TEACHER * relative * seconds_of(job, run, recipe, tuning)
    further = further_tunings(job, design)
    random = random_structures(job)
    random_s = float(tables(random).sum() / master_ms[job.home.name]) * whole_s
    inside = [each for each in job.variants if fastest_ms[each.name] <= budget.ms_per_image]
    sides = [(each.resolution / job.home.resolution) ** 2 for each in inside]
    winner_s = [job.method.winners * whole_s * side for side in sides]
    rows = [
        PlannedTrainings(stage="master", trainings=1, seconds=whole_s),
        PlannedTrainings(
            stage="design", trainings=len(design.places), seconds=len(design.places) * tune_s
        ),
        PlannedTrainings(stage="sequential", trainings=further, seconds=further * tune_s),
        PlannedTrainings(
            stage="winners",
            trainings=job.method.winners * len(inside),
            seconds=sum(winner_s),
        ),
    ]
    if len(random):
        rows.insert(2, PlannedTrainings(stage="whole", trainings=len(random), seconds=random_s))
    if job.method.final:
        final = final_choice(job, job.home).resolve(case_of(job.data)).recipe
        seconds = seconds_of(job, run, recipe, final)
        rows.append(PlannedTrainings(stage="final", trainings=1, seconds=seconds))
    return SearchPlan(
        structures=float(job.space.size) * len(job.variants),
        master_ms=master_ms,
        fastest_ms=fastest_ms,
        trainings=tuple(rows),
        devices=len(job.devices),
    )


def final_choice(job: SearchJob, variant: Variant) -> RecipeChoice:
    """The recipe of the last training."""
    changes: dict[str, object] = {"resolution": variant.resolution}
    if job.settings.final_epochs is not None:
        changes["epochs"] = job.settings.final_epochs
    return RecipeChoice(job.method.final, changes)


def measure_steps(job: SearchJob) -> RunTimes:
    """The times of the MasterNet's steps, on the first device."""
    with scratch_folder(job.folder / "steps") as scratch:
        model: Path = scratch / "spec.json"
        with atomic_write(model, SPEC_OUTPUT) as temporary:
            temporary.write_text(job.spec(tuple(job.space.start.tolist()), job.home).to_json())
        begin = perf_counter()
        run = prepare(
            scratch / "run",
            str(model),
            job.data,
            master_choice(job).resolve(case_of(job.data)),
            device=job.devices[0],
            workers=job.workers,
        )
        return time_run(run, perf_counter() - begin)


def seconds_of(job: SearchJob, run: RunTimes, measured: Recipe, recipe: Recipe) -> float:
    """Of a training by `recipe`, of a network whose steps by the recipe `measured` are known."""
    per_epoch = len(job.data.train) / measured.batch  # steps of the measured batch
    minival_s = run.image_s * len(job.data.minival)
    scored_s = (minival_s + run.save_s) / run.score_every
    statistics_s = run.image_s * min(len(job.data.train), MAX_IMAGES)
    return (
        run.start_s
        + recipe_in_epochs(job.data, recipe).epochs * (per_epoch * run.step_s + scored_s)
        + statistics_s
        + 2 * minival_s
    )
