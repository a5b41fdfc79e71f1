"""The options of a study that change none of its results: where and how its trainings run."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fullstride.io.records import Bounds, check_bounds


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Where a study runs, and how far. Each call for the same folder may have other ones."""

    # Where networks are trained: cpu, cuda, cuda:1, or auto. On Ray or Slurm cpu, or cuda for one
    # GPU of each training.
    device: str = "auto"
    # Processes that decode images beside this one; None: by the cores and the images.
    workers: int | None = None
    # End with the plan and its total, before anything is trained.
    dry_run: bool = False
    # Where trainings run: local, on this machine; ray, on the running Ray cluster; or slurm, as its
    # jobs. All machines must see the files of this one.
    executor: Literal["local", "ray", "slurm"] = "local"
    # CPU cores of each training on Ray or Slurm.
    trial_cores: Annotated[int, Bounds(ge=1, le=1024)] = 2
    # Hours that Slurm gives a job, which goes on in another one if it has not ended by then.
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
