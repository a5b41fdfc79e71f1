"""Does the best network get better by learning from one that the budget does not allow?"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fullstride.autofit.listing.candidates import Candidate
from fullstride.autofit.timing.budget_rule import CandidateTime
from fullstride.autofit.training.halving import Outcome, tie
from fullstride.autofit.training.plan import FitPlan, by_promise
from fullstride.autofit.training.rung_training import (
    STUDY,
    TRIALS,
    RungScore,
    metric_of,
    rung_trial,
)
from fullstride.autofit.training.training_times import (
    BY_CASE,
    TrainingTime,
    measure_training,
    stored_time,
)
from fullstride.data.dataset import DataSet
from fullstride.search.trials import Failure, run_trials
from fullstride.train.minival_comparison import quality
from fullstride.train.plan import SCORING_SHARE
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.run_folder import BUNDLE

MOST_MEASURED = 3  # teachers whose training is measured


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """What became of a teacher. Candidates are "" where there is none."""

    teacher: str = ""  # candidate that is beyond the budget
    student: Candidate | None = None  # the best finalist, trained once more with the teacher
    is_better: bool = False  # whether the student takes the finalist's place
    p: float | None = None  # of the paired test, where the two are tied
    scores: tuple[RungScore, ...] = ()  # of the teacher and of the student
    reason: str = ""  # why there is no student, or why it does not stay, in one line


def teach(
    folder: Path,
    plan: FitPlan,
    outcome: Outcome,
    candidates: Sequence[Candidate],
    ms: Mapping[str, float],
    data: DataSet,
    *,
    left_s: float,
    recipe: RecipeChoice = BY_CASE,
    devices: Sequence[str] = ("cpu",),
    workers: int | None = None,
) -> Generator[str, None, Teaching]:
    """Train a teacher, and the best finalist once more with it, if both fit into `left_s` seconds.

    The teacher is the most promising candidate beyond the budget, by published top-1, else the
    slowest; one of the finalist's resolution, if there is one. Both train for the epochs of the
    plan, as trials of further rungs, so that the same call goes on after a stop. The student takes
    the finalist's place if it is better on the minival and not tied, by the rule of `run_halving`:
    the student is as fast, so that a tie is no reason for a second network.

    Args:
        folder: Of the fit.
        plan: From `make_plan`.
        outcome: From `run_halving`.
        candidates: All of them.
        ms: The fastest time per image of those beyond the budget, by name.
        data: Without its test split.
        left_s: Seconds that are left for training.
        recipe: As for `make_plan`.
        devices: As for `make_plan`; one trial runs at a time.
        workers: Processes that decode images, of each trial; None: chosen.
    """
    by_name = {each.name: each for each in candidates}
    best = by_name[outcome.finalists[0]]
    others = [each for each in candidates if each.name in ms]
    if not others:
        return Teaching(reason="no candidate is beyond the budget")
    order = sorted(by_promise(others, ms), key=lambda each: each.resolution != best.resolution)
    own = stored_time(folder, best) or measure_training(
        folder, best, data, recipe, devices[0], workers
    )
    times: dict[str, TrainingTime] = {}
    for each in order[:MOST_MEASURED]:
        time = stored_time(folder, each)
        if time is None:
            yield f"measuring the training of the teacher {each.name}"
            time = measure_training(folder, each, data, recipe, devices[0], workers)
        answers_s = plan.epochs * own.steps * time.step_s * SCORING_SHARE
        both_s = time.seconds(plan.epochs) + own.seconds(plan.epochs) + answers_s
        if not time.failure and both_s <= left_s:
            times[each.name] = time
            break
    if not times:
        return Teaching(reason="there is no time to train a teacher")
    teacher = by_name[next(iter(times))]
    path = (folder / TRIALS / teacher.name / BUNDLE).resolve()
    student = replace(best, teacher=str(path))
    scores: list[RungScore] = []
    metric = metric_of(best, data, recipe, devices[0])
    recipe = plan.recipe(recipe)
    before = next(each for each in reversed(outcome.scores) if each.candidate == best.name)
    times[student.name] = replace(
        own, step_s=own.step_s + SCORING_SHARE * times[teacher.name].step_s
    )
    for number, each in enumerate((teacher, student), len(plan.rungs) + 1):
        yield f"{'student' if each is student else 'teacher'}: {each.name}"
        time = times[each.name]
        trial = rung_trial(
            folder,
            each,
            data,
            recipe,
            number,
            None,
            plan.epochs,
            workers,
            epoch_s=time.epoch_s,
            steps=time.steps,
        )
        (result,) = yield from run_trials(STUDY, [trial], devices[:1])
        if isinstance(result, Failure):
            reason = f"{each.name} has failed: {result.failure}"
            return Teaching(teacher=teacher.name, scores=tuple(scores), reason=reason)
        scores.append(result)
        if quality(result.scores, metric) <= quality(before.scores, metric):
            reason = f"{each.name} is not better on the minival than {best.name}"
            return Teaching(teacher=teacher.name, scores=tuple(scores), reason=reason)
    p = tie(scores[-1], before, metric)
    reason = f"{student.name} and {best.name} are tied on the minival" if p is not None else ""
    return Teaching(
        teacher=teacher.name,
        student=student,
        is_better=p is None,
        p=p,
        scores=tuple(scores),
        reason=reason,
    )


def with_student(
    teaching: Teaching,
    outcome: Outcome,
    candidates: Sequence[Candidate],
    times: Sequence[CandidateTime],
) -> tuple[Outcome, tuple[Candidate, ...], tuple[CandidateTime, ...]]:
    """The outcome, candidates and times with the student as the best finalist, if it is better.

    It has the times of the finalist, which stays as the second one.
    """
    student = teaching.student
    if student is None or not teaching.is_better:
        scores = outcome.scores + teaching.scores
        return replace(outcome, scores=scores), tuple(candidates), tuple(times)
    finalists = tuple(dict.fromkeys((student.name, *outcome.finalists)))[:3]
    own = (each for each in times if each.candidate == outcome.finalists[0])
    return (
        replace(outcome, scores=outcome.scores + teaching.scores, finalists=finalists),
        (*candidates, student),
        (*times, *(replace(each, candidate=student.name) for each in own)),
    )
