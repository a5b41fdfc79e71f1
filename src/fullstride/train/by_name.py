"""How does one call train a network? From the names of data, network and recipe to a bundle."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing import get_all_start_methods, get_start_method
from pathlib import Path
from typing import Any

from fullstride.data.dataset import DataSet
from fullstride.data.readers.splits import SplitRule
from fullstride.measure.budget import deadline_s
from fullstride.measure.environment import choose_device
from fullstride.nets.bundle import Bundle
from fullstride.tasks import build_head, find_task
from fullstride.train import run, run_folder
from fullstride.train.recipe import Recipe
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.run_times import recipe_within


def train_network(
    data: str | Path | DataSet,
    model: str,
    out: str | Path,
    *,
    recipe: str | Recipe = "",
    weights: str = "",
    width: float = 1.0,
    depth: float = 1.0,
    task: str = "classify",
    device: str = "auto",
    workers: int | None = None,
    minutes: float | None = None,
    minival: float | None = None,
    test: float | None = None,
    group: str = "",
    keep_duplicates: bool = False,
    on_epoch: Callable[[Mapping[str, Any]], object] = lambda row: None,
    **changes: Any,
) -> Bundle:
    """Train a network as the command `train` does, in this process, and return its bundle.

    After a stop, the same call resumes from the last checkpoint. `train.run.train` is the
    generator behind it, which yields the row of each epoch.

    Args:
        data: A folder with one subfolder of images per class, or what else `open_data` opens.
        model: A name that `zoo.list()` has, or timm/NAME.
        out: The run folder, for log, checkpoint, best weights and the bundle.
        recipe: A recipe, or the name, run, bundle or JSON file of one; by default digits for the
            digits, else finetune with `weights` and scratch without, whose numbers follow the
            number of images.
        weights: Initial weights: a run, a bundle, a file of released weights, or hub. By default
            they are random.
        width: Multiplier of the network's widths, see `NetSpec.scaled`.
        depth: Multiplier of its depths.
        task: What the network is trained for.
        device: cpu, cuda, cuda:1, or auto: cuda where there is one.
        workers: Processes that decode images beside this one; None: by the cores and the images, or
            0 where a process does not begin as a fork, as it would run an unguarded script again.
        minutes: Minutes that the whole may take: training has as many epochs as fit.
        minival: Share of the training images for the minival, where the data have none; None: by
            their number. 0: no minival, and the last epoch is saved.
        test: Share of the images for the test, where the data have none; None: a tenth. 0: no test.
        group: What images have in common that must be in one split: a column of a table, a level of
            folders below the class (1, 2, ... or parent), or a pattern for the names.
        keep_duplicates: Allow the same image in several splits; by default copies are in one.
        on_epoch: Called with the row of each epoch, such as `print`.
        **changes: Fields of the recipe, such as `epochs=3`. The learning rate follows `batch`
            unless `lr` is given too.

    Raises ValueError in one line for names or data that do not fit, and if `out` has another run.
    """
    deadline = deadline_s(None, minutes)
    out, kind = Path(out), find_task(task)
    rule = SplitRule(minival, test, group, keep_duplicates)
    if not isinstance(data, DataSet):
        data = kind.open_data(str(data), **asdict(rule))
    elif rule != SplitRule():
        raise ValueError(
            "minival, test, group and keep_duplicates are for the name of data: give them to "
            "open_data where you give a DataSet"
        )
    choice = RecipeChoice(recipe, changes)
    if workers is None and default_start_method() != "fork":
        workers = 0
    settings: dict[str, Any] = dict(task=kind, weights=weights, workers=workers)
    settings |= dict(width=width, depth=depth, device=choose_device(device))
    named = recipe_within(choice, deadline, out, model, data, **settings)
    for row in run.train(out, model, data, named, **settings):
        on_epoch(row)
    return Bundle.load(out / run_folder.BUNDLE, build_head)


def default_start_method() -> str:
    return get_start_method(allow_none=True) or get_all_start_methods()[0]
