"""Scores runs on the validation split image by image, and compares two runs."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from fullstride.data.dataset import DataSet
from fullstride.io.records import write_json
from fullstride.nets.bundle import Bundle
from fullstride.study.trials import Work
from fullstride.tasks import build_head, task_of
from fullstride.tasks.classify import ClassificationScore
from fullstride.tasks.task import Metric, Score, Task
from fullstride.train import final_weights, run_folder
from fullstride.train.compute import SINGLE_PROCESS
from fullstride.train.optimizer import frozen_names
from fullstride.train.prepare import PreparedRun, prepare
from fullstride.train.recipes.choice import NamedRecipe, RunOptions
from fullstride.train.run import final_network, train
from fullstride.train.run_folder import RUN_CONFIG
from fullstride.train.scoring import count, finite_scores

LINE_S = 10.0  # between two lines on a training
# Validation images that a cross-validated training image counts for, as probes without one image
# each vary together. The one that is chosen among two to six probes, on 60 to 1,200 images of five
# data sets, has 0.69 points less of the test than the best one where these images count 0.5, 0.72
# where they count 1, and 0.83 without them (docs/log.md).
CROSS_VALIDATED = 0.5


@dataclass(frozen=True)
class PairedScores:
    """The scores of a network, with the data of a paired test on the same images."""

    scores: Mapping[str, float]
    # 1 or 0 for each image, in order, whether its class is predicted; "" for other tasks
    correct: str = ""
    # the task's metric over resamples of the images, see `bootstrap`; () if `correct` says more
    resampled: tuple[float | None, ...] = ()
    # 1 or 0 for each training image of a linear probe, see `CrossValidation`; "" for other metrics
    # than top-1, and where validation images may be of another kind
    cross_validated: str = ""

    def value(self, metric: Metric) -> float:
        """The score, of cross-validated images too, which count for `CROSS_VALIDATED` each."""
        score, images = self.scores[metric.name], len(self.correct)
        if not self.cross_validated:
            return score
        others, right = len(self.cross_validated), 100 * self.cross_validated.count("1")
        return (score * images + CROSS_VALIDATED * right) / (images + CROSS_VALIDATED * others)

    def with_cross_validation(self, metric: Metric) -> str:
        """`value` in words for the end of a line; "" without them."""
        value = metric.text(self.value(metric))
        return f", {value} with cross-validated training images" if self.cross_validated else ""


def train_and_score(
    name: str,
    arguments: tuple[Path, str, DataSet, NamedRecipe, RunOptions],
    stop: int | None = None,
) -> Work[tuple[PreparedRun, PairedScores, int]]:
    """Train a run until the epoch `stop`, by default to its end, and score it.

    With stop=0 the recipe's linear probe is scored. `arguments` are as for `run.train`. Yields a
    line on `name` every `LINE_S`, and returns the run, its scores and the last epoch.
    """
    reached, shown = 0, time.perf_counter()
    follow_files(*arguments)
    if stop != 0:
        with closing(train(*arguments)) as rows:
            for row in rows:
                reached = row["epoch"]
                if time.perf_counter() - shown > LINE_S:
                    shown = time.perf_counter()
                    yield f"{name}: epoch {reached} of {row['epochs']}"
                if stop is not None and reached >= stop:
                    break
    with closing(prepare(*arguments)) as run:
        return run, score_probe(run) if stop == 0 else score_run(run), reached


def follow_files(
    folder: Path, model: str, data: DataSet, named: NamedRecipe, options: RunOptions
) -> None:
    """Store in the run of a trial where its spec, weights and teacher are now.

    The paths of files inside a study are absolute, and its folder may have moved since a stop. The
    content of the spec is compared when the run is resumed.
    """
    saved = run_folder.resumable_config(folder)
    if saved is None:
        return
    paths = {"model": model, "weights": options.weights, "teacher": named.recipe.teacher}
    paths = {name: path for name, path in paths.items() if Path(path).is_absolute()}
    recipe = {**saved.recipe, "teacher": paths.pop("teacher", saved.recipe["teacher"])}
    config = replace(saved, recipe=recipe, **paths)
    if config != saved:
        write_json(folder / RUN_CONFIG, run_folder.OUTPUTS[RUN_CONFIG], config)


def score_probe(run: PreparedRun) -> PairedScores:
    """The scores of the run's linear probe. Raises ValueError for a network without one."""
    final_weights.save_probe(run)
    if not final_weights.has_probe(run):
        raise ValueError(f"{run.config.model} has no linear classifier, and so no linear probe")
    result = score_validation(run, run.task, final_weights.probe_network(run).net)
    if not run.data.val_is_drawn or run.metric.name != "top1":
        return result
    path = run.folder / final_weights.CROSS_VALIDATION_FILE
    validation = final_weights.CROSS_VALIDATION.load(path)
    return replace(result, cross_validated=validation.correct)


def score_run(run: PreparedRun) -> PairedScores:
    """The validation scores of the network that `run` would have if it ended now."""
    path = run.folder / run_folder.BUNDLE
    if path.is_dir():
        bundle = Bundle.load(path, build_head)
        return score_validation(run, task_of(bundle), bundle.net.to(run.device))
    nets = [final_weights.probe_network(run).net] if final_weights.has_probe(run) else []
    if (run.folder / run_folder.CHECKPOINT).exists():
        last = final_network(run).net.to(run.device)
        nets += [last]
        # Batch statistics after few steps are far off, whether or not the recipe computes precise
        # statistics at its end.
        frozen = run.recipe.frozen_statistics
        if not frozen and final_weights.batch_norms(last, frozen_names(last, run.recipe)):
            nets += [final_weights.of_run(run, last)]
    results, failure = list[PairedScores](), None
    for net in nets:
        try:
            results.append(score_validation(run, run.task, net))
        except FloatingPointError as error:
            failure = error
    if failure and not results:
        raise failure
    return max(results, key=lambda result: run.metric.quality(result.scores))


def score_validation(run: PreparedRun, task: Task, net: nn.Module) -> PairedScores:
    """Score `net` on the validation split of `run`. Unreadable images are not correct."""
    assert run.val is not None
    score, images = count(net, task.score(), run.val, SINGLE_PROCESS)
    scores = finite_scores(score, images)
    if not isinstance(score, ClassificationScore):
        return PairedScores(scores, resampled=resampled_of(score, run.metric == task.metric))
    right = iter(score.right)
    names, skipped = run.data.val.names, run.val.skipped
    return PairedScores(scores, "".join(str(int(n not in skipped and next(right))) for n in names))


def resampled_of(score: Score, is_compared: bool) -> tuple[float | None, ...]:
    """`Score.resampled` for JSON, with None in place of NaN.

    () unless `is_compared`: networks are compared by the resampled metric, the task's own.
    """
    if not is_compared:
        return ()
    return tuple(None if np.isnan(value) else value for value in score.resampled().tolist())


# Paired tests on the same images: McNemar's exact test if an image is right or wrong, else a
# bootstrap of the difference.


def paired_p(one: PairedScores, other: PairedScores) -> float | None:
    """The two-sided p value of the hypothesis that two networks are equally good.

    None if only the scores are known.
    """
    if one.correct and other.correct:
        return mcnemar(one.correct, other.correct)
    pairs = zip(one.resampled, other.resampled, strict=True)
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    if not differences:
        return None
    least = min(sum(sign * each <= 0 for each in differences) for sign in (1, -1))
    return min(1.0, 2 * least / len(differences))


def mcnemar(one: str, other: str) -> float:
    """The two-sided p value of the hypothesis that two networks are equally accurate.

    `one` and `other` are 1 or 0 for each image, in the same order. Only images count that exactly
    one network classifies correctly: under the hypothesis, that is either network with probability
    1/2 (McNemar 1947, in the exact form).
    """
    from scipy.stats import binomtest  # takes most of a second to import

    pairs = list(zip(one, other, strict=True))
    wins, losses = pairs.count(("1", "0")), pairs.count(("0", "1"))
    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


# What is known of networks before they are scored: one that takes twice the time has fewer errors,
# by a tenth of their mean, give or take a tenth, and each is better or worse by a tenth. Where a
# fit chooses among six networks by 25 to 300 validation images, that loses 0.7 times as many points
# of the test as the validation scores alone do (docs/log.md).
PRIOR = 0.1


def expected(scores: Sequence[PairedScores], ms: Sequence[float], metric: Metric) -> list[float]:
    """What is expected of networks on other images, as `Metric.rank`, by their scores and times.

    The best of several scores on few images is mostly luck. So this is the mean of a normal
    distribution, given all scores, their noise on the same images, and `PRIOR`. With many images it
    is nearly the score. It is the score where the noise is not known.
    """
    ranks_n = np.array([metric.rank(each.value(metric)) for each in scores])
    noise_nn, errors = noise_of(scores, metric), 100 - ranks_n.mean()
    if noise_nn is None or errors <= 0:
        return ranks_n.tolist()
    doublings_n = np.log2(ms) - np.log2(ms).mean()
    prior_nn = PRIOR**2 * (np.outer(doublings_n, doublings_n) + np.eye(len(ms)))
    prior_nn = errors**2 * (prior_nn + 100)  # nothing is known of their mean
    before_n = ranks_n.mean() + PRIOR * errors * doublings_n
    gain_nn = np.linalg.solve(prior_nn + noise_nn, prior_nn)
    return (before_n + (ranks_n - before_n) @ gain_nn).tolist()


def noise_of(scores: Sequence[PairedScores], metric: Metric) -> np.ndarray | None:
    """The covariance (N, N) of scores on the same images; None where only the scores are known."""
    if metric.name == "top1" and all(each.correct for each in scores):
        right_nm = 100.0 * np.array(
            [[*map(int, each.correct + each.cross_validated)] for each in scores]
        )
        weights_m = np.full(right_nm.shape[1], CROSS_VALIDATED)
        weights_m[: len(scores[0].correct)] = 1
        images = weights_m.sum()
        # half an image is never certain
        noise_nn = np.eye(len(scores)) * (50 / images) ** 2
        return np.atleast_2d(np.cov(right_nm, bias=True, aweights=weights_m)) / images + noise_nn
    if not all(each.resampled for each in scores):
        return None
    resampled_nm = np.array([each.resampled for each in scores], float)  # NaN for None
    resampled_nm = resampled_nm[:, ~np.isnan(resampled_nm).any(0)]
    return np.atleast_2d(np.cov(resampled_nm)) if resampled_nm.shape[1] > 1 else None
