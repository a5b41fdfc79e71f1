"""Which ConvNets have released ImageNet weights? Writes `tables/pretrained.csv` of the package.

    python benchmarks/pretrained_table.py results-imagenet.csv --source "timm results at aa4b585"

The CSV file is timm's own: top-1 of every network with ImageNet-1k weights, at one or two
resolutions. Licences, resolutions of training and the names on the hub are those of the installed
timm, and parameters are counted. Only facts are copied.

About 300 rows are kept:

- networks without attention (by their operators), of the families below, up to 205 million
  parameters and 456 pixels a side
- of each architecture and resolution of training the most accurate permissive weights; others if
  these are more accurate still
- no row that another one with permissive weights beats by 1.5 points with no more parameters,
  multiply-adds or activations. The weights that the zoo's own names stand for, and some families
  that are in use everywhere, are kept.

New architectures need `python benchmarks/write_operator_table.py` afterwards.
"""

import argparse
import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import timm
import torch

from fullstride import tables
from fullstride.io.writing import Output, atomic_write, begins_with
from fullstride.latency.devices import find_operators
from fullstride.latency.estimator import operators_of
from fullstride.measure.operators import KIND, Operators
from fullstride.nets.timm_wrapper import timm_spec
from fullstride.nets.weights.hub import HUB
from fullstride.tables import PretrainedNetwork

PATH = Path(tables.__file__).with_name(tables.PRETRAINED)
OUTPUT = Output("the table of released weights", ".csv", begins_with(b"name,tag,family"))

# Family -> the names of timm's architectures. The first one that matches counts.
FAMILIES = {
    "tresnet": r"tresnet_",
    "genet": r"gernet_",
    "resnet_rs": r"resnetrs\d",
    "hgnet": r"hgnet(v2)?_",
    "convnext": r"convnext_",
    "convnextv2": r"convnextv2_",
    "regnet": r"regnet[xy]_",
    "regnetz": r"regnet[zv]_",
    "efficientnet_lite": r"tf_efficientnet_lite",
    "efficientnetv2": r"(tf_)?efficientnetv2_",
    "efficientnet": r"(tf_)?efficientnet_(b\d|el|em|es|x)|tinynet_",
    "mobilenetv1": r"mobilenetv1_",
    "mobilenetv2": r"mobilenetv2_",
    "mobilenetv3": r"(tf_)?mobilenetv3_|lcnet_",
    "mobilenetv4": r"mobilenetv4_conv_",
    "mobilenet_edgetpu": r"mobilenet_edgetpu_",
    "mnasnet": r"mnasnet_|semnasnet_|fbnetc_|fbnetv3_|spnasnet_|hardcorenas_",
    "mixnet": r"(tf_)?mixnet_",
    "resnext": r"(se)?resnext",
    "seresnet": r"seresnet",
    "resnet_d": r"resnet\d+[dst]|ecaresnet|resnetaa\d+d",
    "resnet": r"resnet\d+(_gn)?$|resnetaa\d+$|resnetblur|wide_resnet",
    "rexnet": r"rexnetr?_",
    "repvgg": r"repvgg_",
    "repvit": r"repvit_",
    "mobileone": r"mobileone_",
    "fastvit": r"fastvit_[ts]\d",
    "ghostnet": r"ghostnet",
    "inception_next": r"inception_next_",
    "fasternet": r"fasternet_",
    "starnet": r"starnet_",
    "vovnet": r"ese_vovnet",
}
KEPT_FAMILIES = (
    *("tresnet", "genet", "resnet_rs"),
    *("efficientnet_lite", "mobilenetv2", "repvgg", "mobileone"),
)
MARGIN = 1.5  # points of top-1
MAX_PARAMS, MIN_SIDE, MAX_SIDE, MIN_TOP1 = 205e6, 128, 456, 50.0
OURS = {weights: name for name, weights in HUB.items()}


@dataclass(frozen=True)
class Cost:
    """What a network computes and holds for one image; less of all is better."""

    params: int
    macs: float
    elements: float  # of activations, read and written

    def at_most(self, other: "Cost") -> bool:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)


@cache
def count_params(architecture: str) -> int:
    with torch.device("meta"):
        net = timm.create_model(architecture)
    return sum(parameter.numel() for parameter in net.parameters())


@cache
def operators(architecture: str, side: int) -> Operators:
    name = f"timm/{architecture}"
    return find_operators(name, side) or operators_of(timm_spec(architecture), side)


def row_cost(row: PretrainedNetwork, architecture: str) -> Cost:
    rows = operators(architecture, row.resolution)
    elements = float(((rows.read + rows.written) * rows.count).sum())
    return Cost(row.params, float((rows.macs * rows.count).sum()), elements)


def family_of(architecture: str) -> str:
    names = (name for name, pattern in FAMILIES.items() if re.match(pattern, architecture))
    return next(names, "")


def own_name(architecture: str) -> str:
    """As `zoo.create` takes it."""
    ours = (name for weights, name in OURS.items() if weights.split(".")[0] == architecture)
    return next(ours, f"timm/{architecture}")


def read_rows(results: Path, source: str) -> Iterator[tuple[str, PretrainedNetwork]]:
    """Architecture and row of each network that may be in the table."""
    for line in csv.DictReader(results.read_text().splitlines()):
        name, side, top1 = line["model"], int(line["img_size"]), float(line["top1"])
        architecture, _, tag = name.partition(".")
        family = family_of(architecture)
        if not (family and timm.is_model(architecture) and top1 >= MIN_TOP1):
            continue
        config = timm.get_pretrained_cfg(name)
        if not config or config.hf_hub_id != f"timm/{name}":
            continue
        if not MIN_SIDE <= side <= MAX_SIDE or count_params(architecture) > MAX_PARAMS:
            continue
        if (operators(architecture, side).kind == KIND["product"]).any():
            continue
        yield (
            architecture,
            PretrainedNetwork(
                name=own_name(architecture),
                tag=tag,
                family=family,
                resolution=side,
                trained_at=config.input_size[1],
                crop=float(line["crop_pct"]),
                top1=top1,
                params=count_params(architecture),
                licence=config.license,
                source=source,
            ),
        )


def most_accurate(rows: Sequence[tuple[str, PretrainedNetwork]]) -> Iterator[tuple[str, ...]]:
    """Architecture and tag of the best weights of each architecture and resolution of training."""
    groups: dict[tuple[str, int], list[PretrainedNetwork]] = defaultdict(list)
    for architecture, row in rows:
        groups[architecture, row.trained_at].append(row)
    for (architecture, _), group in groups.items():
        free = [row for row in group if row.is_permissive]
        best = max(group, key=lambda row: row.top1)
        for row in {best, max(free, key=lambda row: row.top1)} if free else {best}:
            yield architecture, row.tag
        # Of HGNetV2 the weights of the first stage of distillation are the better ones to
        # fine-tune, says PaddleClas's documentation.
        yield from ((architecture, row.tag) for row in group if row.tag.startswith("ssld_stage1"))


def select(rows: Sequence[tuple[str, PretrainedNetwork]]) -> list[PretrainedNetwork]:
    named = {tuple(weights.split(".", 1)) for weights in HUB.values()}
    chosen = {*most_accurate(rows), *named}
    rows = [(name, row) for name, row in rows if (name, row.tag) in chosen]
    costs = {row: row_cost(row, name) for name, row in rows}

    def is_beaten(row: PretrainedNetwork) -> bool:
        return any(
            other.is_permissive
            and other.top1 >= row.top1 + MARGIN
            and costs[other].at_most(costs[row])
            for other in costs
        )

    kept = [
        row
        for name, row in rows
        if row.family in KEPT_FAMILIES or (name, row.tag) in named or not is_beaten(row)
    ]
    return sorted(kept, key=lambda row: (row.family, row.params, row.weights, row.resolution))


def write(rows: Iterable[PretrainedNetwork]) -> None:
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(PretrainedNetwork._fields)
    lines.writerows(rows)
    with atomic_write(PATH, OUTPUT) as temporary:
        temporary.write_text(text.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tables/pretrained.csv of the package.")
    parser.add_argument("results", type=Path, help="timm's results-imagenet.csv")
    parser.add_argument("--source", required=True, help="where the file is from")
    given = parser.parse_args()
    rows = select(list(read_rows(given.results, given.source)))
    write(rows)
    tags, permissive = {row.weights for row in rows}, sum(row.is_permissive for row in rows)
    print(f"{PATH}: {len(rows)} rows, {len(tags)} weights, {permissive} permissive rows")


if __name__ == "__main__":
    main()
