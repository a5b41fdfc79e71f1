"""Measures or estimates the time of each candidate as the file that would ship."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch

from fullstride.autofit.budget import (
    BUSY_FACTOR,
    COMPARED,
    INPUT,
    CandidateTime,
    FitJob,
    Rows,
    form,
    is_worth_timing,
    limit_ms,
    within_budget,
)
from fullstride.autofit.candidates import MOST_TRIED, Candidate, in_order, shortlists
from fullstride.deploy import choose_form
from fullstride.deploy.choose_form import Label, UntrainedFiles
from fullstride.deploy.exported import ExportedModel, Precision
from fullstride.deploy.formats.base import last_line
from fullstride.io.console import count_of, verb_of
from fullstride.io.records import Record
from fullstride.io.writing import remove, scratch_folder
from fullstride.latency.devices import find_operators, profile_here
from fullstride.latency.estimator import operators_with_names
from fullstride.latency.network_times import Estimate, estimates
from fullstride.latency.profiles import Profile
from fullstride.measure.budget import Budget
from fullstride.measure.operators import Operators
from fullstride.measure.protocols import BUSY, MEDIANS, ONLINE, Protocol, quiet_times
from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.spec import NetSpec
from fullstride.report.console_tables import three_digits
from fullstride.study.trials import Work
from fullstride.targets.target import save_machine
from fullstride.tasks.task import Task
from fullstride.train.compute import keep_freed_memory

# The files of a candidate are written untrained, timed, and removed.

# The largest ratio of the first form's time to the budget at which other forms are tried: int8 is
# up to 3.4 times as fast as fp32 on a processor with the instructions for it.
QUICK_RATIO = 4.0
QUICK = replace(ONLINE, rounds=3, warmup_s=0.1, round_s=0.05)

REPORTED = 2.0  # times the budget: candidates up to here are reported, for a larger budget


def has_all(job: FitJob, rows: Rows, model: str, by_model: Mapping[str, Sequence[Rows]]) -> bool:
    """Whether the stored times of a candidate, maybe for another budget, are enough for this."""
    quick = choose_form.probe_label(job.labels)
    ms = next((row.ms for row in rows if form(row) == quick), None)
    budget_ms = job.budget.ms_per_image
    if ms is None or ms > QUICK_RATIO * budget_ms or budget_ms <= rows[0].budget_ms:
        return True
    missing = {*job.labels} - {form(row) for row in rows}
    longest_ms = REPORTED * budget_ms
    return not any(is_worth_timing(each, rows, model, by_model, longest_ms) for each in missing)


def time_one(
    candidate: Candidate,
    job: FitJob,
    scratch: Path,
    earlier: UntrainedFiles | None,
    labels: Sequence[Label],
    by_model: Mapping[str, Sequence[Rows]],
) -> tuple[Rows, UntrainedFiles | None]:
    """Times per form, the probe form first, and the files; None if the network cannot be built.

    The probe form of `labels` is timed alone, twice if noise may have slowed it, and no other form
    if it takes more than `QUICK_RATIO` times the budget. The other precisions of the format follow,
    which share the graph, and then other formats, if they `may_win` by the times of the same model
    in `by_model`, and are not `is_slow` by all of its times. All files are timed in turn at the
    end.
    """
    quick, batch = choose_form.probe_label(labels), job.budget.batch
    has_similar = len(by_model.get(candidate.model, ())) >= COMPARED
    # percentiles other than the median need about a hundred calls
    protocol = MEDIANS if job.settings.percentile == 50 else ONLINE
    models, failures = dict[Label, ExportedModel](), dict[Label, str]()
    rows = dict[Label, CandidateTime]()

    def write(files: UntrainedFiles, chosen: Sequence[Label]) -> None:
        for label in chosen:
            try:
                models[label] = files.open(*label, scratch, batch=batch)
                if job.target is not None:
                    choose_form.run_there(job.target, models[label], batch)
            except (ValueError, MemoryError) as error:
                models.pop(label, None)
                failures[label] = last_line(error).replace(f"{scratch}/", "")

    def promising(same_format: bool) -> list[Label]:
        longest_ms, own = REPORTED * job.budget.ms_per_image, tuple(rows.values())
        model, others = candidate.model, (label for label in labels if label != quick)
        wanted = (label for label in others if (label[0] == quick[0]) is same_format)
        return [each for each in wanted if is_worth_timing(each, own, model, by_model, longest_ms)]

    try:
        files = files_of(candidate, job, earlier)
        write(files, [quick])
        rows = timed(candidate, models, job, QUICK)
        quick_ms = QUICK_RATIO * job.budget.ms_per_image
        if quick in rows and quick_ms < cast(float, rows[quick].ms) <= BUSY_FACTOR * quick_ms:
            rows = timed(candidate, models, job, protocol)  # as noise may have slowed it
        if quick in failures or cast(float, rows[quick].ms) <= quick_ms:
            write(files, promising(True))
            if has_similar:  # these times decide on other formats
                rows = timed(candidate, models, job, protocol)
            before = len(models)
            write(files, promising(False))
            if len(models) > before or not has_similar:
                rows = timed(candidate, models, job, protocol)
    except OSError:  # such as a full disk, which is not the candidate's fault
        raise
    except Exception as error:  # a third party's network may raise anything
        files, failures = None, {**failures, quick: last_line(error)}
    finally:
        models.clear()
        for path in scratch.iterdir():
            remove(path)
        if job.target is not None:
            job.target.clear()
    for (format, precision), reason in failures.items():
        rows[format, precision] = CandidateTime(
            candidate=candidate.name, format=format, precision=precision, failure=reason
        )
    order = (quick, *(label for label in labels if label != quick))
    return tuple(rows[label] for label in order if label in rows), files


def files_of(candidate: Candidate, job: FitJob, earlier: UntrainedFiles | None) -> UntrainedFiles:
    """The candidate's files, by `earlier` files of the same network if possible.

    Raises whatever the network raises.
    """
    task = replace(job.task, **candidate.task_options)
    has_head = type(task).head is not Task.head  # its graph has the sizes of maps as constants
    if earlier is not None and not has_head:
        pre = earlier.job.metadata.preprocessing
        return earlier.at(candidate.name, at_candidate(pre, candidate))
    net = zoo.create(
        candidate.model,
        classes=len(job.data.classes),
        in_channels=candidate.channels or job.data.channels,
        width=candidate.width,
        depth=candidate.depth,
        resolution=candidate.resolution,
        frames=task.clip[0] or None,
    )
    net.task_head = task.head(net)
    pre = replace(zoo.family_preprocessing(net.spec), frames=net.spec.frames)
    pre = at_candidate(pre, candidate)
    return choose_form.untrained_files(net, candidate.name, pre, len(job.data.classes), INPUT, task)


def at_candidate(pre: Preprocessing, candidate: Candidate) -> Preprocessing:
    return replace(pre, resolution=candidate.resolution, fit=candidate.fit)


def timed(
    candidate: Candidate, models: Mapping[Label, ExportedModel], job: FitJob, protocol: Protocol
) -> dict[Label, CandidateTime]:
    """The times of opened files, measured in turn inside every round; {} without files."""
    if not models:
        return {}
    side, batch = candidate.resolution, job.budget.batch
    protocol = replace(protocol, resolution=side, batch=batch)
    by_name = {" ".join(label): model for label, model in models.items()}
    measure = partial(choose_form.measure_files, by_name, protocol, target=job.target)
    times = quiet_times(measure, job.settings.percentile)
    return {
        (format, precision): CandidateTime(
            candidate=candidate.name,
            format=format,
            precision=precision,
            **asdict(times[f"{format} {precision}"]),
        )
        for format, precision in models
    }


# Rough times by the latency model, corrected by a few measured times.


def operators_of_candidate(candidate: Candidate, job: FitJob) -> Operators:
    """The operators for one image. Raises ValueError, in one line, if it cannot be built."""
    side, channels = candidate.resolution, candidate.channels or job.data.channels
    task = replace(job.task, **candidate.task_options)
    head = None if type(task).head is Task.head else task.head
    # with ImageNet's classes, as the classifier takes little time
    if candidate.model.startswith("timm/") and head is None and channels == 3:
        operators = find_operators(candidate.model, side)
        if operators is not None:
            return operators
    spec = zoo.spec(candidate.model)
    if isinstance(spec, NetSpec):
        spec = spec.scaled(width=candidate.width, depth=candidate.depth)
        spec = replace(spec, frames=task.clip[0] or spec.frames)
    spec = replace(spec, classes=max(1, len(job.data.classes)), in_channels=channels)
    return operators_with_names(zoo.NamedNetwork(candidate.name, spec, head), side)[0]


def estimate_candidates(
    candidates: Sequence[Candidate], profile: Profile, job: FitJob
) -> dict[str, Estimate | str]:
    """Name -> estimate, or the reason why there is none."""
    networks: dict[str, Operators] = {}
    results: dict[str, Estimate | str] = {}
    for each in candidates:
        try:
            networks[each.name] = operators_of_candidate(each, job)
        except (ValueError, RuntimeError) as error:  # such as layers that do not fit the image
            results[each.name] = str(error).strip().split("\n")[0]
    if networks:
        batches = [job.budget.batch] * len(networks)
        rows = estimates([*networks.values()], profile, batches)
        results |= dict(zip(networks, rows, strict=True))
    return results


def rough_ms(job: FitJob, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Name -> estimated time, if any, on the device of the fit or on a device like this one."""
    results = estimate_candidates(candidates, job.profile or profile_here(), job)
    return {name: each.ms_per_image for name, each in results.items() if isinstance(each, Estimate)}


def anchors(
    candidates: Sequence[Candidate], ms: Mapping[str, float], longest_ms: float
) -> tuple[Candidate, ...]:
    """Three candidates whose measured times will correct all other times.

    They are evenly spaced in the candidates with a time, up to `longest_ms` if there are enough.
    """
    by_time = sorted(
        (each for each in candidates if each.name in ms), key=lambda each: ms[each.name]
    )
    near = [each for each in by_time if ms[each.name] <= longest_ms]
    by_time = near if len(near) >= 3 else by_time
    count = min(3, len(by_time))
    places = [(2 * number + 1) * len(by_time) // (2 * count) for number in range(count)]
    return tuple(by_time[place] for place in places)


def least_share(rows: Rows) -> float:
    """The time in the fastest form / the time in the first form."""
    times = [row.ms for row in rows if row.ms]
    return min(times) / times[0] if rows[0].ms else 1.0


def corrected(ms: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """All times `ms`, corrected by the interpolated ratio of measured to estimated times.

    The ratio is larger for small networks, as each call has some overhead.
    """
    pairs = sorted((ms[name], measured[name]) for name in measured if name in ms)
    if not pairs:
        return dict(ms)
    times, goals = np.log(np.array(pairs)).T
    ratios = np.exp(np.interp(np.log([*ms.values()]), times, goals - times))
    return {
        name: value * ratio
        for (name, value), ratio in zip(ms.items(), ratios.tolist(), strict=True)
    }


# The time for measuring candidates: a share of the hours, or without a limit these seconds, so
# that a plan takes about two minutes.
SHARE_OF_LIMIT, MEASURING_S = 0.2, 80.0
FEWEST_TRIED, FEWEST_TIMED = 6, 3  # on the shortlist, and of it where measuring takes long
ALL_FORMS = 5.0  # times the seconds of the first form: 23 and 4 for networks of timm on two cores


def measuring_s(limit_hours: float | None) -> float:
    return MEASURING_S if limit_hours is None else SHARE_OF_LIMIT * 3600 * limit_hours


def most_tried(limit_hours: float | None, first_form_s: float) -> int:
    """How many candidates are tried, if one takes `first_form_s` in its first form."""
    most = measuring_s(limit_hours) / max(ALL_FORMS * first_form_s, 1e-9)
    return round(min(max(most, FEWEST_TRIED), MOST_TRIED))


PROMISING = "the highest published top-1 or the nearest to the budget, from several families"
CANDIDATE_TIMES = Record(
    Rows, "the times of a candidate", ("candidate", "format", "precision", "measured")
)


def time_candidates(job: FitJob, candidates: Sequence[Candidate]) -> Work[Rows]:
    """The times of candidates at the batch size of the budget; yields lines about the progress.

    Without a profile, times are measured: each candidate is exported untrained, its files are timed
    in turn by the online protocol, and removed. Forms that cannot win are neither written nor
    timed, see `may_win`. Times are stored in the folder `times` at once, and read by a later call.
    With a profile of a device that is not here, times are estimates.

    If there are more than `MOST_TRIED` candidates, a `shortlist` is tried: `most_tried` candidates
    by rough estimates, or with a profile the most promising ones that fit. Other candidates have a
    `left_out`.

    Raises ValueError, in one line, for formats and precisions that do not run here, and if no
    candidate has a time.
    """
    if job.profile is None:
        if job.target is not None:
            save_machine(job.target, job.folder)
        times = yield from measured(job, candidates)
    else:
        times = estimated(candidates, job.profile, job)
        if failures := sum(each.ms is None for each in times):
            name = job.profile.name
            yield f"without a time for {name}: {failures} of {count_of(len(times), 'candidate')}"
        times = yield from most_promising(candidates, times, job)
    if all(each.ms is None for each in times):
        reason = next((f": {each.failure}" for each in times if each.failure), "")
        raise ValueError(f"none of {count_of(len(candidates), 'candidate')} has a time{reason}")
    return times


def estimated(candidates: Sequence[Candidate], profile: Profile, job: FitJob) -> Rows:
    """Times on the device of `profile`, in its precision."""
    precision, wanted = cast(Precision, profile.precision.split()[0]), job.settings.precisions
    if precision not in get_args(Precision) or (wanted and precision not in wanted):
        raise ValueError(
            f"{profile.name} has times in {profile.precision}: leave the precisions out, or choose "
            "another profile"
        )

    def row(name: str, result: Estimate | str) -> CandidateTime:
        time = CandidateTime(candidate=name, format="", precision=precision, measured=False)
        if isinstance(result, str):
            return replace(time, failure=result)
        return replace(time, ms=result.ms_per_image, low=result.low, high=result.high)

    rows = estimate_candidates(candidates, profile, job)
    return tuple(row(each.name, rows[each.name]) for each in candidates)


def most_promising(
    candidates: Sequence[Candidate], times: Sequence[CandidateTime], job: FitJob
) -> Work[Rows]:
    """The estimates; candidates that fit but are not on the shortlist have a `left_out`."""
    budget, maybe = job.budget, job.settings.maybe
    ms = {
        each.candidate: cast(float, limit_ms(each, maybe=maybe))
        for each in within_budget(times, budget, maybe=maybe)
    }
    inside = [each for each in candidates if each.name in ms]
    names = {each.name for each in shortlists(inside, ms, job.budgets)}
    if len(names) < len(inside):
        yield (
            f"{len(names)} of the {len(inside)} candidates that fit {verb_of(len(names), 'are')} "
            f"tried: {PROMISING}"
        )
    reason = f"within the budget, but {count_of(len(names), 'other', 'are')} more promising"
    return tuple(
        replace(each, left_out=reason) if each.candidate in ms.keys() - names else each
        for each in times
    )


Graphs = dict[tuple[Any, ...], UntrainedFiles]  # by `network`; the files hold the weights


def measured(job: FitJob, candidates: Sequence[Candidate]) -> Work[Rows]:
    """Measure all candidates, or if there are many a shortlist by estimated times.

    With little time the fastest on it, which decides whether anything fits, has one time if it
    fits by it: in the first form.
    """
    begin, until = time.perf_counter(), math.inf
    times, by_model, graphs = dict[str, Rows](), dict[str, list[Rows]](), Graphs()
    chosen, in_time = candidates, dict[str, Rows]()
    if len(candidates) > MOST_TRIED:
        ms = rough_ms(job, candidates)
        few = anchors(candidates, ms, QUICK_RATIO * job.budget.ms_per_image)
        middle = few[len(few) // 2 :][:1]
        times |= yield from measured_in_turn(middle, job, by_model, {})
        others = [each for each in few if each not in middle]
        times |= yield from measured_in_turn(others, job, {}, {}, quick=True)
        quick = {name: rows[0].ms for name, rows in times.items() if rows[0].ms is not None}
        share = min((least_share(rows) for rows in times.values()), default=1.0)
        ms = {name: share * value for name, value in corrected(ms, quick).items()}
        seconds = [times[each.name][0].first_s for each in others]
        most = most_tried(job.settings.limit_hours, statistics.median(seconds or [0.0]))
        chosen = in_order(shortlists(candidates, ms, job.budgets, most), ms, job.budgets)
        until = begin + measuring_s(job.settings.limit_hours)
        reason = f"by estimates {count_of(len(chosen), 'other', 'are')} more promising"
        more = "" if most == MOST_TRIED else "; more --minutes try more"
        are_tried = f"{verb_of(len(chosen), 'are')} tried: {PROMISING}{more}"
        yield f"{len(chosen)} of {len(candidates)} candidates {are_tried}"
        for each in candidates:
            rows = times.get(each.name) or (unmeasured(each, job),)
            times[each.name] = tuple(replace(row, left_out=reason) for row in rows)
        if most < MOST_TRIED:
            first = yield from measured_in_turn(chosen[:1], job, {}, {}, quick=True)
            least_ms = min(each.ms_per_image for each in job.budgets)
            in_time = {
                name: rows for name, rows in first.items() if (rows[0].ms or math.inf) <= least_ms
            }
    others = [each for each in chosen if each.name not in in_time]
    fewest = FEWEST_TIMED - len(in_time)
    in_time |= yield from measured_in_turn(
        others, job, by_model, graphs, until=until, fewest=fewest
    )
    times |= in_time
    if left := [each for each in chosen if each.name not in in_time]:
        yield f"{len(left)} of them not tried: the time for measuring is over"
        for each in left:
            times[each.name] = (replace(unmeasured(each, job), left_out="no time to measure it"),)
    near = [each for each in chosen if is_near(in_time.get(each.name, ()), job.budgets)]
    if near:
        them = "it" if len(near) == 1 else "them"
        again = f"{verb_of(len(near), 'are')} measured again, as noise may have slowed {them}"
        yield f"{len(near)} near the budget {again}"
        times |= yield from measured_in_turn(near, job, {}, graphs, again=True)
    return tuple(row for each in candidates for row in times.get(each.name, ()))


def is_near(rows: Rows, budgets: Sequence[Budget]) -> bool:
    """Whether a candidate is beyond any of the budgets by no more than `BUSY_FACTOR`."""
    least_ms = min((row.ms for row in rows if row.ms), default=math.inf)
    return any(each.ms_per_image < least_ms <= BUSY_FACTOR * each.ms_per_image for each in budgets)


def unmeasured(candidate: Candidate, job: FitJob) -> CandidateTime:
    """The row of a candidate without a time."""
    format, precision = choose_form.probe_label(job.labels)
    return CandidateTime(
        candidate=candidate.name, format=format, precision=precision, measured=False
    )


def measured_in_turn(
    candidates: Sequence[Candidate],
    job: FitJob,
    by_model: dict[str, list[Rows]],
    graphs: Graphs,
    *,
    quick: bool = False,
    again: bool = False,
    until: float = math.inf,
    fewest: int = FEWEST_TIMED,
) -> Work[dict[str, Rows]]:
    """Name -> times, stored or measured, until the time `until` of `time.perf_counter`.

    At least `fewest` are measured, in the order of `candidates`, and others if they would end in
    time, where each takes the seconds of the one before. Candidates of the same network at other
    resolutions follow each other, to share a graph.
    The times of `candidates` are added to `by_model`, the times of each model, and files near the
    budget to `graphs`. If `quick`, only the first form is timed. If `again`, forms that noise may
    have put beyond the budget are measured again, and each keeps its shortest time.
    """
    folder, times = job.folder / "times", dict[str, Rows]()
    same: dict[tuple, Rows] = {}  # by network and input size
    earlier: tuple[tuple, UntrainedFiles | None] = ((), None)
    places = {network(each): -number for number, each in enumerate(reversed(candidates))}
    order = sorted(candidates, key=lambda each: (places[network(each)], each.resolution))
    seconds = 0.0  # of the last measurement
    with scratch_folder(folder / "files") as scratch:  # also removes a killed process's files
        for number, candidate in enumerate(order, start=1):
            if len(times) >= fewest and time.perf_counter() + seconds > until:
                break
            place = *network(candidate), candidate.resolution
            path, title = folder / f"{candidate.name}.json", f"{number} of {len(order)}"
            stored = CANDIDATE_TIMES.find(path) or ()
            same_model, labels = by_model.setdefault(candidate.model, []), job.labels
            due = again and stored and stored[0].measurements < 2
            if stored and not due and (quick or has_all(job, stored, candidate.model, by_model)):
                times[candidate.name] = same[place] = stored
                same_model.append(stored)
                yield f"{candidate.name}: {title}, as measured before"
                continue
            start = time.perf_counter()
            if earlier[0] != network(candidate):
                earlier = network(candidate), graphs.get(network(candidate))
            if place in same:  # with another resize policy
                rows = tuple(replace(row, candidate=candidate.name) for row in same[place])
            else:
                if again:
                    most_ms = BUSY_FACTOR * job.budget.ms_per_image
                    labels = [form(row) for row in stored if row.ms and row.ms <= most_ms]
                labels = [choose_form.probe_label(labels)] if quick else labels
                others = {} if again else by_model
                with keep_freed_memory(torch.device("cpu")):  # of copies of the weights
                    rows, files = time_one(candidate, job, scratch, earlier[1], labels, others)
                earlier = earlier[0], files or earlier[1]
                if files and not quick and is_near(rows, job.budgets):
                    graphs[earlier[0]] = files
            if again:
                rows = shorter(rows, stored)
            seconds = time.perf_counter() - start
            budget_ms = 0.0 if quick else job.budget.ms_per_image
            first_s = stored[0].first_s if stored else seconds
            rows = tuple(replace(row, budget_ms=budget_ms, first_s=first_s) for row in rows)
            times[candidate.name] = same[place] = CANDIDATE_TIMES.save(path, rows)
            same_model.append(rows)
            yield f"{candidate.name}: {title}, {summary(rows)}, after {seconds:.1f} s"
    return times


def shorter(rows: Rows, earlier: Rows) -> Rows:
    """The shortest time of each form."""
    best: dict[Label, CandidateTime] = {}
    for row in (*earlier, *rows):
        shortest = best.get(form(row), row)
        best[form(row)] = min(shortest, row, key=lambda each: each.ms or math.inf)
    return tuple(replace(row, measurements=2) for row in best.values())


def network(candidate: Candidate) -> tuple[str, float, float, int, tuple[tuple[str, Any], ...]]:
    options = tuple(candidate.task_options.items())
    return candidate.model, candidate.width, candidate.depth, candidate.channels or 0, options


def summary(rows: Rows) -> str:
    """The times, the fastest first, the first failure, and whether the machine was busy."""
    by_time = sorted((row for row in rows if row.ms), key=lambda row: row.ms or 0.0)
    parts = [f"{row.format} {row.precision} {three_digits(row.ms or 0.0)} ms" for row in by_time]
    parts += [row.failure for row in rows if row.failure][:1]
    for row in by_time[:1]:
        if row.low and row.high and row.high > (1 + BUSY) * row.low:
            rounds = f"{three_digits(row.low)} to {three_digits(row.high)} ms"
            parts.append(f"rounds of the first from {rounds}, the machine is busy")
    return ", ".join(parts)
