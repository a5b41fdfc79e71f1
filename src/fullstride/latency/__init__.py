"""How long will it take, where nobody has timed it? Estimates from a network's operators and a profile of a device."""

from fullstride.latency.profiles import (
    Estimate,
    Profile,
    estimate,
    estimates,
    load_profile,
    profile_names,
    save_profile,
    tie,
)
from fullstride.latency.spec_operators import Estimator, operators_of
from fullstride.measure.cost.operators import Operators, traced

__all__ = [
    "Estimate",
    "Estimator",
    "Operators",
    "Profile",
    "estimate",
    "estimates",
    "load_profile",
    "operators_of",
    "profile_names",
    "save_profile",
    "tie",
    "traced",
]
