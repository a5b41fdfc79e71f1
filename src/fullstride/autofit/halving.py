"""Successive halving: candidates train on training images, and validation images choose."""

import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fullstride.autofit.budget import CandidateTimes, FitJob
from fullstride.autofit.candidates import Candidate, by_promise
from fullstride.autofit.plan import (
    FitPlan,
    Rung,
    TrainingTime,
    candidate_recipe,
    measure_training,
    stored_time,
    training_seconds,
)
from fullstride.data.dataset import DataSet
from fullstride.io.writing import bytes_of, remove
from fullstride.measure.budget import Budget
from fullstride.study.scores import PairedScores, expected, paired_p, train_and_score
from fullstride.study.trials import Failure, Trial, TrialKind, Work
from fullstride.tasks.task import Metric
from fullstride.train import run_folder
from fullstride.train.batches import check_task
from fullstride.train.prepare import SCORING_SHARE
from fullstride.train.recipes.choice import RecipeChoice, RunOptions
from fullstride.train.run_folder import BUNDLE
from fullstride.train.timing import LATE

TRIALS = "trials"  # in the folder of a fit, with a run folder for each candidate
LEFT_BY_LOSERS = (run_folder.CHECKPOINT, run_folder.BEST, run_folder.PROBE, run_folder.SOUP)
CHECKPOINT_S = 60.0  # between two checkpoints of a long epoch
ROOM = 1.2  # budget / time of a candidate whose file is surely within it, see `finalists.PAUSE_S`


@dataclass(frozen=True, kw_only=True)
class RungScore(PairedScores):
    """The validation scores of a candidate at the end of a rung."""

    candidate: str  # its name
    rung: int
    epochs: int  # 0: a linear probe
    seconds: float  # of training in this rung, since the last start


@dataclass(frozen=True, kw_only=True)
class RungTraining:
    """The training of a candidate in a rung, for a worker."""

    candidate: Candidate
    data: DataSet  # without its test split
    choice: RecipeChoice
    rung: int
    stop: int | None  # the epoch at the end of the rung; None: the end of the training
    epochs: int  # of the whole training
    options: RunOptions
    seconds: float | None  # of the rung, if it is the last; None: no limit


def rung_trial(
    job: FitJob,
    plan: FitPlan,
    candidate: Candidate,
    rung: Rung,
    time: TrainingTime,
    seconds: float | None = None,
) -> Trial:
    """The trial of a candidate in a rung, see `train_rung`."""
    is_long = time.epoch_s > 2 * CHECKPOINT_S and time.steps
    every_steps = max(1, round(time.steps * CHECKPOINT_S / time.epoch_s)) if is_long else 0
    training = RungTraining(
        candidate=candidate,
        data=job.unseen,
        choice=plan.recipe(job.recipe),
        rung=rung.number,
        stop=None if rung.epochs == plan.epochs else rung.epochs,
        epochs=plan.epochs,
        options=job.options_of(candidate, every_steps),
        seconds=seconds if rung.epochs == plan.epochs else None,
    )
    return Trial(
        folder=job.folder / TRIALS / candidate.name,
        result=job.folder / "rungs" / str(rung.number) / f"{candidate.name}.json",
        arguments={"training": training},
    )


def train_rung(folder: Path, device: str, *, training: RungTraining) -> Work[RungScore]:
    """Train the run in `folder` until the end of the rung, and score it.

    For a rung that ends at epoch 0, the recipe's linear probe is scored.
    """
    begin, candidate, data = time.perf_counter(), training.candidate, training.data
    options = replace(training.options, device=device)
    named = candidate_recipe(candidate, data, training.choice, options, training.epochs, folder)
    if training.seconds is not None:
        named = replace(named, deadline=begin + training.seconds)
    arguments = folder, candidate.model, data, named, options
    run, result, reached = yield from train_and_score(candidate.name, arguments, training.stop)
    metric = run.metric.text(result.scores[run.metric.name])
    after = f"after epoch {reached}" if reached else "by a linear probe"
    yield f"{candidate.name}: validation {metric} {after}{result.with_cross_validation(run.metric)}"
    return RungScore(
        **vars(result),
        candidate=candidate.name,
        rung=training.rung,
        epochs=reached,
        seconds=time.perf_counter() - begin,
    )


RUNG = TrialKind(
    work=train_rung,
    result_type=RungScore,
    noun="the score of a rung",
    keys=("candidate", "rung", "scores"),
)


# Two scores on the same images are tied if they differ by at most TIE_POINTS and a test has
# p > P_TIE: McNemar's exact test for top1, and a bootstrap of the difference for the metric of
# another task, see `paired_p`. Other scores are tied if they are equal. By the test alone most
# pairs are tied on few images, and choosing the faster one would cost 1.8 points on 250 images
# (docs/log.md).
P_TIE, TIE_POINTS = 0.05, 0.25


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The scores of all rungs, and the finalists, the best first."""

    scores: tuple[RungScore, ...]
    finalists: tuple[str, ...]
    failures: Mapping[str, str] = field(default_factory=dict)  # name -> reason in one line


def run_halving(job: FitJob, plan: FitPlan, candidate_times: CandidateTimes) -> Work[Outcome]:
    """Train the candidates of `plan`, rung by rung; yields lines for people.

    Each candidate is a run in `trials/NAME`, which trains by one recipe to the end of the rung and
    resumes from its checkpoint in the next rung. In a rung of 0 epochs it is a linear probe: a
    classifier of the features of its released weights, whose ranking also counts training images,
    each predicted by a probe of all others, if the validation images were drawn from these. The
    validation scores of a rung are the best of the averaged network, the same with precise batch
    statistics, and the probe; at the end the scores of the run's bundle. As these scores choose the
    winner, they are biased upward.

    The survivors depend only on the stored scores, the candidates' times and the plan:

    1. Candidates are ranked by what their scores and times let expect of other images, see
       `expected`, and the faster of equal ones comes first.
    2. The best of the ranking survive, among them the best candidate of a second family. If the
       first is within the budget in int8 only, the best candidate in float survives too while there
       is a place, and the candidate of the second family is in float if possible. If the first is
       within the budget by less than `ROOM`, and was measured on a busy machine, the next place is
       for the best with more room, which ships if the file of the first is too slow.
    3. The finalists are the first of the last rung, at most three, by the same two rules.
    4. With several budgets, the rules hold for each budget and the candidates within it.

    On a machine that is slower than planned, the last of the ranking are left out, see `in_time`,
    and the trainings of the last rung share the time that is left.

    After a stop, the same call resumes: scores in `rungs/K/NAME.json` are read, no step that has a
    checkpoint is repeated, and the outcome has the same bits.

    Raises ValueError if all candidates of a rung fail.
    """
    names, scores, failures = plan.candidates, list[RungScore](), dict[str, str]()
    metric, times = job.metric, replace(candidate_times, busy=plan.busy)
    for rung in plan.rungs:
        before, (names, left_s) = names, in_time(job, plan, rung.number - 1, names, scores)
        if late := before[len(names) :]:
            yield f"left out, as the trainings are slower than planned: {', '.join(late)}"
        if late and len(names) == 1 and rung is not plan.rungs[-1]:
            continue  # nothing is left to choose
        yield f"rung {rung.number} of {len(plan.rungs)}: {len(names)} {rung.end}"
        here, failed = yield from run_rung(
            job, plan, rung, [times.by_name[each] for each in names], left_s
        )
        failures |= failed
        scores += here
        ranked = rank(here, times.ms, metric)
        names = survivors_of_budgets(ranked, rung.keep, times, job.budgets)
        yield f"rung {rung.number}: {', '.join(names)}"
    finalists, _ = in_time(job, plan, len(plan.rungs), names, scores)
    if late := names[len(finalists) :]:
        yield f"not exported, as the trainings were slower than planned: {', '.join(late)}"
    return Outcome(scores=tuple(scores), finalists=finalists, failures=failures)


def in_time(
    job: FitJob, plan: FitPlan, done: int, names: tuple[str, ...], scores: Sequence[RungScore]
) -> tuple[tuple[str, ...], float | None]:
    """The first of `names` that the time left is enough for, and the seconds left for training.

    They train in the rungs after `done` rungs, as much slower than planned as the last trainings,
    and are exported. The seconds that were used are in the scores, so that a resumed fit decides
    the same. Without a limit, and with several budgets, which need their own candidates, all stay.
    """
    if plan.left_s is None:
        return names, None
    devices, slower = len(job.devices), slowness(plan, scores)
    left_s = plan.left_s - sum(each.seconds for each in scores) / devices
    rest, shipped = plan.rungs[done:], plan.rungs[-1].keep
    before = plan.rungs[done - 1].epochs if done else 0

    def ship_s(count: int) -> float:
        return plan.ship_s * min(count, shipped) / shipped

    def is_late(count: int) -> bool:
        rungs = [replace(each, candidates=min(each.candidates, count)) for each in rest]
        times = [plan.times[name] for name in names[:count]]
        needed_s = slower * training_seconds(rungs, times, devices, before)
        return needed_s + ship_s(count) > LATE * left_s

    count = len(names)
    while count > 1 and len(job.budgets) == 1 and is_late(count):
        count -= 1
    return names[:count], max(0.0, left_s - ship_s(count))


def slowness(plan: FitPlan, scores: Sequence[RungScore]) -> float:
    """Seconds of a training in the last rung / planned seconds, at least 1; 1 for probes.

    It is the median, as other programs may disturb some trainings only.
    """
    last = max((each.rung for each in scores), default=0)
    before = {each.candidate: each.epochs for each in scores if each.rung < last}
    ratios = list[float]()
    for each in scores:
        epochs = each.epochs - before.get(each.candidate, 0)
        if each.rung == last and epochs > 0:
            ratios.append(each.seconds / plan.times[each.candidate].seconds(epochs))
    return max(1.0, statistics.median(ratios or [1.0]))


def run_rung(
    job: FitJob,
    plan: FitPlan,
    rung: Rung,
    candidates: Sequence[Candidate],
    left_s: float | None = None,
) -> Work[tuple[list[RungScore], dict[str, str]]]:
    """The scores of candidates, and name -> reason of failures. Raises ValueError if all fail.

    In the last rung they share `left_s` by the times of their epochs.
    """
    all_s = sum(plan.times[each.name].epoch_s for each in candidates)
    trials = []
    for each in candidates:
        time = plan.times[each.name]
        seconds = left_s and left_s * min(1.0, len(job.devices) * time.epoch_s / all_s)
        trials.append(rung_trial(job, plan, each, rung, time, seconds))
    results = yield from job.run(RUNG, trials)
    named = zip(candidates, results, strict=True)
    failed = {each.name: own.failure for each, own in named if isinstance(own, Failure)}
    if len(failed) == len(candidates):
        for trial in trials:  # so that the next call tries again
            trial.result.unlink()
        name, reason = next(iter(failed.items()))
        raise ValueError(f"no candidate could be trained; {name}: {reason}")
    for name, reason in failed.items():
        yield f"{name} has failed: {reason}"
    return [result for result in results if isinstance(result, RungScore)], failed


def rank(scores: Sequence[RungScore], ms: Mapping[str, float], metric: Metric) -> list[str]:
    """The names, the best first, see `run_halving`."""
    values = expected(scores, [ms[each.candidate] for each in scores], metric)

    def key(one: tuple[float, RungScore]) -> tuple[float, float, float, str]:
        value, score = one
        return -value, ms[score.candidate], score.scores.get("loss", 0.0), score.candidate

    return [score.candidate for _, score in sorted(zip(values, scores, strict=True), key=key)]


def tie(best: PairedScores, other: PairedScores, metric: Metric) -> float | None:
    """The p value of two tied scores; None if they are not tied."""
    difference = abs(best.scores[metric.name] - other.scores[metric.name])
    # McNemar's test compares numbers of correct images
    p = paired_p(best, other) if metric.name == "top1" or best.resampled else None
    if p is None:
        return 1.0 if difference == 0 else None
    return p if difference <= TIE_POINTS and p > P_TIE else None


def survivors_of_budgets(
    ranked: Sequence[str], keep: int, candidate_times: CandidateTimes, budgets: Sequence[Budget]
) -> tuple[str, ...]:
    """The names that survive for any of the budgets, the best first, see `run_halving`."""
    families = {name: candidate_times.by_name[name].family for name in ranked}
    chosen = set[str]()
    for each in map(candidate_times.of, budgets):
        if inside := [name for name in ranked if name in each.ms]:
            roomy = {row.candidate for row in each.within(1 / ROOM)} if each.busy else {*inside}
            chosen |= {*survivors(inside, keep, families, each.in_float, roomy)}
    return tuple(name for name in ranked if name in chosen)


def survivors(
    ranked: Sequence[str],
    keep: int,
    families: Mapping[str, str],
    in_float: Collection[str],
    roomy: Collection[str],
) -> list[str]:
    """The names that survive, the best first, see `run_halving`."""
    first = ranked[0]
    floats = [name for name in ranked if name in in_float]
    others = [name for name in ranked if families[name] != families[first]]
    if first not in in_float:
        others = [name for name in others if name in in_float] or others
    spare = [] if first in roomy else [name for name in ranked if name in roomy]
    required = list(dict.fromkeys([first, *spare[:1], *others[:1], *floats[:1]]))[:keep]
    rest = [name for name in ranked if name not in required]
    chosen = {*required, *rest[: keep - len(required)]}
    return [name for name in ranked if name in chosen]


def delete_losers(folder: Path, outcome: Outcome) -> int:
    """Delete checkpoints, best epochs and soups of all trials but the finalists; return bytes."""
    losers = {each.candidate for each in outcome.scores} | {*outcome.failures}
    size = 0
    for name in losers - {*outcome.finalists}:
        for part in LEFT_BY_LOSERS:
            path = folder / TRIALS / name / part
            size += bytes_of(path)
            remove(path)
    return size


# The best finalist may improve by learning from a network beyond the budget.

MOST_MEASURED = 3  # most teachers whose training is measured


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """The result of training with a teacher."""

    teacher: str = ""  # candidate beyond the budget; "" for none
    student: Candidate | None = None  # the best finalist, trained again with the teacher
    is_better: bool = False  # whether the student takes the finalist's place
    p: float | None = None  # of the paired test, if the two are tied
    scores: tuple[RungScore, ...] = ()  # of the teacher and of the student
    reason: str = ""  # why there is no student, or why it is dropped, in one line


def teach(
    job: FitJob, plan: FitPlan, outcome: Outcome, candidate_times: CandidateTimes, left_s: float
) -> Work[Teaching]:
    """Train a teacher, and again the best finalist with it, if both fit into `left_s` seconds.

    The teacher is the most promising candidate beyond the budget, by published top-1, else the
    slowest; with the finalist's resolution, if possible. Both train for the epochs of the plan, as
    trials of further rungs, so that the same call resumes after a stop. The student takes the
    finalist's place if it is better on the validation split and not tied, by the rule of
    `run_halving`: as the student is not faster, a tie would gain nothing.
    """
    best = candidate_times.by_name[outcome.finalists[0]]
    teachers = [each for each in candidate_times.candidates if each.name in candidate_times.beyond]
    if not teachers:
        return Teaching(reason="no candidate is beyond the budget")
    if not plan.rungs[0].epochs:  # by its recipe, training begins with a probe
        teachers = [each for each in teachers if each.weights]
    if not teachers:
        return Teaching(reason="no candidate beyond the budget has released weights")
    if why := why_not_taught(job, replace(best, teacher=teachers[0].name)):
        return Teaching(reason=why)
    own = stored_time(job.folder, best) or measure_training(job, best)
    chosen = yield from find_teacher(job, plan, candidate_times, teachers, own, left_s)
    if chosen is None:
        return Teaching(reason="there is no time to train a teacher")
    teacher, time = chosen
    path = (job.folder / TRIALS / teacher.name / BUNDLE).resolve()
    student = replace(best, teacher=str(path))
    own = replace(own, step_s=own.step_s + SCORING_SHARE * time.step_s)
    both_s = time.seconds(plan.epochs) + own.seconds(plan.epochs)
    scores: list[RungScore] = []
    metric = job.metric
    before = next(each for each in reversed(outcome.scores) if each.candidate == best.name)
    for number, (role, each, taken) in enumerate(
        (("teacher", teacher, time), ("student", student, own)), len(plan.rungs) + 1
    ):
        yield f"{role}: {each.name}"
        rung = Rung(number=number, epochs=plan.epochs, candidates=1, keep=1)
        seconds = left_s * taken.seconds(plan.epochs) / both_s
        (result,) = yield from job.run(RUNG, [rung_trial(job, plan, each, rung, taken, seconds)])
        reason = ""
        if isinstance(result, Failure):
            reason = f"{each.name} has failed: {result.failure}"
        else:
            scores.append(result)
            if metric.quality(result.scores) <= metric.quality(before.scores):
                reason = f"{each.name} is not better on the validation split than {best.name}"
        if reason:
            return Teaching(teacher=teacher.name, scores=tuple(scores), reason=reason)
    p = tie(scores[-1], before, metric)
    tied = f"{student.name} and {best.name} are tied on the validation split"
    return Teaching(
        teacher=teacher.name,
        student=student,
        is_better=p is None,
        p=p,
        scores=tuple(scores),
        reason="" if p is None else tied,
    )


def why_not_taught(job: FitJob, student: Candidate) -> str:
    """Why the task or the recipe excludes the teacher of `student`, in one line; "" if neither."""
    try:
        named = candidate_recipe(student, job.unseen, job.recipe, job.options_of(student))
        check_task(job.task, named.recipe)
    except ValueError as error:
        return str(error).rpartition(": ")[0]  # without the hint, as the user gave no teacher
    return ""


def find_teacher(
    job: FitJob,
    plan: FitPlan,
    candidate_times: CandidateTimes,
    teachers: Sequence[Candidate],
    own: TrainingTime,
    left_s: float,
) -> Work[tuple[Candidate, TrainingTime] | None]:
    """The first teacher that fits into `left_s` seconds with a student whose time is `own`."""
    side = candidate_times.by_name[own.candidate].resolution
    order = sorted(
        by_promise(teachers, candidate_times.beyond), key=lambda each: each.resolution != side
    )
    for each in order[:MOST_MEASURED]:
        time = stored_time(job.folder, each)
        if time is None:
            yield f"measuring the training of the teacher {each.name}"
            time = measure_training(job, each)
        answers_s = plan.epochs * own.steps * time.step_s * SCORING_SHARE
        both_s = time.seconds(plan.epochs) + own.seconds(plan.epochs) + answers_s
        if not time.failure and both_s <= left_s:
            return each, time
    return None


def with_student(
    teaching: Teaching, outcome: Outcome, candidate_times: CandidateTimes
) -> tuple[Outcome, CandidateTimes]:
    """The outcome and the times with the student as the best finalist, if it is better.

    The student has the times of the former best finalist, which becomes the second.
    """
    student, scores = teaching.student, outcome.scores + teaching.scores
    if student is None or not teaching.is_better:
        return replace(outcome, scores=scores), candidate_times
    finalists = tuple(dict.fromkeys((student.name, *outcome.finalists)))
    own = (each for each in candidate_times.times if each.candidate == outcome.finalists[0])
    times = (*candidate_times.times, *(replace(each, candidate=student.name) for each in own))
    return (
        replace(outcome, scores=scores, finalists=finalists),
        replace(candidate_times, candidates=(*candidate_times.candidates, student), times=times),
    )
