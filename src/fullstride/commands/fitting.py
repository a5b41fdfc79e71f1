"""Which command is the whole way, from images and a budget to a file that ships?"""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fullstride.autofit.settings import FitSettings
from fullstride.commands.flags import Data
from fullstride.console import Bar, report_ignored

Settings = Annotated[FitSettings, arg(name="")]  # the flags have the names of its fields


def fit(
    data: Data,
    out: Path,
    settings: Settings,
    minival: float | None = None,
    test: float | None = None,
    group: str = "",
    keep_duplicates: bool = False,
    train_device: str = "auto",
    workers: int | None = None,
    dry_run: bool = False,
) -> None:
    """Find, train and ship the most accurate network that takes a given time per image.

    Example: fullstride fit photos --budget-ms 5 --out runs/mine

    After a stop, the same command goes on where it was.

    Args:
        out: The folder of the fit: its trials, the file that ships, fit.json and report.html.
        minival: As for `train`: share of the training images that networks are compared on.
        test: As for `train`: share of the images for the final score.
        group: As for `train`: what images have in common that must be in one split.
        keep_duplicates: As for `train`.
        train_device: Where networks are trained: cpu, cuda, cuda:1, or auto.
        workers: Processes that decode images beside this one; None: by the cores and the images.
        dry_run: End with the plan, before anything is trained.
    """
    from fullstride.autofit.fit import fit_data
    from fullstride.autofit.progress import event_lines
    from fullstride.data.dataset import open_data

    splits = dict(minival=minival, test=test, group=group, keep_duplicates=keep_duplicates)
    images = open_data(data, **splits)
    report_ignored(images.ignored, images.notes)
    how = dict(train_device=train_device, workers=workers, dry_run=dry_run)
    with Bar() as bar:
        for event in fit_data(images, out, settings, watch=bar.watch, **how):
            for line in event_lines(event):
                bar.print(line)
