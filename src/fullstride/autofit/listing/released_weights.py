"""Which released weights are in reach? Those of the package's table, and others by their names."""

from collections.abc import Iterable, Iterator, Sequence

from fullstride.autofit.listing.starts import RGB, Start, family_of
from fullstride.nets import zoo
from fullstride.nets.weights import hub
from fullstride.tables import PretrainedNetwork, pretrained_networks

# Tags of weights that are better to begin with than more accurate ones of the same network: the
# latter were trained on for ImageNet-1k (PaddleClas's documentation of HGNetV2).
BETTER_STARTS = ("ssld_stage1_in22k_in1k",)


def listed(names: Sequence[str] = ()) -> list[Start]:
    """The weights of the table, or those of `names` alone, whether these are in the table or not.

    Names without released weights are left out.
    """
    rows = pretrained_networks()
    if not names:
        return [of_rows(group) for group in by_weights(rows)]
    starts = []
    for name in names:
        own = [group for group in by_weights(rows) if name in (group[0].name, group[0].weights)]
        starts += [of_rows(group) for group in own] or unlisted(name)
    return starts


def by_weights(rows: Iterable[PretrainedNetwork]) -> Iterable[list[PretrainedNetwork]]:
    """The rows of each of the weights, which differ by the resolution of top-1."""
    groups: dict[str, list[PretrainedNetwork]] = {}
    for row in rows:
        groups.setdefault(row.weights, []).append(row)
    return groups.values()


def of_rows(rows: Sequence[PretrainedNetwork]) -> Start:
    row = rows[0]
    ours = not row.name.startswith("timm/")
    is_default = ours and hub.HUB[row.name].partition(".")[2] == row.tag
    return Start(
        label=row.weights,
        model=row.name if ours else row.weights,
        weights=row.weights if ours and not is_default else "hub",
        family=row.family,
        trained_at=row.trained_at,
        params=row.params,
        top1={row.resolution: row.top1 for row in rows},
        licence=row.licence,
    )


def unlisted(name: str) -> list[Start]:
    """The released weights of a name that is not in the table; empty for none."""
    if zoo.is_spec_file(name):
        return []
    try:
        config = hub.hub_config(hub.timm_name(name))
    except ValueError:
        return []
    model = without_tag(name)
    return [
        Start(
            label=name,
            model=model,
            weights="hub" if model == name else name,
            family=family_of(model, zoo.spec(model)),
            trained_at=config.input_size[1],
            channels=RGB,
            licence=config.license or "",
        )
    ]


def without_tag(name: str) -> str:
    """The network of `NAME.TAG`, where it is one of the zoo; other names as they are."""
    network = name.partition(".")[0]
    return network if network in hub.HUB else name


def best_starts(starts: Iterable[Start], most: int) -> Iterator[Start]:
    """Of each network and resolution of training the best weights to begin with.

    Weights for images of more than `most` pixels a side only where the network has no others.
    """

    def quality(start: Start) -> tuple[bool, float]:
        return start.label.partition(".")[2] in BETTER_STARTS, max(start.top1.values(), default=0)

    networks: dict[str, dict[int, list[Start]]] = {}
    for start in starts:
        sides = networks.setdefault(start.model.partition(".")[0], {})
        sides.setdefault(start.trained_at, []).append(start)
    for sides in networks.values():
        suitable = [side for side in sides if side <= most] or [min(sides)]
        yield from (max(sides[side], key=quality) for side in suitable)


def cached(starts: Iterable[Start]) -> Iterator[Start]:
    """Those whose weights are in the local cache of the hub."""
    for start in starts:
        try:
            is_cached = hub.is_cached(start.label)
        except ValueError:  # an earlier timm does not list them
            continue
        if is_cached:
            yield start
