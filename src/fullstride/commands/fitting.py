"""Which command is the whole way, from images and a budget to a file that ships?"""

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from fullstride.autofit.settings import FitSettings
from fullstride.commands.flags import SPLITS, Data, Splits
from fullstride.io.console import print_parts
from fullstride.train.recipes.choice import RecipeChoice

Settings = Annotated[FitSettings, arg(name="")]  # the flags have the names of its fields
DEFAULTS = FitSettings()


def fit(
    data: Data,
    out: Path,
    recipe: RecipeChoice,
    settings: Settings = DEFAULTS,
    splits: Splits = SPLITS,
    train_device: str = "auto",
    workers: int | None = None,
    dry_run: bool = False,
) -> None:
    """Find, train and ship the most accurate network that takes a given time per image.

    Example: fullstride fit photos --budget-ms 5 --out runs/mine

    After a stop, the same command goes on where it was.

    Args:
        out: The folder of the fit: its trials, the file that ships, fit.json and report.html.
        train_device: Where networks are trained: cpu, cuda, cuda:1, or auto.
        workers: Processes that decode images beside this one; None: by the cores and the images.
        dry_run: End with the plan, before anything is trained.
    """
    from fullstride.autofit.fit import fit_data, shown

    settings.budget()  # before the data are read
    images = splits.open(data)
    how: dict[str, Any] = dict(train_device=train_device, workers=workers, dry_run=dry_run)
    for event in fit_data(images, out, settings, recipe, **how):
        print_parts(shown(event, out))
