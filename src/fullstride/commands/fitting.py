"""The command that goes the whole way, from images and a budget to a file that ships."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fullstride.autofit.settings import FitSettings
from fullstride.commands.flags import RUN_HERE, SPLITS, Data, Options, Splits
from fullstride.io.console import print_parts
from fullstride.train.recipes.choice import RecipeChoice

Settings = Annotated[FitSettings, arg(name="")]  # the flags have the names of its fields
DEFAULTS = FitSettings()


def fit(
    data: Data,
    out: Path,
    recipe: RecipeChoice,
    settings: Settings = DEFAULTS,
    options: Options = RUN_HERE,
    splits: Splits = SPLITS,
) -> None:
    """Find, train and ship the most accurate network that takes a given time per image.

    Example: fullstride fit photos --budget-ms 5 --out runs/mine

    After a stop, the same command goes on where it was.

    Args:
        out: The folder of the fit: its trials, the file that ships, fit.json and report.html.
    """
    from fullstride.autofit.fit import FIT
    from fullstride.study.driver import render_event, run_study

    settings.budget()  # before the data are read
    for event in run_study(FIT, splits.open(data), out, settings, recipe, options):
        print_parts(render_event(FIT, event, out))
