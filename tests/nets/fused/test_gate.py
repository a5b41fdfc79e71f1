"""The gate of docs/internals/fused.md decides by its thresholds."""

from pathlib import Path

import pytest
from gpu_parts import gate

ROOT = Path(__file__).parents[3]

RATES = {
    "timm eager": 100.0,
    "fused": 111.0,
    "plain compiled": 200.0,
    "fused compiled": 205.0,
    "int8": 196.0,
}
PEAKS = {"plain compiled": 1000.0, "fused compiled": 890.0}
PADDED = {"plain": 100.0, "plain padded": 104.0, "fused": 90.0, "fused padded": 80.0}
BATCHES = {"timm eager": 400, "fused": 600, "fused compiled": 1000, "int8": 1210}


def verdicts(
    rates: dict[str, float], peaks: dict[str, float], batches: dict[str, int]
) -> list[bool]:
    speed = {
        "tresnet_m, training": {"images_per_s": rates, "peak_memory_mib": peaks},
        "tresnet_l, training padded": {"images_per_s": PADDED},
    }
    sizes = {f"tresnet_m, {name}": {"largest_batch": size} for name, size in batches.items()}
    return [passes is True for _, _, passes in gate.verdicts(speed, sizes)]


@pytest.mark.parametrize(
    ("rates", "peaks", "batches", "passes"),
    [
        ({}, {}, {}, [True, True, True, True]),
        ({"fused": 109.0}, {}, {}, [False, True, True, True]),
        ({"fused": 109.0}, {}, {"fused": 720}, [True, True, True, True]),
        ({}, {"fused compiled": 910.0}, {}, [True, False, True, True]),
        (
            {"fused compiled": 210.0},
            {"fused compiled": 910.0},
            {},
            [True, True, False, True],
        ),
        ({}, {}, {"int8": 1190}, [True, True, False, True]),
    ],
)
def test_a_claim_passes_by_its_thresholds(rates, peaks, batches, passes):
    assert verdicts(RATES | rates, PEAKS | peaks, BATCHES | batches) == passes


def test_what_was_not_measured_is_no_verdict():
    assert [row[1:] for row in gate.verdicts({}, {})] == [("", None)] * len(gate.CLAIMS)


def test_the_page_states_every_claim_with_its_threshold():
    page = (ROOT / "docs/internals/fused.md").read_text()
    for claim in gate.CLAIMS:
        assert f"| {claim.name} | {claim.threshold} |" in page
