"""Which candidate is the best? Successive halving on the training part, judged on the minival."""

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fullstride.autofit.listing.candidates import Candidate
from fullstride.autofit.training.plan import FINALISTS, FitPlan
from fullstride.autofit.training.rung_training import (
    STUDY,
    TRIALS,
    RungScore,
    metric_of,
    rung_trial,
)
from fullstride.autofit.training.training_times import BY_CASE
from fullstride.data.dataset import DataSet
from fullstride.search.mcnemar import mcnemar
from fullstride.search.trials import Failure, run_trials
from fullstride.storage import bytes_of, remove
from fullstride.tasks.task import Metric
from fullstride.train import run_folder
from fullstride.train.minival_comparison import quality
from fullstride.train.recipes.choice import RecipeChoice

# Two networks are tied where the test does not tell them apart at P_TIE, and the minival scores
# differ by no more than TIE_POINTS. By the test alone most pairs are tied on a small minival, and
# the faster one would cost 1.8 points on 250 images (docs/log.md).
P_TIE, TIE_POINTS = 0.05, 0.25


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The scores of all rungs, and the finalists, the best first."""

    scores: tuple[RungScore, ...]
    finalists: tuple[str, ...]
    ties: tuple[tuple[str, str, float], ...]  # that were decided by time: faster, slower, p value
    failures: Mapping[str, str] = field(default_factory=dict)  # name -> why, in one line


def run_halving(
    folder: Path,
    plan: FitPlan,
    candidates: Sequence[Candidate],
    ms: Mapping[str, float],
    data: DataSet,
    *,
    recipe: RecipeChoice = BY_CASE,
    devices: Sequence[str] = ("cpu",),
    workers: int | None = None,
    in_float: Collection[str] | None = None,
) -> Generator[str, None, Outcome]:
    """Train the candidates of `plan`, rung by rung; yields lines for people.

    Each candidate is a run in `trials/NAME`, which trains by one recipe to the end of the rung and
    goes on from its checkpoint in the next one. In a rung of 0 epochs it is a linear probe: a
    classifier of the features that its released weights give. The scores of a rung are those on the
    minival of the averaged network, with precise batch statistics or of the probe if it is better
    so; at the end those of the run's bundle. Scores that choose are too good for the winner: they
    are the minival's, and no test.

    Who goes on is a function of the stored scores and of `ms` alone:

    1. Candidates are ranked. The next place goes to the fastest of the best of the rest and those
       tied with it. Two are tied if their scores differ by at most `TIE_POINTS` and McNemar's
       exact test on the same images has p > `P_TIE`; for other metrics than top1, if the scores
       are equal.
    2. The best ones of the ranking go on, among them the best one of another family than the
       first. If the first is within the budget in int8 only, the best one that is in float goes on
       too while there is a place, and the one of another family is in float if one is.
    3. The finalists are the first of the last rung, at most three, by the same two rules.

    After a stop, the same call goes on: scores of `rungs/K/NAME.json` are read, no step that has a
    checkpoint is repeated, and the outcome has the same bits.

    Args:
        folder: Of the fit.
        plan: From `make_plan`.
        candidates: Those of the plan, and others.
        ms: The fastest time per image of each, by name.
        data: Without its test split.
        recipe: As for `make_plan`.
        devices: Where trials run at the same time, each in a process if there are several.
        workers: Processes that decode images, of each trial; None: chosen.
        in_float: Those within the budget in a float precision; None: all.

    Raises ValueError if all candidates of a rung fail.
    """
    by_name = {each.name: each for each in candidates}
    families = {name: by_name[name].family for name in plan.candidates}
    in_float = {*plan.candidates} if in_float is None else in_float
    names, scores, failures = plan.candidates, list[RungScore](), dict[str, str]()
    ranked, ties = list[str](), list[tuple[str, str, float]]()
    metric = metric_of(by_name[names[0]], data, recipe, devices[0])
    recipe = plan.recipe(recipe)
    for rung in plan.rungs:
        yield f"rung {rung.number} of {len(plan.rungs)}: {len(names)} {rung.end}"
        stop = None if rung is plan.rungs[-1] else rung.epochs
        trials = [
            rung_trial(
                folder,
                by_name[name],
                data,
                recipe,
                rung.number,
                stop,
                plan.epochs,
                workers,
                epoch_s=plan.epoch_s[name],
                steps=plan.steps.get(name, 0),
            )
            for name in names
        ]
        results = yield from run_trials(STUDY, trials, devices)
        failed = {
            name: result.failure
            for name, result in zip(names, results, strict=True)
            if isinstance(result, Failure)
        }
        if len(failed) == len(names):
            for trial in trials:  # so that the next call tries again
                trial.result.unlink()
            name, reason = next(iter(failed.items()))
            raise ValueError(f"no candidate could be trained; {name}: {reason}")
        for name, reason in failed.items():
            yield f"{name} has failed: {reason}"
        failures |= failed
        here = [result for result in results if isinstance(result, RungScore)]
        scores += here
        ranked, by_time = rank(here, ms, metric)
        ties += by_time
        keep = rung.keep if rung is not plan.rungs[-1] else FINALISTS
        names = tuple(going_on(ranked, keep, families, in_float))
        yield f"rung {rung.number}: {', '.join(names)}"
    return Outcome(
        scores=tuple(scores), finalists=names, ties=tuple(dict.fromkeys(ties)), failures=failures
    )


def rank(
    scores: Sequence[RungScore], ms: Mapping[str, float], metric: Metric
) -> tuple[list[str], list[tuple[str, str, float]]]:
    """The names, the best first, and the ties that were decided by time.

    See `run_halving` for the rule. Of equally fast ones the better score, then the name, decides.
    """

    def key(each: RungScore) -> tuple[float, float, str]:
        value, loss = quality(each.scores, metric)
        return -value, -loss, each.candidate

    left, names, ties = sorted(scores, key=key), list[str](), list[tuple[str, str, float]]()
    while left:
        best = left[0]
        tied = {each.candidate: p for each in left if (p := tie(best, each, metric)) is not None}
        first = min(
            (each for each in left if each.candidate in tied), key=lambda x: ms[x.candidate]
        )
        if first is not best:
            ties.append((first.candidate, best.candidate, tied[first.candidate]))
        names.append(first.candidate)
        left.remove(first)
    return names, ties


def tie(best: RungScore, other: RungScore, metric: Metric) -> float | None:
    """The p value of two scores that are tied, and None for others."""
    difference = abs(best.scores[metric.name] - other.scores[metric.name])
    if metric.name != "top1" or not best.correct:  # the test compares numbers of correct images
        return 1.0 if difference == 0 else None
    p = mcnemar(best.correct, other.correct) if difference <= TIE_POINTS else 0.0
    return p if p > P_TIE else None


def going_on(
    ranked: Sequence[str], keep: int, families: Mapping[str, str], in_float: Collection[str]
) -> list[str]:
    """The names that go on, the best first: see `run_halving`."""
    first = ranked[0]
    floats = [name for name in ranked if name in in_float]
    others = [name for name in ranked if families[name] != families[first]]
    if first not in in_float:
        others = [name for name in others if name in in_float] or others
    required = list(dict.fromkeys([first, *others[:1], *floats[:1]]))[:keep]
    rest = [name for name in ranked if name not in required]
    chosen = {*required, *rest[: keep - len(required)]}
    return [name for name in ranked if name in chosen]


def delete_losers(folder: Path, outcome: Outcome) -> int:
    """Delete the checkpoints and the best epochs of trials that are no finalists; their bytes."""
    losers = {each.candidate for each in outcome.scores} | {*outcome.failures}
    size = 0
    for name in losers - {*outcome.finalists}:
        for part in (run_folder.CHECKPOINT, run_folder.BEST, run_folder.PROBE):
            path = folder / TRIALS / name / part
            size += bytes_of(path)
            remove(path)
    return size
