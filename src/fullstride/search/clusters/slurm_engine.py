"""How do trials run as jobs of Slurm? By submitit, which requeues a job when its time is over."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullstride.search.clusters.cluster_executor import Crash, Report, Task

FOLDER = "slurm"  # in that of a study: scripts, logs and pickles of submitit
MOST_REQUEUES = 1000  # of a job whose time is over. A trial goes on each time, so there is no limit


class SlurmEngine:
    """Jobs of Slurm, or processes of this machine for `cluster="local"`, as in tests.

    Jobs go on if the driver ends. A new one submits what has no result; a job that is left from an
    earlier one and a new one for the same trial exclude each other by its lock.

    Raises ValueError in one line if submitit is not installed or there is no Slurm.
    """

    def __init__(
        self,
        folder: Path,
        *,
        gpus: int,
        cores: int,
        hours: float,
        options: Mapping[str, str],
        cluster: str = "slurm",
    ):
        try:
            import submitit
        except ImportError:
            raise ValueError("submitit is not installed: pip install 'fullstride[slurm]'") from None
        requeues: dict[str, Any] = dict(slurm_max_num_timeout=MOST_REQUEUES)
        try:
            self._executor = submitit.AutoExecutor(folder / FOLDER, cluster=cluster, **requeues)
        except RuntimeError:
            raise ValueError(
                "there is no srun, so this is no machine of Slurm: log in on one of the cluster, "
                "or leave out --executor"
            ) from None
        self._executor.update_parameters(
            name="fullstride",
            timeout_min=max(1, round(60 * hours)),
            nodes=1,
            tasks_per_node=1,
            cpus_per_task=cores,
            gpus_per_node=gpus or None,
            slurm_additional_parameters=dict(options) or None,
        )

    def start(self, tasks: Sequence[Task]) -> Sequence[Any]:
        with self._executor.batch():  # one array of jobs
            return [self._executor.submit(RequeuedTask(task)) for task in tasks]

    def outcome(self, job: Any) -> Report | Crash | None:
        if not job.done():
            return None
        from submitit.core.utils import FailedJobError, UncompletedJobError

        state = job.state
        try:
            return job.result()
        except FailedJobError as error:  # before the trial began
            return Report(error=str(error).strip().splitlines()[-1][:300])
        except UncompletedJobError:
            return Crash(how=f"in the state {state} of job {job.job_id}")

    def stop(self, job: Any) -> None:
        job.cancel(check=False)


class RequeuedTask:
    """A task that is the same one when Slurm takes its machine away: the trial has checkpoints."""

    def __init__(self, task: Task):
        self.task = task

    def __call__(self) -> Report:
        return self.task()

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
