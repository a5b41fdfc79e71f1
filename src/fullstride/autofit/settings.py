"""The settings of a fit: the budget, the target, and the networks and files to try."""

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
    """The budget and the options of a fit. Once it trains, it resumes with the same ones only."""

    # The time that a call may take, divided by its images, in ms; several budgets get a file each.
    # With --hours alone the whole front gets files: from the fastest network to the slowest that
    # can be trained in a quarter of the hours.
    budget_ms: tuple[Positive, ...] = ()
    # The task of the network; by default the task of the data's files.
    task: str = ""
    # The percentile of the measured times of calls that the budget bounds: 50 is the median.
    percentile: Percentile = 50
    # On a device that is not here, accept networks whose estimate fits, even if the upper end of
    # its interval does not.
    maybe: bool = False
    # Hours that the whole may take; by default the finalists train by their whole recipe.
    hours: Positive | None = None
    # As --hours; the two add up.
    minutes: Positive | None = None
    # Initial weights: hub, for released weights in the hub's cache or on the hub; a folder of files
    # of weights; hf:USER/NAME, a bundle on the hub; or none, for random weights.
    weights: str = "hub"
    # Licences of weights that may be used; permissive also leaves out weights of unknown licence.
    licence: Annotated[Licence, arg(aliases=["--license"])] = "permissive"
    # Networks to try in place of the default ones: names, or JSON files of specs.
    candidates: tuple[str, ...] = ()
    # Pixels a side to try for each network; by default two or three that suit it and the images.
    resolutions: tuple[Annotated[int, Bounds(ge=8, le=1024)], ...] = ()
    # Formats that may ship; by default all formats that run here and are no programs.
    formats: tuple[str, ...] = ()
    # Precisions that may ship; by default all precisions of the formats.
    precisions: tuple[Precision, ...] = ()
    # Leave out training images that show the same as scored images, and images that are in two
    # classes.
    drop_duplicates: bool = False

    def __post_init__(self) -> None:
        for name in ("budget_ms", "candidates", "resolutions", "formats", "precisions"):
            value: Any = getattr(self, name)  # in Python it may be a single value, a list or None
            if not isinstance(value, tuple):
                values = value if isinstance(value, list) else () if value is None else (value,)
                object.__setattr__(self, name, tuple(values))
        super().__post_init__()
        find_budget(next(iter(self.budget_ms), None), self.images_per_s, self.call_batch)

    def budgets(self) -> tuple[Budget, ...]:
        """The limits of the time of a call, the largest first; () with hours alone.

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
        """The hours that the whole may take; None: no limit."""
        seconds = time_limit_s(self.hours, self.minutes)
        return seconds and seconds / 3600

    @property
    def source_of_weights(self) -> str:
        """The argument of `list_candidates`: "" for random weights."""
        return "" if self.weights == NO_WEIGHTS else self.weights
