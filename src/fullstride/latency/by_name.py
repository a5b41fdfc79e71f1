"""How long do named networks take? Those of the zoo, of timm, or in the folder of a run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fullstride.latency.network_times import Estimate, estimates, is_tie
from fullstride.latency.profiles import Profile
from fullstride.latency.spec_operators import operators_with_names
from fullstride.nets import zoo


@dataclass(frozen=True, kw_only=True)
class NamedEstimate:
    """One line of a comparison."""

    network: str
    resolution: int  # pixels a side
    estimate: Estimate
    ties: tuple[int, ...]  # lines, from 0, within the resolvable ratio; itself included


def estimate_by_name(
    networks: Sequence[str | zoo.NamedNetwork],
    profile: Profile,
    batch: int = 1,
    resolution: int | None = None,
    *,
    training: bool = False,
) -> list[NamedEstimate]:
    """The times of networks, which may be named, on the device of `profile`, the fastest first.

    `resolution` is by default each network's own. With `training` they are times of a training
    step, where the profile has them. Raises ValueError, in one line, for an unknown name.
    """
    if not networks:
        raise ValueError("nothing to estimate: name one or more networks or runs")
    named = [zoo.find_network(each) if isinstance(each, str) else each for each in networks]
    sides = [each.spec.resolution if resolution is None else resolution for each in named]
    work = [
        operators_with_names(each, side, training=training)
        for each, side in zip(named, sides, strict=True)
    ]
    operators, ran = [each for each, _ in work], [each for _, each in work]
    batches = [batch] * len(named)
    times = estimates(operators, profile, batches, training=training, names=ran)
    order = sorted(range(len(named)), key=lambda i: times[i].ms_per_image)
    return [
        NamedEstimate(
            network=named[i].name,
            resolution=sides[i],
            estimate=times[i],
            ties=tuple(line for line, j in enumerate(order) if is_tie(times[i], times[j])),
        )
        for i in order
    ]


def estimates_json(rows: Sequence[NamedEstimate], profile: Profile) -> dict[str, Any]:
    """The profile and a row for each network, ready for JSON."""
    return dict(
        profile=profile.to_dict(),
        estimates=[
            dict(
                network=row.network,
                resolution=row.resolution,
                images_per_s=row.estimate.images_per_s,
                **{key: value for key, value in asdict(row.estimate).items() if key != "unfitted"},
                ties=[rows[line].network for line in row.ties if line != number],
                not_fitted_on=row.estimate.unfitted,
            )
            for number, row in enumerate(rows)
        ],
    )
