"""How long does a network take on a device that is not here? Operators, profiles, estimates."""

from fullstride.latency.estimator import Estimate, Estimator, estimate, estimates, is_tie
from fullstride.latency.profiles import Profile, load_profile, profile_names, save_profile
from fullstride.latency.spec_operators import operators_of
from fullstride.measure.cost.operators import Operators, traced

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
