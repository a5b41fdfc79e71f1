"""Which commands study how networks scale? Trainings over a grid, and their analysis."""

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from fullstride.commands.flags import SPLITS, Data, Splits
from fullstride.io.console import print_parts
from fullstride.search.settings import ScaleSettings
from fullstride.study.settings import ExecutorSettings
from fullstride.train.recipes.choice import RecipeChoice

Settings = Annotated[ScaleSettings, arg(name="")]  # the flags have the names of its fields
Where = Annotated[ExecutorSettings, arg(name="")]
Source = Annotated[Positional[str], arg(metavar="SOURCE")]
DEFAULTS, LOCAL = ScaleSettings(), ExecutorSettings()


def scale(
    data: Data,
    out: Path,
    recipe: RecipeChoice,
    settings: Settings = DEFAULTS,
    executor: Where = LOCAL,
    splits: Splits = SPLITS,
    train_device: str = "auto",
    workers: int | None = None,
    dry_run: bool = False,
) -> None:
    """Train a network at several widths, depths and resolutions, and say what to scale next.

    Example: fullstride study scale digits --models genet_tiny --out runs/scale

    After a stop, the same command goes on where it was; with a larger grid it adds trainings.

    Args:
        out: The folder of the study: its trainings, scale.json, trainings.csv and report.html.
        train_device: Where networks are trained: cpu, cuda, cuda:1, or auto.
        workers: Processes that decode images beside this one; None: by the cores and the images.
        dry_run: End with the plan and its total, before anything is trained.
    """
    from fullstride.search.scale.study import scale_data, shown

    images = splits.open(data)
    how: dict[str, Any] = dict(train_device=train_device, workers=workers, dry_run=dry_run)
    for event in scale_data(images, out, settings, recipe, executor, **how):
        print_parts(shown(event, out))


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

    limits: dict[str, Any] = dict(budget_ms=budget_ms, target_epochs=target_epochs)
    if out:
        of_scale.check_outputs(out)
    results = of_scale.analyse_trainings(source, *find_trainings(source), **limits)
    if out:
        of_scale.write_results(out, results)
    if json:
        print(to_json(results))
        return
    print_parts(of_scale.console_parts(results))
    if out:
        print(out)
