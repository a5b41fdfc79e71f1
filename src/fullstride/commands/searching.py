"""Which command searches a network for images and a budget?"""

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from fullstride.commands.flags import SPLITS, Data, Splits
from fullstride.io.console import print_parts
from fullstride.search.settings import SearchSettings
from fullstride.study.settings import ExecutorSettings
from fullstride.train.recipes.choice import RecipeChoice

Settings = Annotated[SearchSettings, arg(name="")]  # the flags have the names of its fields
Executor = Annotated[ExecutorSettings, arg(name="")]
DEFAULTS, LOCAL = SearchSettings(), ExecutorSettings()


def search(
    data: Data,
    out: Path,
    recipe: RecipeChoice,
    settings: Settings = DEFAULTS,
    executor: Executor = LOCAL,
    splits: Splits = SPLITS,
    train_device: str = "auto",
    workers: int | None = None,
    dry_run: bool = False,
) -> None:
    """Search the most accurate network around a MasterNet that takes a given time per image.

    Example: fullstride study search photos --master genet_tiny --budget-ms 0.3 --out runs/searched

    After a stop, the same command goes on where it was. docs/search.md explains the stages.

    Args:
        out: The folder of the search: its trials, the results of its stages, and search.json.
        train_device: Where networks are trained: cpu, cuda, cuda:1, or auto.
        workers: Processes that decode images beside this one; None: by the cores and the images.
        dry_run: End with the plan and its total cost, before anything is trained.
    """
    from fullstride.search.llr.study import search_events, shown

    settings.budget()  # before the data are read
    images = splits.open(data)
    how: dict[str, Any] = dict(train_device=train_device, workers=workers, dry_run=dry_run)
    how |= dict(executor=executor)
    for event in search_events(images, out, settings, recipe, **how):
        print_parts(shown(event, out))
