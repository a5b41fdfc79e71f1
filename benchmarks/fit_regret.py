"""What does a fit lose against training every candidate to the end? Regret, baselines, table."""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fullstride.autofit.finalists import FileRecord, ShippedFile
from fullstride.autofit.ship import choose
from fullstride.study.scores import PairedScores
from fullstride.tasks.task import Metric

NOISE = 1.05  # times the budget: a measurement up to this counts as within it
MOST_REGRET = 0.5  # points
MOST_COST = 1 / 3  # of training every candidate to the end
DRAWS = 200  # of validation images among those that no network was trained on


@dataclass(frozen=True, kw_only=True)
class ReferenceFile:
    """A file of a candidate that was trained to the end."""

    file: ShippedFile  # with its time and its validation
    correct: str  # as in `FileRecord`
    test: float  # the score on the test images
    params: int  # of the network
    resampled: tuple[float | None, ...] = ()  # as in `FileRecord`
    tested: PairedScores | None = None  # on the test images

    @property
    def ms(self) -> float:
        assert self.file.ms is not None
        return self.file.ms


@dataclass(frozen=True, kw_only=True)
class Reference:
    """All candidates, trained to the end."""

    files: tuple[ReferenceFile, ...]
    seconds: Mapping[str, float]  # of training, by candidate
    epochs: int  # of each training
    val_images: int
    test_images: int
    metric: str = "top1"


@dataclass(frozen=True, kw_only=True)
class FitRow:
    """A fit with a budget of its own."""

    budget_ms: float
    failure: str = ""  # why nothing shipped, in one line
    candidate: str = ""
    format: str = ""
    precision: str = ""
    ms: float = 0.0  # as the fit measured it last
    again_ms: tuple[float, ...] = ()  # measured again, each time in a fresh process
    val: float = 0.0
    test: float = 0.0
    seconds: float = 0.0  # of the stages plan and training
    total_s: float = 0.0  # of all stages
    epochs: Mapping[str, int] = field(default_factory=dict)  # of each candidate that trained
    load: float = 0.0  # of the machine in the last minute, when the file was measured again
    tested: PairedScores | None = None  # of the shipped file, on the test images

    @property
    def in_budget(self) -> bool:
        """By the shortest time, as what disturbs a measurement makes it longer."""
        return not self.failure and min(self.again_ms) <= NOISE * self.budget_ms


def budgets(files: Sequence[ReferenceFile], count: int = 6) -> list[float]:
    """Quantiles of the shortest times of the candidates, from the fastest to the slowest.

    They are in the middle of `count` equal parts, so that no budget is the time of a candidate.
    """
    fastest = dict[str, float]()
    for each in files:
        name = each.file.candidate
        fastest[name] = min(each.ms, fastest.get(name, each.ms))
    shares = (np.arange(count) + 0.5) / count
    return [float(f"{ms:.4g}") for ms in np.quantile(sorted(fastest.values()), shares)]


def within(files: Sequence[ReferenceFile], ms: float) -> list[ReferenceFile]:
    return [each for each in files if each.ms <= ms]


def chosen(
    files: Sequence[ReferenceFile], metric: Metric, *, by_score: bool = False
) -> ReferenceFile:
    """The file that `ship` would choose, or the one with the best validation score."""
    if not by_score:
        records = [
            FileRecord(
                file=replace(each.file, within=True),
                correct=each.correct,
                resampled=each.resampled,
                seconds=0.0,
            )
            for each in files
        ]
        return files[choose(records, metric)]
    return max(files, key=lambda each: (metric.quality(each.file.val), -each.ms))


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Where the difference of a fit to the best file within its budget comes from, in points.

    Each is the difference of test scores between one choice and the next: the best file by its
    test score, the best by its validation, the one that `ship` would choose, and the one that the
    fit shipped.
    """

    best: ReferenceFile  # within the budget, by its test score
    val: float  # all are trained to the end, but chosen by the validation split
    rule: float  # and times count too, see `ship.choose`
    rest: float  # halving, and the fit's own measurements of time

    @property
    def regret(self) -> float:
        """Against the best file by its test score, which nobody knows."""
        return self.val + self.beyond_val

    @property
    def beyond_val(self) -> float:
        """Against what training every candidate to the end finds: the best file by its
        validation."""
        return self.rule + self.rest


def losses(files: Sequence[ReferenceFile], ms: float, test: float, metric: Metric) -> Losses | None:
    """Of a file with the score `test` that was shipped for the budget `ms`.

    None where no file of the reference is within the budget.
    """
    inside = within(files, ms)
    if not inside:
        return None
    best = max(inside, key=lambda each: metric.rank(each.test))
    by_val = metric.rank(chosen(inside, metric, by_score=True).test)
    by_rule = metric.rank(chosen(inside, metric).test)
    return Losses(
        best=best,
        val=metric.rank(best.test) - by_val,
        rule=by_val - by_rule,
        rest=by_rule - metric.rank(test),
    )


def standard_error(ours: PairedScores | None, theirs: PairedScores | None) -> float:
    """Of the difference of two files on the test images, in points: by the differences image by
    image, or over the same resamples of the images. NaN where only the scores are known."""
    if ours is None or theirs is None:
        return math.nan
    if ours.correct:
        pairs = zip(ours.correct, theirs.correct, strict=True)
        by_image = [100.0 * (int(one) - int(other)) for one, other in pairs]
        return statistics.pstdev(by_image) / math.sqrt(len(by_image))
    resamples = zip(ours.resampled, theirs.resampled, strict=True)
    return statistics.pstdev(one - other for one, other in resamples if None not in (one, other))


def redraw(files: Sequence[ReferenceFile], draw: int) -> list[ReferenceFile]:
    """The files as if as many other images of the validation and test images were those of the
    validation split, for a metric that is a share of images."""
    splits = [(each.correct, each.tested.correct) for each in files if each.tested]
    flags = np.array([[int(flag) for flag in val + test] for val, test in splits])
    images = np.random.default_rng(draw).permutation(flags.shape[1])
    result = list[ReferenceFile]()
    for each, row in zip(files, flags[:, images], strict=True):
        val, test = row[: len(each.correct)], row[len(each.correct) :]
        scores = {**each.file.val, "top1": 100.0 * val.mean()}
        result.append(
            replace(
                each,
                file=replace(each.file, val=scores),
                correct="".join(map(str, val)),
                test=100.0 * test.mean(),
                tested=PairedScores({}, "".join(map(str, test))),
            )
        )
    return result


def regrets_of_choice(
    files: Sequence[ReferenceFile], budgets_ms: Sequence[float], metric: Metric
) -> tuple[list[float], bool]:
    """Regrets of what `ship` would choose if every candidate was trained to the end, and whether
    each is at most `MOST_REGRET` or its standard error."""
    regrets, small = list[float](), True
    for ms in budgets_ms:
        inside = within(files, ms)
        best = max(inside, key=lambda each: metric.rank(each.test))
        taken = chosen(inside, metric)
        regrets.append(metric.rank(best.test) - metric.rank(taken.test))
        small &= regrets[-1] <= max(MOST_REGRET, standard_error(taken.tested, best.tested))
    return regrets, small


def baselines(
    files: Sequence[ReferenceFile], ms: float, metric: Metric, default: str
) -> dict[str, float | None]:
    """Test scores of simpler choices within a budget; None where nothing of the kind fits.

    Each candidate counts with the file that its validation chooses among those within the budget:
    a random one (the mean over all), the largest (most parameters, then pixels), and the network
    `default` at the largest resolution that fits. All need one training.
    """
    own = dict[str, list[ReferenceFile]]()
    for each in within(files, ms):
        own.setdefault(each.file.candidate, []).append(each)
    best = [chosen(each, metric) for each in own.values()]
    defaults = [each for each in best if each.file.candidate.startswith(f"{default}-")]

    def size(each: ReferenceFile) -> tuple[int, int]:
        return each.params, each.file.resolution

    return {
        "random": statistics.mean(each.test for each in best) if best else None,
        "largest": max(best, key=size).test if best else None,
        "default": max(defaults, key=size).test if defaults else None,
    }


def cost(row: FitRow, reference: Reference) -> tuple[float, float]:
    """The fit's training as a share of training every candidate to the end, in two ways.

    The measured seconds of its plan and training; and its epochs, each with the seconds that the
    reference took for an epoch of that candidate, which the load of the machine does not change.
    """
    all_s = sum(reference.seconds.values())
    epochs_s = sum(
        reference.seconds[name] * epochs / reference.epochs for name, epochs in row.epochs.items()
    )
    return row.seconds / all_s, epochs_s / all_s


HEAD = ("budget ms", "ships", "ms", "again", "in budget", "test", "best", "regret", "error")
HEAD += ("val", "rule", "rest", "cost", "by epochs", "random", "largest", "default")


def table(reference: Reference, rows: Sequence[FitRow], metric: Metric, default: str) -> str:
    """The fits as Markdown, with their sum in sentences."""
    cells = [HEAD, *(table_row(reference, row, metric, default) for row in rows)]
    one = f", of which one is {100 / reference.test_images:.2g} points"
    return "\n".join(
        [
            markdown(cells),
            "",
            *summary(reference, rows, metric),
            "",
            textwrap.fill(
                f"Test {metric.label} in points on {reference.test_images:,} images"
                f"{one if metric.percent_of_images else ''}. Best: of all candidates, trained to "
                f"the end ({reference.epochs} epochs) and exported, the best file within the "
                "budget by its test score. Regret is the difference, with its standard error (a "
                "dash: not stored) and as the sum of three: choosing "
                f"by validation ({reference.val_images:,} images), the rule by which times count "
                "too, and the rest, which is halving and the fit's own measurements of time. "
                "Again is the shortest of the times in fresh processes. Cost is the fit's plan and "
                "training as a share of training every candidate to the end, in measured seconds, "
                "and by epochs with the seconds of the reference. The baselines train one "
                "candidate each that is within the budget: a random one, the largest, and "
                f"{default} at its largest resolution.",
                100,
            ),
        ]
    )


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """A table, whose first row is the header."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [cells[0], tuple("-" * width for width in widths), *cells[1:]]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def table_row(reference: Reference, row: FitRow, metric: Metric, default: str) -> tuple[str, ...]:
    others = baselines(reference.files, row.budget_ms, metric, default).values()
    simple = ["none" if each is None else f"{each:.2f}" for each in others]
    if row.failure:
        return (f"{row.budget_ms:g}", "nothing", *[""] * (len(HEAD) - 5), *simple)
    lost = losses(reference.files, row.budget_ms, row.test, metric)
    points = [""] * 6
    if lost is not None:
        error = standard_error(row.tested, lost.best.tested)
        points = [f"{lost.best.test:.2f}", f"{lost.regret:+.2f}"]
        points += ["-" if math.isnan(error) else f"{error:.2f}"]
        points += [f"{each:+.2f}" for each in (lost.val, lost.rule, lost.rest)]
    return (
        f"{row.budget_ms:g}",
        f"{row.candidate} {row.format} {row.precision}",
        f"{row.ms:.4g}",
        f"{min(row.again_ms):.4g}",
        "yes" if row.in_budget else "no",
        f"{row.test:.2f}",
        *points,
        *(f"{each:.2f}" for each in cost(row, reference)),
        *simple,
    )


def summary(reference: Reference, rows: Sequence[FitRow], metric: Metric) -> list[str]:
    """How many of the fits keep each part of the promise."""
    shipped = [row for row in rows if not row.failure]
    each_lost = [losses(reference.files, row.budget_ms, row.test, metric) for row in shipped]
    regrets = [each.regret for each in each_lost if each is not None]
    small = sum(
        each.regret <= max(MOST_REGRET, standard_error(row.tested, each.best.tested))
        for row, each in zip(shipped, each_lost, strict=True)
        if each is not None
    )
    others = [each.beyond_val for each in each_lost if each is not None]
    first = sum(row.again_ms[0] <= NOISE * row.budget_ms for row in shipped)
    costs = [cost(row, reference) for row in shipped]
    lines = [
        f"Within the budget (5 % allowed): {sum(row.in_budget for row in rows)} of {len(rows)}; "
        f"by the first of the measurements {first}.",
    ]
    if regrets:
        lines += [
            f"Regret at most {MOST_REGRET:g} points: {sum(each <= MOST_REGRET for each in regrets)}"
            f" of {len(rows)}; mean {statistics.mean(regrets):.2f}, largest {max(regrets):.2f}.",
            f"At most {MOST_REGRET:g} points or its standard error: {small} of {len(rows)}.",
            "Against the file that training every candidate to the end finds, by validation:",
            f"at most {MOST_REGRET:g} points: {sum(each <= MOST_REGRET for each in others)} of "
            f"{len(rows)}; mean {statistics.mean(others):.2f}, largest {max(others):.2f}.",
        ]
    if regrets and metric.name == "top1" and all(each.tested for each in reference.files):
        inside = [row.budget_ms for row, each in zip(shipped, each_lost, strict=True) if each]
        lines += redraw_lines(reference.files, inside, metric)
    if costs:
        seconds, epochs = (
            sum(share <= MOST_COST for share in each) for each in zip(*costs, strict=True)
        )
        lines += [f"Cost at most a third: {seconds} of {len(rows)}, by epochs {epochs}."]
    return lines


def redraw_lines(
    files: Sequence[ReferenceFile], budgets_ms: Sequence[float], metric: Metric
) -> list[str]:
    """What these validation images have to do with the regrets: choices by others beside them."""
    here = statistics.mean(regrets_of_choice(files, budgets_ms, metric)[0])
    draws = [regrets_of_choice(redraw(files, draw), budgets_ms, metric) for draw in range(DRAWS)]
    means = [statistics.mean(regrets) for regrets, _ in draws]
    return [
        f"If every candidate is trained to the end, the mean regret is {here:.2f}. It is "
        f"{statistics.mean(means):.2f} with other validation",
        f"images, {DRAWS} times drawn among all that no network was trained on, and lower than "
        f"here {sum(each < here for each in means)} times.",
        f"Each of the regrets is at most {MOST_REGRET:g} points or its error "
        f"{sum(small for _, small in draws)} of these {DRAWS} times.",
    ]
