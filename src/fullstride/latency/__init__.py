"""Predicts how long networks take on devices that are not here: operators, profiles, estimates.

Names are imported on first use: a choice among networks whose operators the package has needs no
PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullstride.latency.devices import load_profile, profile_names
    from fullstride.latency.estimator import Estimator, estimate
    from fullstride.latency.network_times import Estimate, estimates, is_tie
    from fullstride.latency.profiles import Profile, save_profile
    from fullstride.latency.spec_operators import operators_of
    from fullstride.measure.operators import Operators
    from fullstride.measure.tracer import traced

MODULES = {
    "Estimate": "fullstride.latency.network_times",
    "Estimator": "fullstride.latency.estimator",
    "Operators": "fullstride.measure.operators",
    "Profile": "fullstride.latency.profiles",
    "estimate": "fullstride.latency.estimator",
    "estimates": "fullstride.latency.network_times",
    "is_tie": "fullstride.latency.network_times",
    "load_profile": "fullstride.latency.devices",
    "operators_of": "fullstride.latency.spec_operators",
    "profile_names": "fullstride.latency.devices",
    "save_profile": "fullstride.latency.profiles",
    "traced": "fullstride.measure.tracer",
}


__all__ = [
    "Estimate",
    "Estimator",
    "Operators",
    "Profile",
    "estimate",
    "estimates",
    "is_tie",
    "load_profile",
    "operators_of",
    "profile_names",
    "save_profile",
    "traced",
]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"{__name__} has no {name!r}: it has {', '.join(MODULES)}")
    return getattr(import_module(MODULES[name]), name)
