"""The settings of a fit: the budget, where it holds, and what may be tried."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import arg

from fullstride.io.records import Bounds, Positive
from fullstride.measure.budget import Budget, find_budget, required_budget, time_limit_s
from fullstride.nets.efficiency import Precision
from fullstride.study.settings import TargetSettings

NO_WEIGHTS = "none"
Percentile = Literal[50, 90, 95, 99]
Licence = Literal["permissive", "any"]


@dataclass(frozen=True, kw_only=True)
class FitSettings(TargetSettings):
    """What a fit may take and try. One that has begun to train is resumed with the same only."""

    # The time that a call may take, divided by its images, in ms. Of several each gets a file. With
    # --hours alone the whole front does: files from the fastest network to the slowest that can be
    # trained in a quarter of that.
    budget_ms: tuple[Positive, ...] = ()
    # What the network is for; by default what the files of the data are for.
    task: str = ""
    # Which of the measured times of a call the budget bounds: 50 is the median.
    percentile: Percentile = 50
    # On a device that is not here, accept networks whose estimate fits, though the upper end of
    # its interval does not.
    maybe: bool = False
    # Hours that the whole may take; by default the finalists train as long as their recipe says.
    hours: Positive | None = None
    # As --hours; the two add up.
    minutes: Positive | None = None
    # Where networks begin: hub, for released weights in the hub's cache or on the hub; a folder of
    # files of weights; hf:USER/NAME, a bundle on the hub; or none, for random weights.
    weights: str = "hub"
    # Licences of weights that may be used; permissive leaves out those of unknown licence too.
    licence: Annotated[Licence, arg(aliases=["--license"])] = "permissive"
    # Networks to try in place of those that are listed: names, or JSON files of specs.
    candidates: tuple[str, ...] = ()
    # Pixels a side to try each network at; by default two or three that suit it and the images.
    resolutions: tuple[Annotated[int, Bounds(ge=8, le=1024)], ...] = ()
    # Formats that may ship; by default those that run here and are no programs.
    formats: tuple[str, ...] = ()
    # Precisions that may ship; by default those of the formats.
    precisions: tuple[Precision, ...] = ()
    # Leave out training images that show the same as images that networks are scored on, and
    # images that are in two classes.
    drop_duplicates: bool = False

    def __post_init__(self) -> None:
        limits: Any = self.budget_ms  # in Python it may be a number, a list or None too
        if not isinstance(limits, tuple):
            values = limits if isinstance(limits, list) else () if limits is None else (limits,)
            object.__setattr__(self, "budget_ms", tuple(values))
        super().__post_init__()
        find_budget(next(iter(self.budget_ms), None), self.images_per_s, self.call_batch)

    def budgets(self) -> tuple[Budget, ...]:
        """The limits of the time of a call, the largest first; () where hours alone limit it.

        Raises ValueError without any limit.
        """
        if not self.budget_ms and self.images_per_s is None:
            if self.limit_hours is None:
                raise ValueError(
                    "no budget: give --budget-ms, the ms that an image may take, or --hours alone "
                    "for files from fast to accurate"
                )
            return ()
        return tuple(
            required_budget(ms, self.images_per_s, self.call_batch)
            for ms in sorted({*self.budget_ms}, reverse=True) or (None,)
        )

    @property
    def limit_hours(self) -> float | None:
        """The hours that the whole may take; None: without a limit."""
        seconds = time_limit_s(self.hours, self.minutes)
        return seconds and seconds / 3600

    @property
    def source_of_weights(self) -> str:
        """As `list_candidates` takes it: "" for random weights."""
        return "" if self.weights == NO_WEIGHTS else self.weights
