"""Does the fused part earn its place? Its thresholds, stated before any GPU measured them.

docs/internals/fused.md has the same table, and what is removed when a claim fails.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from gpu_parts.settings import Results


class Claim(NamedTuple):
    name: str
    threshold: str
    measured: Callable[[Results, Results], tuple[str, bool]]  # of speed and batches


def rates(speed: Results, name: str = "tresnet_m, training") -> Mapping[str, float]:
    return speed[name]["images_per_s"]


def eager(speed: Results, batches: Results) -> tuple[str, bool]:
    faster = rates(speed)["fused"] / rates(speed)["timm eager"]
    larger = batch(batches, "fused") / batch(batches, "timm eager")
    return f"{faster:.2f}x speed, {larger:.2f}x batch", faster >= 1.1 or larger >= 1.8


def compiled(speed: Results, _: Results) -> tuple[str, bool]:
    faster = rates(speed)["fused compiled"] / rates(speed)["plain compiled"]
    peaks = speed["tresnet_m, training"]["peak_memory_mib"]
    lower = 1 - peaks["fused compiled"] / peaks["plain compiled"]
    return f"{faster - 1:+.1%} speed, {-lower:+.1%} peak memory", faster >= 1.05 or lower >= 0.1


def int8(speed: Results, batches: Results) -> tuple[str, bool]:
    larger = batch(batches, "int8") / batch(batches, "fused compiled")
    slower = rates(speed)["fused compiled"] / rates(speed)["int8"]
    passes = larger >= 1.2 and slower <= 1.05
    return f"{larger - 1:+.1%} batch, {slower - 1:+.1%} time", passes


def padding(speed: Results, _: Results) -> tuple[str, bool]:
    images_per_s = rates(speed, "tresnet_l, training padded")
    padded = max(rate for name, rate in images_per_s.items() if name.endswith("padded"))
    other = max(rate for name, rate in images_per_s.items() if not name.endswith("padded"))
    return f"{padded / other - 1:+.1%} speed", padded / other >= 1.03


def batch(batches: Results, form: str) -> int:
    return batches[f"tresnet_m, {form}"]["largest_batch"]


CLAIMS = (
    Claim("eager fused", ">= 1.1x the speed of timm eager, or >= 1.8x its batch", eager),
    Claim("compiled fused", ">= 5 % faster than plain compiled, or >= 10 % lower peak", compiled),
    Claim("int8 activations", ">= 20 % more batch for <= 5 % more time", int8),
    Claim("padding", ">= 3 % faster for TResNet-L", padding),
)


def verdicts(speed: Results, batches: Results) -> Iterator[tuple[Claim, str, bool | None]]:
    """Each claim, what was measured, and whether it passes: None where a result is missing."""
    for claim in CLAIMS:
        try:
            yield claim, *claim.measured(speed, batches)
        except (KeyError, TypeError):  # a missing result, or a peak of None on a CPU
            yield claim, "", None
