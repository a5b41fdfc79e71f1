"""The command that searches a network for images and a budget."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fullstride.commands.flags import RUN_HERE, SPLITS, Data, Options, Splits
from fullstride.io.console import print_parts
from fullstride.search.settings import SearchSettings
from fullstride.train.recipes.choice import RecipeChoice

Settings = Annotated[SearchSettings, arg(name="")]  # the flags have the names of its fields
DEFAULTS = SearchSettings()


def search(
    data: Data,
    out: Path,
    recipe: RecipeChoice,
    settings: Settings = DEFAULTS,
    options: Options = RUN_HERE,
    splits: Splits = SPLITS,
) -> None:
    """Search the most accurate network around a MasterNet that takes a given time per image.

    Example: fullstride study search photos --master genet_tiny --budget-ms 0.3 --out runs/searched

    After a stop, the same command goes on where it was. docs/search.md explains the stages.

    Args:
        out: The folder of the search: its trials, the results of its stages, and search.json.
    """
    from fullstride.search.llr.study import SEARCH
    from fullstride.study.driver import render_event, run_study

    settings.budget()  # before the data are read
    for event in run_study(SEARCH, splits.open(data), out, settings, recipe, options):
        print_parts(render_event(SEARCH, event, out))
