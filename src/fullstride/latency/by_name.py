"""How long do named networks take? Those of the zoo, of timm, or in the folder of a run.

Names in the package's table of operators need no PyTorch, whose import takes longer than the rest.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fullstride.latency.device_sheets import corrected, read_measured
from fullstride.latency.network_times import Estimate, estimates, is_tie
from fullstride.latency.operator_table import find_operators, own_resolution
from fullstride.latency.profiles import Profile
from fullstride.measure.cost.operators import Operators

if TYPE_CHECKING:
    from fullstride.nets.zoo import NamedNetwork


@dataclass(frozen=True, kw_only=True)
class NamedEstimate:
    """One line of a comparison."""

    network: str
    resolution: int  # pixels a side
    estimate: Estimate
    ties: tuple[int, ...]  # lines, from 0, within the resolvable ratio; itself included


def estimate_by_name(
    networks: "Sequence[str | NamedNetwork]",
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
    work = [named_work(each, resolution, training) for each in networks]
    operators, ran = [each.operators for each in work], [each.ran for each in work]
    times = estimates(operators, profile, [batch] * len(work), training=training, names=ran)
    order = sorted(range(len(work)), key=lambda i: times[i].ms_per_image)
    return [
        NamedEstimate(
            network=work[i].name,
            resolution=work[i].resolution,
            estimate=times[i],
            ties=tuple(line for line, j in enumerate(order) if is_tie(times[i], times[j])),
        )
        for i in order
    ]


def correct(profile: Profile, path: Path) -> Profile:
    """The profile with its times as the measured ones of a CSV file: `device_sheets.corrected`.

    Raises ValueError, in one line with the path.
    """
    measured = read_measured(path)
    keys = [(row.network, row.resolution) for row in measured]
    try:
        by_key = {key: named_work(*key) for key in dict.fromkeys(keys)}
        work = [by_key[key] for key in keys]
        operators, ran = [each.operators for each in work], [each.ran for each in work]
        times = estimates(operators, profile, [row.batch for row in measured], names=ran)
        return corrected(profile, measured, times)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class NamedWork(NamedTuple):
    """What a network runs for one image."""

    name: str
    resolution: int  # pixels a side
    operators: Operators
    ran: frozenset[str]  # ATen's names of the operators, where it has the head of a task


def named_work(
    network: "str | NamedNetwork", resolution: int | None, training: bool = False
) -> NamedWork:
    """By the package's table where it has the name, else traced."""
    if isinstance(network, str):
        side = own_resolution(network) if resolution is None else resolution
        if side is not None and not Path(network).exists():
            operators = find_operators(network, side, training=training)
            if operators is not None:
                return NamedWork(network, side, operators, frozenset())
        from fullstride import tasks

        network = tasks.find_network(network)
    from fullstride.latency.spec_operators import operators_with_names

    side = network.spec.resolution if resolution is None else resolution
    work = operators_with_names(network, side, training=training)
    return NamedWork(network.name, side, *work)


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
