"""The results of a fit: the numbers of all stages as JSON, and the last lines of the command."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from fullstride.autofit.budget import CandidateTime, fastest_of, within_budget
from fullstride.autofit.candidates import Candidate
from fullstride.autofit.data_report import DataReport
from fullstride.autofit.halving import Outcome, RungScore
from fullstride.autofit.plan import FitPlan
from fullstride.autofit.ship import Shipment
from fullstride.deploy.formats import FORMATS
from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.budget import Budget
from fullstride.report.console_tables import three_digits, wilson
from fullstride.tasks import find_task
from fullstride.tasks.task import Metric

RESULTS = "fit.json"
PAGE = "report.html"
OUTPUT = json_output("the results of a fit", "budget", "shipment", "seconds")


@dataclass(frozen=True, kw_only=True)
class FitResults:
    """The results of all stages of a fit."""

    data_name: str
    budget: Budget
    percentile: float  # of the times of calls, which the budget bounds
    settings: Mapping[str, Any]  # the arguments of the fit, as JSON
    data: DataReport
    candidates: tuple[Candidate, ...]
    times: tuple[CandidateTime, ...]  # before training
    plan: FitPlan
    outcome: Outcome
    shipment: Shipment
    seconds: Mapping[str, float]  # that each stage took

    @property
    def metric(self) -> Metric:
        """That networks and files are compared by."""
        return find_task().find_metric(self.shipment.metric)

    @property
    def last_scores(self) -> dict[str, RungScore]:
        """The score of each candidate at the end of the last rung that it was in."""
        return {
            each.candidate: each for each in sorted(self.outcome.scores, key=attrgetter("rung"))
        }

    @property
    def fastest(self) -> dict[str, CandidateTime]:
        """The shortest time of each candidate before training, in any format and precision."""
        return fastest_of(self.times)

    @property
    def left_out(self) -> dict[str, str]:
        """Why each candidate was not tried that may be within the budget, by its name."""
        before = {each.candidate: each.left_out for each in self.times if each.left_out}
        return before | dict(self.plan.left_out)


class Within(NamedTuple):
    """What is possible within a share of the budget; None: nothing that was tried."""

    share: float
    ms: float
    file: int | None  # index of the file with the best validation score
    trained: str | None  # the candidate that trained the longest, of several the best
    published: str | None  # the candidate that did not train with the best published top-1


def shares_of_budget(
    results: FitResults, shares: Sequence[float] = (0.5, 1.0, 2.0)
) -> list[Within]:
    """What half or twice the time would buy, among files and candidates.

    Candidates count by their shortest time before training, and estimates by the upper end.
    """
    metric, last, files = results.metric, results.last_scores, results.shipment.files

    def trained_rank(name: str) -> tuple[float, float]:
        score = last[name]
        return score.epochs, metric.rank(score.scores[metric.name])

    rows = []
    published = {each.name: each.top1 for each in results.candidates if each.top1 is not None}
    for share in shares:
        ms = share * results.budget.ms_per_image
        ready = [
            number
            for number, each in enumerate(files)
            if (limit := each.upper_ms) is not None and limit <= ms
        ]
        within = within_budget(results.times, replace(results.budget, ms_per_image=ms))
        names = dict.fromkeys(each.candidate for each in within)
        rows.append(
            Within(
                share,
                ms,
                max(
                    ready,
                    key=lambda number: metric.rank(files[number].val[metric.name]),
                    default=None,
                ),
                max((name for name in names if name in last), key=trained_rank, default=None),
                max(
                    (name for name in names if name in published and name not in last),
                    key=lambda name: published[name],
                    default=None,
                ),
            )
        )
    return rows


def interval(metric: Metric, scores: Mapping[str, Any]) -> tuple[float, float] | None:
    """The 95 % interval of a score, if it is a percentage of the images."""
    if not metric.percent_of_images or not scores.get("images"):
        return None
    return wilson(scores[metric.name], int(scores["images"]))


def fit_json(results: FitResults) -> dict[str, Any]:
    """Every number of a fit, for JSON. Results per image are in the files of the rungs."""
    rungs = [asdict(each) for each in results.outcome.scores]
    for each in rungs:
        del each["correct"]
    return {
        "data_name": results.data_name,
        "budget": results.budget.to_dict() | {"percentile": results.percentile},
        "settings": results.settings,
        "data": asdict(results.data),
        "candidates": [asdict(each) | {"name": each.name} for each in results.candidates],
        "times": [asdict(each) for each in results.times],
        "left_out": results.left_out,
        "plan": asdict(results.plan) | {"total_s": results.plan.total_s},
        "outcome": asdict(results.outcome) | {"scores": rungs},
        "shipment": asdict(results.shipment),
        "within": [each._asdict() for each in shares_of_budget(results)],
        "seconds": dict(results.seconds),
    }


def write_json(folder: Path, results: FitResults) -> None:
    with atomic_write(folder / RESULTS, OUTPUT) as beside:
        beside.write_text(json.dumps(fit_json(results), indent=1))


def headline(results: FitResults) -> str:
    """The network, its form and its accuracy on the images that it was finally scored on."""
    shipment, metric = results.shipment, results.metric
    file = shipment.file
    scores = shipment.test or file.val
    bounds = interval(metric, scores)
    between = f" (95 % interval {bounds[0]:.1f} to {bounds[1]:.1f})" if bounds else ""
    split = shipment.test_split or "val"
    chosen = "" if shipment.test else ", by which it was chosen: expect less of new images"
    return (
        f"{file.candidate} as {file.format} {file.precision}: {split} "
        f"{metric.text(scores[metric.name])}{between} on {int(scores['images']):,} images{chosen}"
    )


def time_line(results: FitResults) -> str:
    """The time of the file that ships, how it was determined, and the budget."""
    shipment, budget = results.shipment, results.budget
    file = shipment.file
    where = f"batch {budget.batch}, {shipment.environment.get('device', '')}"
    limit = f"the budget is {budget.ms_per_image:g} ms"
    if file.ms is None:
        return f"no estimate of its time ({where}); {limit}"
    if file.measured:
        return f"{ms_of(file.ms)} an image, p{results.percentile:g} of calls ({where}); {limit}"
    span = ""
    if file.low is not None and file.high is not None:
        span = f", 90 % interval {three_digits(file.low)} to {ms_of(file.high)}"
    return f"{ms_of(file.ms)} an image, estimated{span} ({where}); {limit}"


def ms_of(value: float) -> str:
    return f"{three_digits(value)} ms"


def closing_lines(results: FitResults, folder: Path) -> list[str]:
    """What the command ends with: the network, its accuracy and time, the file and its use."""
    shipment = results.shipment
    model = folder / shipment.model
    trust = " --trust" if FORMATS[shipment.file.format].runs_code else ""
    return [
        headline(results),
        time_line(results),
        *shipment.notes,
        f"{model}: {shipment.file.size_mib:.1f} MiB; all numbers and pictures: {folder / PAGE}",
        f"fullstride predict {model} PICTURES{trust}",
    ]
