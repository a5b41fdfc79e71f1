"""Which executor runs the trials of a study? The one that the user names."""

from pathlib import Path

from fullstride.search.clusters.cluster_executor import ClusterExecutor
from fullstride.search.clusters.ray_engine import RayEngine
from fullstride.search.clusters.settings import ExecutorSettings
from fullstride.search.clusters.slurm_engine import SlurmEngine
from fullstride.search.trials import Executor, LocalExecutor, local_devices


def find_executor(settings: ExecutorSettings, folder: Path, train_device: str = "auto") -> Executor:
    """Where the trials of the study in `folder` run.

    Args:
        settings: From the command line.
        folder: Of the study, where Slurm's scripts and logs are stored.
        train_device: Of the trials. On a cluster cpu, or one GPU for each trial otherwise.

    Raises ValueError, in one line, for a device that is not here, without a cluster or without the
    package that its extra installs.
    """
    if settings.executor == "local":
        return LocalExecutor(local_devices(train_device))
    if train_device not in ("auto", "cuda", "cpu"):
        raise ValueError(
            f"--train-device {train_device} on a cluster, which chooses a free GPU for each trial: "
            "use cuda or cpu"
        )
    gpus, cores = int(train_device != "cpu"), settings.trial_cores
    if settings.executor == "ray":
        engine = RayEngine(gpus, cores)
    else:
        options = dict(option.split("=", 1) for option in settings.slurm_options)
        hours = settings.slurm_hours
        engine = SlurmEngine(folder, gpus=gpus, cores=cores, hours=hours, options=options)
    return ClusterExecutor(engine, "cuda:0" if gpus else "cpu", cores)
