"""Holds the commands that find a network for images and a budget by many trainings."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from fullstride.autofit.settings import FitSettings
from fullstride.commands.flags import Data, SplitFlags
from fullstride.io.console import print_parts
from fullstride.search.settings import ScaleSettings, SearchSettings
from fullstride.study.settings import StudyOptions
from fullstride.train.recipes.choice import RecipeChoice, RunOptions

if TYPE_CHECKING:
    from fullstride.study.driver import Study
    from fullstride.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class StudyFlags(SplitFlags, StudyOptions):
    """Where a study runs, and how its images are split."""


Source = Annotated[Positional[str], arg(metavar="SOURCE")]


def fit(
    data: Data,
    out: Path,
    recipe: RecipeChoice,
    settings: FitSettings,
    flags: StudyFlags,
    pick: float | None = None,
) -> None:
    """Find, train and ship the most accurate network that takes a given time per image.

    Example: fullstride fit photos --budget-ms 5 --out runs/mine

    DATA may also have boxes, masks, depths, several labels, or videos: see --task.

    After a stop, the same command continues.

    Args:
        data: A folder with one subfolder of images per class, or another source for `train`.
        out: The folder of the fit: its trials, the file that ships, fit.json and report.html.
        pick: Also copy the best file that takes at most this many ms per image to model-PICKms.
    """
    from fullstride.autofit.fit import FIT as STUDY
    from fullstride.autofit.ship import pick as pick_file
    from fullstride.measure.budget import Budget
    from fullstride.train.run import task_for

    settings.budgets()  # refuses wrong budgets before the data are read
    if pick is not None:
        Budget(ms_per_image=pick)
    task = task_for(data, RunOptions(task=settings.task), recipe.changes)
    results = run(STUDY, data, out, recipe, replace(settings, task=task.name), flags, task)
    if pick is not None and not flags.dry_run:
        name, line = pick_file(out, results.shipment, results.metric, pick, settings.maybe)
        print_parts([line, str(out / name)])


def search(
    data: Data, out: Path, recipe: RecipeChoice, settings: SearchSettings, flags: StudyFlags
) -> None:
    """Search the most accurate network around a MasterNet that takes a given time per image.

    Example: fullstride study search photos --master genet_tiny --budget-ms 0.3 --out runs/searched

    After a stop, the same command continues. docs/reproduce/search.md explains the stages.

    Args:
        data: A folder with one subfolder of images per class, or another source for `train`.
        out: The folder of the search: its trials, the results of its stages, and search.json.
    """
    from fullstride.search.llr.study import SEARCH as STUDY

    settings.budget()  # refuses a wrong budget before the data are read
    run(STUDY, data, out, recipe, settings, flags)


def scale(
    data: Data, out: Path, recipe: RecipeChoice, settings: ScaleSettings, flags: StudyFlags
) -> None:
    """Train a network at several widths, depths and resolutions, and say what to scale next.

    Example: fullstride study scale digits --models genet_tiny --out runs/scale

    After a stop, the same command continues; with a larger grid it adds trainings.

    Args:
        data: A folder with one subfolder of images per class, or another source for `train`.
        out: The folder of the study: its trainings, scale.json, trainings.csv and report.html.
    """
    from fullstride.search.scale.study import SCALE as STUDY

    run(STUDY, data, out, recipe, settings, flags)


def run(
    study: "Study",
    data: str,
    out: Path,
    recipe: RecipeChoice,
    settings: Any,
    flags: StudyFlags,
    task: "Task | None" = None,
) -> Any:
    """Print the events of a study, and return its last result."""
    from fullstride.study.driver import run_study

    result = None
    images = flags.open(data, task, prints_notes=study.noun != "fit")  # its report has the notes
    for event in run_study(study, images, out, settings, recipe, flags):
        print_parts(event.parts)
        result = event.result
    return result


def analyse_scale(
    source: Source,
    budget_ms: float | None = None,
    target_epochs: float | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Analyse finished trainings: the front, gains of each axis, the law, and the next step.

    Example: fullstride study analyse resnet_rs

    Args:
        source: A folder of `study scale`, a CSV file in its form, or resnet_rs or efficientnet for
            Table 7 of ResNet-RS.
        budget_ms: The longest time allowed per image, in ms.
        target_epochs: Epochs of the planned training; by default the longest in the source.
        out: A folder for scale.json, trainings.csv, scale.png and report.html.
        json: Print one JSON object with all numbers instead of lines.
    """
    from fullstride.io.records import to_json
    from fullstride.search.scale import study as of_scale

    if out:
        of_scale.check_outputs(out)
    results = of_scale.analyse_trainings(
        of_scale.find_trainings(source), budget_ms=budget_ms, target_epochs=target_epochs
    )
    if out:
        of_scale.write_results(out, results)
    if json:
        print(to_json(results))
        return
    print_parts(of_scale.console_parts(results))
    if out:
        print(out)
