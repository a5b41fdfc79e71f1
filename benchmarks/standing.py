"""Prints where our families stand beside others: published top-1 against estimated times.

python benchmarks/standing.py > table.md
python benchmarks/standing.py --budget-ms 0.25

Of each family the most accurate network within each budget, with its released weights (GENet's
accuracies are those of its paper). Nothing is measured here: accuracies are timm's, and times are
those of the latency model for one GPU. docs/reference/networks.md has the table, and the README
the rows of one budget.
"""

import argparse
from collections.abc import Sequence

from fullstride.latency.devices import estimate_by_name, load_profile
from fullstride.latency.network_times import Estimate
from fullstride.latency.profiles import Profile
from fullstride.tables import networks, pretrained_networks, published

FAMILIES = {  # how names begin -> what the family is called
    "tresnet": "TResNet",
    "resnet_rs": "ResNet-RS",
    "genet": "GENet",
    "timm/hgnetv2": "HGNetV2",
    "timm/convnext_": "ConvNeXt",
    "timm/mobilenetv4": "MobileNetV4",
    "timm/repvit": "RepViT",
}
BUDGETS_MS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)  # per image
Row = tuple[str, str, int, float, float, str]  # family, network, pixels, top-1, parameters, weights


def rows() -> list[Row]:
    """Every network of the families with its accuracies."""
    params = {each.name: each.params for each in networks()}
    released = [
        (each.name, each.resolution, each.top1, each.params, each.tag)
        for each in pretrained_networks()
    ]
    paper = [
        (each.name, each.resolution, each.top1, params[each.name], "the paper's")
        for each in published()
        if each.name.startswith("genet")
    ]
    return [
        (family, name, side, top1, count / 1e6, weights)
        for name, side, top1, count, weights in (*released, *paper)
        for start, family in FAMILIES.items()
        if name.startswith(start)
    ]


def best_within(
    profile: Profile, batch: int, budgets_ms: Sequence[float] = BUDGETS_MS
) -> list[tuple[Row, Estimate]]:
    """Of each family the most accurate one within each budget, the fastest first."""
    timed = [
        (row, estimate_by_name([row[1]], profile, batch, row[2])[0].estimate) for row in rows()
    ]
    best = {}
    for family in FAMILIES.values():
        for budget_ms in budgets_ms:
            fit = [e for e in timed if e[0][0] == family and e[1].ms_per_image <= budget_ms]
            if fit:
                row, time = max(fit, key=lambda each: (each[0][3], -each[1].ms_per_image))
                best[row] = time
    return sorted(best.items(), key=lambda each: each[1].ms_per_image)


def table(profile: Profile, batch: int, budgets_ms: Sequence[float] = BUDGETS_MS) -> list[str]:
    """The rows of Markdown; of several budgets also which networks are on the front."""
    has_front = len(budgets_ms) > 1
    lines = [
        "| family | network, weights | pixels | top-1 % | parameters M | ms an image, 90 % |"
        + has_front * " front |",
        "|---|---|--:|--:|--:|---|" + has_front * "---|",
    ]
    highest = 0.0
    for (family, name, side, top1, params, weights), time in best_within(
        profile, batch, budgets_ms
    ):
        front, highest = "yes" if top1 > highest else "", max(top1, highest)
        lines.append(
            f"| {family} | `{name.removeprefix('timm/')}`, {weights} | {side} | {top1:.1f} "
            f"| {params:.1f} | {time.ms_per_image:.3f}, {time.low:.3f} to {time.high:.3f} |"
            + has_front
            * f" {front} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="rtx4090-compiled", help="a profile or its file")
    parser.add_argument("--call-batch", type=int, default=64)
    parser.add_argument("--budget-ms", type=float, nargs="+", default=BUDGETS_MS)
    words = parser.parse_args()
    print(*table(load_profile(words.target), words.call_batch, words.budget_ms), sep="\n")


if __name__ == "__main__":
    main()
