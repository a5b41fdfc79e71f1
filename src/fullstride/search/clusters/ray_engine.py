"""How do trials run on a Ray cluster? As its core tasks; Ray chooses machines and GPUs."""

import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from fullstride.search.clusters.cluster_executor import Crash, Report, Task

RETRIES = 3  # of a task whose process or machine is lost
CONNECT_S = 10.0


class RayEngine:
    """Tasks of the Ray cluster that RAY_ADDRESS names, or of the one that runs on this machine.

    Ray pickles tasks between its own processes. Its state is not needed to go on: a new driver
    starts the trials that have no result.

    Raises ValueError in one line if Ray is not installed or there is no cluster.
    """

    def __init__(self, gpus: int, cores: int):
        try:
            import ray
        except ImportError:
            raise ValueError(
                "Ray is not installed: pip install 'fullstride[cluster]', on all machines"
            ) from None
        if not ray.is_initialized():
            try:
                _check_address(os.environ.get("RAY_ADDRESS", ""))
                ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ValueError(
                    "no Ray cluster could be reached: start one by `ray start --head`, and name "
                    f"that of another machine by RAY_ADDRESS=HOST:6379 ({reason})"
                ) from None
        self._ray = ray
        self._remote = ray.remote(
            num_gpus=gpus, num_cpus=cores, max_retries=RETRIES, scheduling_strategy="SPREAD"
        )(_run)

    def start(self, tasks: Sequence[Task]) -> Sequence[Any]:
        return [self._remote.options(name=task.trial.name).remote(task) for task in tasks]

    def outcome(self, job: Any) -> Report | Crash | None:
        ready, _ = self._ray.wait([job], timeout=0)
        if not ready:
            return None
        from ray.exceptions import RayError, RayTaskError

        try:
            return self._ray.get(job)
        except RayTaskError as error:  # before the trial began, as where a module is missing
            return Report(error=_line(error.cause))
        except RayError as error:
            return Crash(how=f"by {_line(error)}", starts=1 + RETRIES)

    def stop(self, job: Any) -> None:
        self._ray.cancel(job, force=True)


def _check_address(address: str) -> None:
    """Raise OSError for the address of a machine that does not answer: Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), CONNECT_S).close()


def _run(task: Task) -> Report:
    return task()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
