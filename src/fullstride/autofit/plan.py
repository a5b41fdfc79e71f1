"""Plans the rungs of successive halving within the user's hours."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fullstride.autofit.budget import CandidateTimes, FitJob, rounded_up
from fullstride.autofit.candidates import Candidate, by_promise, in_turn
from fullstride.autofit.times import anchors, corrected, measured_in_turn, rough_ms
from fullstride.data.dataset import DataSet
from fullstride.data.readers.listing import quote_names
from fullstride.io.console import count_of, verb_of
from fullstride.io.records import Record
from fullstride.measure.budget import UNLIMITED_MS
from fullstride.report.training_progress import duration
from fullstride.study.trials import FAILURES, Work, reason
from fullstride.tasks import find_task
from fullstride.train import run_folder
from fullstride.train.batches import recipe_in_epochs
from fullstride.train.recipes.choice import LENGTHS, NamedRecipe, RecipeChoice, RunOptions, case_of
from fullstride.train.timing import RunTimes, time_training


@dataclass(frozen=True, kw_only=True)
class TrainingTime(RunTimes):
    """The seconds of the parts of a candidate's training on one device."""

    candidate: str  # its name
    epochs: int = 0  # of its whole recipe
    measure_s: float = 0.0  # of this measurement
    failure: str = ""  # why the candidate cannot train, in one line


TRAINING_TIME = Record(TrainingTime, "the time of a training", ("candidate", "step_s"))


def candidate_recipe(
    candidate: Candidate,
    data: DataSet,
    choice: RecipeChoice,
    options: RunOptions,
    epochs: int | None = None,
    folder: Path | None = None,
) -> NamedRecipe:
    """The recipe of a candidate by `choice`, with at most `epochs`.

    A run in `folder` keeps its recipe. A batch takes the fewest passes that fit into memory.
    """
    changes = {"resolution": candidate.resolution, "fit": candidate.fit, "grad_accum_steps": 0}
    changes |= dict(choice.changes)
    if candidate.teacher:
        changes["teacher"] = candidate.teacher
    if candidate.task_options:
        changes["task_options"] = {**changes.get("task_options", {}), **candidate.task_options}
    case = case_of(data, candidate.weights, candidate.width, find_task(options.task))
    whole = RecipeChoice(choice.source, changes)
    named = whole.resolve(case)
    if epochs is not None and epochs < epochs_of(named, data):
        others = {name: value for name, value in changes.items() if name not in LENGTHS}
        whole = RecipeChoice(choice.source, others | {"epochs": epochs})
        named = whole.resolve(case)
    if folder is not None:
        return run_folder.resolve(whole, folder, data, options)
    return named


def epochs_of(named: NamedRecipe, data: DataSet) -> int:
    """Epochs of the recipe on `data`; the last one may be partial."""
    return math.ceil(recipe_in_epochs(data, named.recipe).epochs)


def stored_time(folder: Path, candidate: Candidate) -> TrainingTime | None:
    return TRAINING_TIME.find(_path(folder, candidate))


def measure_training(job: FitJob, candidate: Candidate) -> TrainingTime:
    """Time a few steps of the real recipe on real batches, and some validation images; about 4 s.

    The result is stored in the folder of the fit, unless the candidate cannot train: a `failure` is
    tried again by the next call.
    """
    begin = time.perf_counter()
    path, device = _path(job.folder, candidate), job.devices[0]
    data, options = job.unseen, job.options_of(candidate)
    try:
        named = candidate_recipe(candidate, data, job.recipe, options)
        folder = path.with_name(candidate.name)
        parts = time_training(folder, candidate.model, data, named, options)
        epochs = epochs_of(named, data)
        times = TrainingTime(candidate=candidate.name, epochs=epochs, **vars(parts))
    except FAILURES as error:
        times = TrainingTime(candidate=candidate.name, failure=reason(error, device))
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # the next candidate is another network
    times = replace(times, measure_s=time.perf_counter() - begin)
    if not times.failure:
        TRAINING_TIME.save(path, times)
    return times


def _path(folder: Path, candidate: Candidate) -> Path:
    return folder / "training_times" / f"{candidate.name}.json"


# Budgets of a fit with hours alone.

FRONT_BUDGETS, LEAST_RATIO = 4, 1.5  # most budgets, least ratio of neighbours
FRONT_SHARE = 1 / 4  # most of the hours for the training of the slowest network


def find_front(job: FitJob, candidates: Sequence[Candidate]) -> Work[tuple[float, ...]]:
    """At most four budgets in ms an image, the largest first, in equal ratios over the front.

    They end with the slowest network whose training, for a third of its epochs, takes at most a
    quarter of the hours, by rough times: estimates of the latency model, corrected by measuring a
    few networks of the faster half, untrained and in training.

    Raises ValueError, in one line, if nothing trains, or if not even the fastest network can be
    trained in that time.
    """
    hours = job.settings.limit_hours
    assert hours is not None
    # no candidate is too slow to be timed
    job = replace(job, settings=replace(job.settings, budget_ms=(UNLIMITED_MS,)))
    ms = rough_ms(job, candidates)
    few = anchors(candidates, ms, statistics.median(ms.values())) if ms else ()
    if job.profile is None:
        times = yield from measured_in_turn(few, job, {}, {}, quick=True)
        ms = corrected(ms, {name: rows[0].ms for name, rows in times.items() if rows[0].ms})
    trained, failures = dict[str, TrainingTime](), list[str]()
    for each in few:
        yield f"measuring the training of {each.name}"
        time_of = stored_time(job.folder, each) or measure_training(job, each)
        if time_of.failure:
            failures.append(f"{each.name}: {time_of.failure}")
        else:
            # this stage counts the seconds already, and the plan must not count them again
            path, time_of = _path(job.folder, each), replace(time_of, measure_s=0.0)
            trained[each.name] = TRAINING_TIME.save(path, time_of)
    if not trained:
        raise ValueError(f"no budget can be found by the hours: {(failures or ['no times'])[0]}")
    short = {name: each.seconds(math.ceil(SHORT * each.epochs)) for name, each in trained.items()}
    seconds = corrected(ms, short)
    within = [ms[name] for name in ms if seconds[name] <= FRONT_SHARE * 3600 * hours]
    if not within:
        least = min(seconds.values()) / FRONT_SHARE / 3600
        raise ValueError(
            f"{exact(hours)} is too little for a front of several networks: give about "
            f"--minutes {math.ceil(60 * least)}, or a --budget-ms"
        )
    low, ratio = min(within), max(within) / min(within)
    count = min(FRONT_BUDGETS, 1 + int(math.log(ratio, LEAST_RATIO)))
    shares = [(1 + number) / count for number in range(count)]
    return tuple(sorted({float(rounded_up(low * ratio**share)) for share in shares}, reverse=True))


ETA = 3  # one in ETA candidates survives a rung, and trains for ETA times the epochs
FEW = 3  # most candidates that all train to the end, or all but one after linear probes
MOST_COST = 1 / 3  # of training all candidates to the end
FINALISTS = 3  # most exported networks of a budget, beside a student
FILES = 4  # exported files of a finalist, or fewer by --formats and --precisions
FILE_S = 10.0  # of an export, with its comparison and its measurement
SHORT, SHORTEST = 1 / 3, 1 / 10  # of the epochs, with few hours, see `make_plan`; ours
MEASURING_SHARE, MEASURING_S = 0.1, 20.0  # for timing steps: of the hours, or without a limit
LONG_S = 1800.0  # of a plan without a limit, which is offered one
FEWEST_TRAININGS = 2  # that are timed within hours, with and without initial weights


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A round of halving: all candidates train until `epochs`, and the best `keep` survive."""

    number: int  # from 1
    epochs: int  # since the start of training; 0: a linear probe
    candidates: int
    keep: int  # for each budget

    @property
    def end(self) -> str:
        return f"to epoch {self.epochs}" if self.epochs else "by a linear probe"


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """The trainings of a fit, and their expected seconds here."""

    candidates: tuple[str, ...]  # names in the first rung
    left_out: Mapping[str, str]  # name -> why a candidate within the budget is not trained
    epochs: int  # of the finalists
    rungs: tuple[Rung, ...]
    times: Mapping[str, TrainingTime]  # by name
    train_s: float  # if the slowest candidates survive
    ship_s: float
    all_s: float = 0.0  # of training every candidate to the end, for comparison
    left_s: float | None = None  # of the hours, to train and to ship; None: no limit
    busy: str = ""  # why the times of candidates may be too long, see `why_busy`

    @property
    def total_s(self) -> float:
        return self.train_s + self.ship_s

    def recipe(self, choice: RecipeChoice) -> RecipeChoice:
        """`choice` with a linear probe if the first rung is one."""
        if self.rungs[0].epochs:
            return choice
        return replace(choice, changes={**choice.changes, "linear_probe": True})


def make_plan(job: FitJob, candidate_times: CandidateTimes, spent_s: float = 0.0) -> Work[FitPlan]:
    """Measure how long candidates within the budget train, and plan the rungs.

    Each candidate trains by its whole recipe, one schedule from the first to the last step, in
    rungs that end at about 1/9, 1/3 and all of the epochs; about a third survives each rung, and
    two families reach the last rung. Rungs are left out if they would cost more than a third of
    training all to the end. Up to three candidates all train to the end, or all but the last after
    linear probes.

    If all candidates have released weights, the first rung is a linear probe in place of a ninth of
    the epochs, unless the user's recipe has none: it takes the time of a third of an epoch, and on
    photographs it ranked networks as whole trainings did, unlike one epoch (docs/log.md).

    With hours, less the `spent_s` of earlier stages, the plan has fewer epochs, down to a third,
    then fewer candidates, and again fewer epochs for the last candidate: down to a tenth, or to one
    after a linear probe, which is a network already. The most promising candidates stay: by
    published top-1, else the slowest within the budget, with two families if possible. Where none
    has time for a third of its epochs, the last candidate is whichever trains the longest, and
    after linear probes the most promising candidate. The fastest candidates, with and without
    initial weights, are measured first: if there is no time for either of them alone, nothing else
    is measured.

    Measurements are stored in the folder of the fit, and not made again. Yields lines for people.
    Raises ValueError, in one line, if nothing can train, or if the time is too short for even one
    candidate.
    """
    hours = job.settings.limit_hours
    left_s = math.inf if hours is None else 3600 * hours - spent_s
    order = in_turn(
        by_promise(each.affordable, each.ms) for each in map(candidate_times.of, job.budgets)
    )

    def planned(times: Mapping[str, TrainingTime], measured_s: float) -> FitPlan:
        costs = costs_of(
            job, [each for each in order if each.name in times], times, candidate_times
        )
        can_probe = all(each.candidate.weights for each in costs) and asks_for_probes(job)
        how = Means(devices=len(job.devices), can_probe=can_probe, budgets=len(job.budgets))
        return plan_within(costs, left_s - measured_s, hours, how)

    failed, rest = dict[str, str](), order
    if hours is not None:
        slowest_first = sorted(order, key=lambda each: -candidate_times.ms[each.name])
        fastest = [*{bool(each.weights): each for each in slowest_first}.values()]
        first_times, failed, spent_s = yield from measure_all(job, fastest, candidate_times, left_s)
        if first_times:
            planned(first_times, spent_s)
        rest = [*fastest, *(each for each in order if each not in fastest)]
        rest = [each for each in rest if each.name not in failed]
    times, left_out, measured_s = yield from measure_all(job, rest, candidate_times, left_s)
    left_out = failed | left_out
    if not times:
        name, why = next(iter(left_out.items()))
        raise ValueError(f"no candidate can be trained; {name}: {why}")
    plan = planned(times, measured_s)
    limit_s = None if hours is None else left_s - measured_s
    left_out |= plan.left_out
    return replace(plan, left_out=left_out, left_s=limit_s, busy=candidate_times.busy)


def asks_for_probes(job: FitJob) -> bool:
    """Whether the recipe begins with a linear probe, by default as `finetune` does."""
    choice = replace(job.recipe, source=job.recipe.source or "finetune")
    return choice.resolve(case_of(job.data, "released", task=job.task)).recipe.linear_probe


def costs_of(
    job: FitJob,
    candidates: Sequence[Candidate],
    times: Mapping[str, TrainingTime],
    candidate_times: CandidateTimes,
) -> list["TrialCost"]:
    """The seconds that each candidate would take to train and to ship."""
    files = min(FILES, len(job.labels)) if job.profile is None else FILES
    return [
        TrialCost(
            candidate=each,
            time=times[each.name],
            is_float=each.name in candidate_times.in_float,
            ship_s=files * (FILE_S + len(job.data.val) * candidate_times.ms[each.name] / 1e3),
        )
        for each in candidates
    ]


def measure_all(
    job: FitJob, order: Sequence[Candidate], candidate_times: CandidateTimes, left_s: float
) -> Work[tuple[dict[str, TrainingTime], dict[str, str], float]]:
    """The times of trainings by candidate, name -> reason of failures, and the seconds spent.

    Candidates are measured in `order` within the time for measuring, but at least one with and one
    without initial weights, or `FEWEST_TRAININGS` if hours are to be kept. The rest are estimated.
    """
    measured, left_out = dict[str, TrainingTime](), dict[str, str]()
    allowed_s, fewest = MEASURING_SHARE * left_s, FEWEST_TRAININGS
    if math.isinf(left_s):
        allowed_s, fewest = MEASURING_S, 1
    spent_s, similar, rest = 0.0, Counter[bool](), list[Candidate]()
    for number, candidate in enumerate(order, 1):
        each = stored_time(job.folder, candidate)
        if each is None:
            if spent_s > allowed_s and similar[bool(candidate.weights)] >= fewest:
                rest.append(candidate)
                continue
            yield f"measuring the training of {candidate.name} ({number} of {len(order)})"
            each = measure_training(job, candidate)
        spent_s += each.measure_s
        if each.failure:
            yield f"{candidate.name} cannot be trained: {each.failure}"
            left_out[candidate.name] = each.failure
        else:
            measured[candidate.name] = each
            similar[bool(candidate.weights)] += 1
    if rest:
        others = count_of(len(rest), "other")
        yield f"the training of {others} is estimated by times of files"
    times = measured | {each.name: estimated(each, measured, candidate_times) for each in rest}
    return {each.name: times[each.name] for each in order if each.name in times}, left_out, spent_s


def estimated(
    candidate: Candidate, measured: Mapping[str, TrainingTime], candidate_times: CandidateTimes
) -> TrainingTime:
    """The training time of the network with the most similar inference time, times their ratio.

    That network has initial weights if and only if `candidate` has.
    """
    ms, by_name = candidate_times.first_ms, candidate_times.by_name

    def ratio(name: str) -> float:
        return ms[candidate.name] / ms[name]

    alike = [name for name in measured if bool(by_name[name].weights) is bool(candidate.weights)]
    name = min(alike, key=lambda name: abs(math.log(ratio(name))))
    nearest, share = measured[name], ratio(name)
    computed = ("step_s", "image_s", "val_s", "precise_s")
    parts = {part: share * getattr(nearest, part) for part in computed}
    return replace(nearest, candidate=candidate.name, measure_s=0.0, **parts)


@dataclass(frozen=True, kw_only=True)
class TrialCost:
    """The seconds that a candidate would take."""

    candidate: Candidate
    time: TrainingTime
    is_float: bool  # whether it is within the budget in a float precision
    ship_s: float


@dataclass(frozen=True, kw_only=True)
class Means:
    """The conditions of a plan, beside the costs."""

    devices: int = 1
    can_probe: bool = False  # whether the first rung may be a linear probe
    budgets: int = 1


ALONE = Means()


def exact(hours: float) -> str:
    """A time as it was given, not rounded: 0.025 -> 1.5 min, 2.5 -> 2.5 h."""
    return f"{hours:g} h" if hours >= 2 else f"{60 * hours:.4g} min"


def plan_within(
    costs: Sequence[TrialCost], left_s: float, hours: float | None = None, how: Means = ALONE
) -> FitPlan:
    """The plan of the first, most promising, candidates of `costs` within `left_s` seconds."""
    whole = max(each.time.epochs for each in costs)
    limit = exact(hours or 0)
    fewest = 1 if how.can_probe else math.ceil(SHORTEST * whole)
    reason = f"there is no time for it within {limit}"

    def within(chosen: Sequence[TrialCost], epochs: int) -> FitPlan:
        plan = plan_of(chosen, epochs, how)
        others = (each.candidate.name for each in costs if each not in chosen)
        return replace(plan, left_out=dict.fromkeys(others, reason))

    short = math.ceil(SHORT * whole)
    for count in range(len(costs), 1, -1):
        for epochs in range(whole, short - 1, -1):
            plan = within(costs[:count], epochs)
            if plan.total_s <= left_s:
                return plan
    longest = list[FitPlan]()
    for each in costs:
        plans = (within([each], epochs) for epochs in range(whole, fewest - 1, -1))
        longest += [plan for plan in plans if plan.total_s <= left_s][:1]
    if longest:
        return max(longest, key=lambda plan: min(plan.epochs, fewest if how.can_probe else short))
    least = min((within([each], fewest) for each in costs), key=lambda plan: plan.total_s)
    enough_s = 3600 * (hours or 0) + least.total_s - left_s
    raise ValueError(
        f"{limit} is too little: {least.candidates[0]} alone, trained for {fewest} of {whole} "
        f"epochs, needs --minutes {math.ceil(enough_s / 60)}"
    )


def plan_of(costs: Sequence[TrialCost], epochs: int, how: Means = ALONE) -> FitPlan:
    """The plan that begins with all of `costs`, and trains finalists for `epochs`."""
    times = {each.candidate.name: each.time for each in costs}
    rungs = choose_rungs(costs, epochs, how)
    finalists = min(how.budgets * rungs[-1].keep, rungs[-1].candidates)
    return FitPlan(
        candidates=tuple(times),
        left_out={},
        epochs=epochs,
        rungs=rungs,
        times=times,
        train_s=training_seconds(rungs, [*times.values()], how.devices),
        ship_s=sum(sorted((each.ship_s for each in costs), reverse=True)[:finalists]),
        all_s=sum(each.seconds(epochs) for each in times.values()) / how.devices,
    )


def choose_rungs(costs: Sequence[TrialCost], epochs: int, how: Means = ALONE) -> tuple[Rung, ...]:
    """The rungs for candidates, with `epochs` at the end of the last rung.

    The first form that costs at most a third of training all to the end, whichever candidates
    survive; else the cheapest form. At least two candidates reach the last rung if there are two
    families, or if some candidates are within the budget in int8 only. For several budgets, see
    `for_budgets`.
    """
    families = {each.candidate.family for each in costs}
    is_mixed = len({each.is_float for each in costs}) > 1
    last = 1 + (len(families) > 1 or is_mixed)
    times = [each.time for each in costs]
    count = len(costs)
    all_s = training_seconds(rungs_of((epochs,), (count,)), times, how.devices)
    forms = [*forms_of_halving(count, epochs, min(last, count), can_probe=how.can_probe)]
    seconds = [training_seconds(form, times, how.devices) for form in forms]
    within = (form for form, each in zip(forms, seconds, strict=True) if each <= MOST_COST * all_s)
    return for_budgets(next(within, forms[seconds.index(min(seconds))]), how.budgets)


def for_budgets(rungs: tuple[Rung, ...], budgets: int) -> tuple[Rung, ...]:
    """Rungs with fewer survivors for each of several budgets, and more survivors in all.

    Each budget keeps 1 / `budgets` of the survivors, rounded up, and one more, as budgets share
    candidates.
    """
    result, count = [], rungs[0].candidates
    for rung in rungs:
        keep = min(rung.keep, math.ceil(rung.keep / budgets) + 1)
        result.append(replace(rung, candidates=count, keep=keep))
        count = min(count, budgets * keep)
    return tuple(result)


def forms_of_halving(
    count: int, epochs: int, last: int, *, can_probe: bool
) -> Iterator[tuple[Rung, ...]]:
    """Forms of successive halving of `count` candidates, at least `last` of them to the end.

    Forms with three rungs come first, then two rungs with fewer and fewer survivors. If
    `can_probe`, the first rung is a linear probe, and the second of three trains half of the
    candidates and then fewer and fewer.
    """
    if count <= FEW and can_probe:
        yield rungs_of((0, epochs), (count, max(last, count - 1)))
        return
    if count <= FEW or (epochs == 1 and not can_probe):
        yield rungs_of((epochs,), (count,))
        return
    first, second = (max(1, round(epochs * share)) for share in (1 / ETA**2, 1 / ETA))
    if can_probe:
        first = 0
        middles = [(middle, math.ceil) for middle in range(math.ceil(count / 2), last, -1)]
    else:
        middles = [(max(last, part(count / ETA)), part) for part in (math.ceil, math.floor)]
    for middle, part in middles if first < second < epochs else ():
        counts = (count, middle, max(last, part(middle / ETA)))
        yield rungs_of((first, second, epochs), counts)
    for finalists in range(max(last, math.ceil(count / ETA)), last - 1, -1):
        yield rungs_of((first, epochs), (count, finalists))


def rungs_of(ends: Sequence[int], counts: Sequence[int]) -> tuple[Rung, ...]:
    """Rungs that end at the epochs `ends`, with `counts` candidates."""
    keeps = [*counts[1:], min(counts[-1], FINALISTS)]
    return tuple(
        Rung(number=number, epochs=end, candidates=count, keep=keep)
        for number, (end, count, keep) in enumerate(zip(ends, counts, keeps, strict=True), 1)
    )


def training_seconds(
    rungs: Sequence[Rung], times: Sequence[TrainingTime], devices: int = 1, before: int = 0
) -> float:
    """Seconds of all rungs on `devices` devices, if the slowest candidates survive.

    The candidates are trained for the epochs `before` already.
    """
    total = 0.0
    slowest = sorted(times, key=lambda each: each.epoch_s, reverse=True)
    for rung in rungs:
        parts = [each.seconds(rung.epochs - before) for each in slowest[: rung.candidates]]
        total += max(max(parts), sum(parts) / devices)
        before = rung.epochs
    return total


def plan_lines(plan: FitPlan) -> Iterator[str]:
    """The plan for people, with the total time."""
    count = len(plan.candidates)
    if len(plan.rungs) == 1:
        why = "halving saves nothing with so few" if count <= FEW else "an epoch is the least"
        note = f" each: {why}" if count > 1 else ""
        yield f"plan     {count} trained for {count_of(plan.epochs, 'epoch')}{note}"
    for rung in plan.rungs if len(plan.rungs) > 1 else ():
        finalists = "finalist" if rung.candidates == 1 else "finalists"
        go_on = f"{rung.keep} {verb_of(rung.keep, 'go')} on"
        goes = go_on if rung.epochs < plan.epochs else finalists
        yield f"rung {rung.number}   {rung.candidates} {rung.end}, {goes}"
    if plan.left_out:
        yield f"left out {len(plan.left_out)}: {quote_names([*plan.left_out])}"
    share = f"; all {count} to the end would be {duration(plan.all_s)}" if count > FEW else ""
    yield (
        f"time     at most about {duration(plan.total_s)}: {duration(plan.train_s)} of training "
        f"and {duration(plan.ship_s)} to ship{share}"
    )
    if plan.left_s is None and plan.total_s > LONG_S:
        yield "limit    none: --minutes 30, or --hours 2, plans fewer epochs and candidates"
