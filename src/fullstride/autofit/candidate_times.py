"""How long does each candidate take, as the file that would ship?"""

from dataclasses import dataclass

from fullstride.deploy.exported import Precision


@dataclass(frozen=True, kw_only=True)
class CandidateTime:
    """Of one candidate in one format and precision, ms per image at the batch of the budget."""

    candidate: str  # its name
    format: str  # "" where the time is an estimate for a device that is not here
    precision: Precision
    ms: float | None  # None: it could not be exported or does not run
    low: float | None = None  # enclose nine of ten such networks, or the rounds of a measurement
    high: float | None = None
    measured: bool = True
    failure: str = ""  # why there is no time, in one line
