"""Prints how long the papers' trainings on ImageNet would take: epochs x images x estimated steps.

python benchmarks/paper_hours.py

Times of a training image are those of the latency model for one RTX 3090 with autocast, the only
profile with training steps. They leave out data loading, validation and the teacher of GENet.
docs/reproduce/index.md has the table.
"""

import argparse

from fullstride.latency.devices import estimate_by_name, load_profile
from fullstride.latency.profiles import Profile
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.papers import RESNET_RS_SIZES

IMAGES = 1_281_167  # of ImageNet-1k's training
TRAININGS = [  # network, recipe
    *((f"tresnet_{size}", "tresnet") for size in ("m", "l", "xl")),
    *((f"tresnet_{size}", "tresnet_448") for size in ("m", "l", "xl")),
    ("resnet50", "resnet"),
    ("resnet50", "study_decay"),
    *((f"resnet_rs_{depth}", f"resnet_rs_{depth}_{side}") for depth, side in RESNET_RS_SIZES),
    *((f"genet_{size}", "genet") for size in ("light", "normal", "large")),
]


def table(profile: Profile, batch: int) -> list[str]:
    lines = [
        "| network | recipe | pixels | epochs | hours on one RTX 3090, 90 % |",
        "|---|---|--:|--:|---|",
    ]
    for network, name in TRAININGS:
        recipe = RECIPES[name]
        side = None if name == "genet" else recipe.resolution
        row = estimate_by_name([network], profile, batch, side, training=True)[0]
        hours = recipe.epochs * IMAGES / 3_600_000
        time = row.estimate
        low, middle, high = (each * hours for each in (time.low, time.ms_per_image, time.high))
        lines.append(
            f"| `{network}` | `{name}` | {row.resolution} | {recipe.epochs} "
            f"| {middle:,.0f} ({low:,.0f} to {high:,.0f}) |"
        )
    return lines


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(*table(load_profile("rtx3090"), 64), sep="\n")


if __name__ == "__main__":
    main()
