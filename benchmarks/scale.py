"""What does `fullstride study scale` say of the digits, and what would it have said of Table 7?

    python benchmarks/scale.py --out benchmarks/scale.json --work FOLDER

A grid of a tiny GENet over width, depth and resolution is trained whole, in two lengths. The
analysis of its cross and band, without the other points, is then compared with them: the gain that
was predicted for the next step with the one that was measured. The laws of the cheaper half of
ResNet-RS's Table 7 are in the same file. WORK has the runs, so that a stopped benchmark goes on.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fullstride.data.dataset import open_data
from fullstride.io.console import console
from fullstride.io.writing import atomic_write, check_output, json_output
from fullstride.measure.environment import Environment
from fullstride.search.scale.analysis import RegimeAnalysis, analyse
from fullstride.search.scale.finished import table_7
from fullstride.search.scale.study import SCALE
from fullstride.search.settings import ScaleSettings
from fullstride.study.driver import run_study
from fullstride.study.settings import StudyOptions
from fullstride.train.recipes.choice import RecipeChoice

OUTPUT = json_output("results of a benchmark", "environment", "digits", "table_7")
GRID: dict[str, Any] = dict(models=("genet_tiny",), widths=(0.5, 1.0), depths=(1.0,))
GRID |= dict(resolutions=(8, 12, 16, 24), regimes=("3", "10"), band=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    check_output(arguments.out, OUTPUT)
    data, recipe = open_data("digits"), RecipeChoice("digits")
    options = StudyOptions(device="cpu")
    parts = {}
    for name, changes in (("part", {}), ("whole", dict(full_grid=True))):
        settings = ScaleSettings(**GRID, **changes)
        for event in run_study(SCALE, data, arguments.work, settings, recipe, options):
            for part in event.parts:
                print(part) if isinstance(part, str) else console().print(part)
        parts[name] = event.result
    results = dict(
        environment=asdict(Environment.here("cpu")),
        digits=parts,
        steps=list(steps(parts["part"].regimes, parts["whole"].regimes)),
        table_7={family: analyse(table_7(family)) for family in ("resnet_rs", "efficientnet")},
    )
    with atomic_write(arguments.out, OUTPUT) as temporary:
        temporary.write_text(json.dumps(results, indent=1, default=asdict))


def steps(
    part: tuple[RegimeAnalysis, ...], whole: tuple[RegimeAnalysis, ...]
) -> Iterator[dict[str, Any]]:
    """The next step of each length, with the gain that its training then showed."""
    for before, after in zip(part, whole, strict=True):
        if before.next is None:
            continue
        errors = {point.name: point.error for point in after.points}
        yield dict(
            epochs=before.epochs,
            step=before.next,
            measured_gain=errors[before.best] - errors[before.next.name],
        )


if __name__ == "__main__":
    main()
