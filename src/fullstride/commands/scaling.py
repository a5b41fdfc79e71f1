"""The commands that study how networks scale: trainings over a grid, and their analysis."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fullstride.commands.flags import RUN_HERE, SPLITS, Data, Options, Splits
from fullstride.io.console import print_parts
from fullstride.search.settings import ScaleSettings
from fullstride.train.recipes.choice import RecipeChoice

Settings = Annotated[ScaleSettings, arg(name="")]  # the flags have the names of its fields
Source = Annotated[Positional[str], arg(metavar="SOURCE")]
DEFAULTS = ScaleSettings()


def scale(
    data: Data,
    out: Path,
    recipe: RecipeChoice,
    settings: Settings = DEFAULTS,
    options: Options = RUN_HERE,
    splits: Splits = SPLITS,
) -> None:
    """Train a network at several widths, depths and resolutions, and say what to scale next.

    Example: fullstride study scale digits --models genet_tiny --out runs/scale

    After a stop, the same command goes on where it was; with a larger grid it adds trainings.

    Args:
        out: The folder of the study: its trainings, scale.json, trainings.csv and report.html.
    """
    from fullstride.search.scale.study import SCALE
    from fullstride.study.driver import render_event, run_study

    for event in run_study(SCALE, splits.open(data), out, settings, recipe, options):
        print_parts(render_event(SCALE, event, out))


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
        source: A folder of `study scale`, a CSV file as it writes one, or resnet_rs or
            efficientnet for Table 7 of ResNet-RS.
        budget_ms: The longest time that an image may take, in ms.
        target_epochs: Epochs of the training that is to come; by default the longest here.
        out: A folder for scale.json, trainings.csv, scale.png and report.html.
        json: Print one JSON object with all numbers instead of lines.
    """
    from fullstride.io.records import to_json
    from fullstride.search.scale import results as of_scale
    from fullstride.search.scale.study import find_trainings

    if out:
        of_scale.check_outputs(out)
    results = of_scale.analyse_trainings(
        find_trainings(source), budget_ms=budget_ms, target_epochs=target_epochs
    )
    if out:
        of_scale.write_results(out, results)
    if json:
        print(to_json(results))
        return
    print_parts(of_scale.console_parts(results))
    if out:
        print(out)
