"""The options of a study: the budget and the target, and where and how trainings run."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fullstride.io.records import Bounds, Positive, check_bounds
from fullstride.measure.budget import (
    HERE,
    MOST_IMAGES,
    Budget,
    find_budget,
    is_elsewhere,
    required_budget,
)


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """Where a network must stay within the budget."""

    # The budget as a rate instead of a time.
    images_per_s: Positive | None = None
    # Images of a call.
    call_batch: Annotated[int, Bounds(ge=1, le=MOST_IMAGES)] = 1
    # Where the network will run: here, where times are measured; a profile such as rtx4090 or a
    # file from `measure calibrate`, by which times are estimated; for fit also another machine, as
    # ssh://HOST or a command that runs a Python there, where times are measured.
    target: str = HERE

    def __post_init__(self) -> None:
        check_bounds(self, "--")

    @property
    def is_here(self) -> bool:
        """Whether times are measured on this machine."""
        return self.target == HERE

    @property
    def is_measured(self) -> bool:
        """Whether times are measured, on this or another machine."""
        return self.is_here or is_elsewhere(self.target)


@dataclass(frozen=True, kw_only=True)
class BudgetSettings(TargetSettings):
    """The time that a network may take, and where."""

    # The time that a call may take, divided by its images, in ms.
    budget_ms: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        find_budget(self.budget_ms, self.images_per_s)

    def budget(self) -> Budget:
        """The limit of the time of a call. Raises ValueError if there is none."""
        return required_budget(self.budget_ms, self.images_per_s, self.call_batch)

    @property
    def limit_ms(self) -> float | None:
        """The ms that an image may take; None without a budget."""
        budget = find_budget(self.budget_ms, self.images_per_s)
        return budget and budget.ms_per_image


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Where a study runs, and how far. They may differ between calls for the same folder."""

    # Where networks are trained: cpu, cuda, cuda:1, or auto. On Ray or Slurm cpu, or cuda for one
    # GPU of each training.
    device: str = "auto"
    # Processes that decode images beside this one; None: by the cores and the images.
    workers: int | None = None
    # End with the plan and its total time, before anything is trained.
    dry_run: bool = False
    # Where trainings run: local, on this machine; ray, on the running Ray cluster; or slurm, as
    # Slurm jobs. All machines must see the files of this machine.
    executor: Literal["local", "ray", "slurm"] = "local"
    # CPU cores of each training on Ray or Slurm.
    trial_cores: Annotated[int, Bounds(ge=1, le=1024)] = 2
    # Hours of a Slurm job; a training that needs more time resumes in another job.
    slurm_hours: Annotated[float, Bounds(ge=0.1, le=1000)] = 4
    # Further options of sbatch, such as partition=gpu account=vision.
    slurm_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_bounds(self, "--")
        for option in self.slurm_options:
            name, _, value = option.partition("=")
            if not name or not value or name.startswith("-"):
                raise ValueError(f"--slurm-options {option!r}: use NAME=VALUE, as partition=gpu")
        if self.slurm_options and self.executor != "slurm":
            raise ValueError(f"--slurm-options are for --executor slurm, not {self.executor}")
