"""How long do networks take on this machine? A few are measured, and a profile is fitted to them.

The profile is for networks like the measured ones, so it needs a dozen times and no
microbenchmarks; estimates by it then follow what the runtime does with these very blocks.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep

import numpy as np
import torch

from fullstride.deploy.exported import ExportedModel
from fullstride.deploy.select import (
    Label,
    measure_files,
    quickly_written,
    runnable,
)
from fullstride.deploy.untrained import untrained_files
from fullstride.latency.profiles import Fit, Profile
from fullstride.latency.roofline import Machine, Runtime, prepare, times
from fullstride.latency.rough_profiles import profile_here
from fullstride.latency.spec_operators import operators_of
from fullstride.measure.bench import bench
from fullstride.measure.call_times import MEDIANS, CallTime, quiet_times
from fullstride.measure.environment import Environment, choose_device
from fullstride.measure.protocols import Measurement
from fullstride.nets import zoo
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec
from fullstride.writing import scratch_folder

MODULE = "module"  # PyTorch's eager modules, in place of files of a format
GROUP = 8  # networks that are measured in turn
PASSES = 3  # over all networks
PAUSE_S = 2.0  # between passes
FOLDS = 4  # of which each is estimated by the others
# Medians of a fit are those of a rough profile of such machines, within a factor of e**SPREAD.
SPREAD = {"launch_us": 1.0, "host_us": 1.0, "start_us": 1.5}
OTHER_SPREAD = 0.5


def find_label(format: str = "") -> Label | None:
    """The format and precision that are measured here; None for modules.

    By default the first that can be written here, and modules where the extra `export` is not
    installed. Raises ValueError for a format that does not run here.
    """
    if format == MODULE:
        return None
    if format:
        return quickly_written(runnable((format,)))
    try:
        return quickly_written(runnable())
    except ValueError:
        return None


def measure_specs(
    specs: Sequence[NetSpec], batch: int, label: Label | None, scratch: Path
) -> Generator[str, None, list[CallTime]]:
    """The times of untrained networks at their resolutions; weights do not change the time.

    Up to eight at once are measured in turn inside of every round, by `quiet_times`. All are
    measured in several passes, as a machine may be slow for some seconds, and each keeps its
    shortest time. `scratch` is a path for a temporary folder.
    """
    form = " ".join(label) if label else "modules"
    times: dict[str, CallTime] = {}
    with scratch_folder(scratch) as folder:
        groups: list[Callable[[], list[Measurement]]] = []
        for begin in range(0, len(specs), GROUP):
            group = {str(begin + i): spec for i, spec in enumerate(specs[begin : begin + GROUP])}
            groups.append(prepared(group, batch, label, folder))
            yield f"{begin + len(group)} of {len(specs)} networks are ready as {form}"
        for number in range(PASSES):
            sleep(PAUSE_S if number else 0)
            yield f"measuring {len(specs)} networks, pass {number + 1} of {PASSES}"
            for measure in groups:
                for name, time in quiet_times(measure).items():
                    times[name] = min(times.get(name, time), time, key=lambda each: each.ms)
    return [times[str(number)] for number in range(len(specs))]


def prepared(
    specs: Mapping[str, NetSpec], batch: int, label: Label | None, folder: Path
) -> Callable[[], list[Measurement]]:
    """A function without arguments that measures all of `specs`, by name."""
    protocol = replace(MEDIANS, batch=batch)
    if label is None:
        nets = {name: Network(spec).eval() for name, spec in specs.items()}
        sides = {name: spec.resolution for name, spec in specs.items()}
        where, channels = choose_device("auto"), next(iter(specs.values())).in_channels
        return lambda: bench(nets, protocol, where, channels, resolutions=sides)
    models: dict[str, ExportedModel] = {}
    for name, spec in specs.items():
        files = untrained_files(
            Network(spec), name, zoo.family_preprocessing(spec), spec.classes, "normalised"
        )
        models[name] = files.open(*label, folder, batch=batch)
    return lambda: measure_files(models, protocol)


def fit_profile(
    specs: Sequence[NetSpec], ms: Sequence[float], batch: int, label: Label | None
) -> Profile:
    """The profile by which these networks take about as long as they did, in ms per image.

    Its interval is that of each quarter of them, estimated by the other three.
    """
    from fullstride.latency.calibration.calibrate import names_for
    from fullstride.latency.calibration.fitting import (
        PRIORS,
        Parameters,
        error,
        fit,
        interval,
        left_out,
        resolvable_ratio,
    )

    device = choose_device("auto") if label is None else torch.device("cpu")
    machine, rough = machine_here(label, device)
    priors = dict(PRIORS) | {"start_us": (20.0, SPREAD["start_us"])}
    for name, value in rough.inference.numbers.items():
        priors[name] = (value, SPREAD.get(name, OTHER_SPREAD))
    work = prepare([operators_of(spec) for spec in specs], [batch] * len(specs), machine)
    seconds = np.array(ms) * batch / 1e3
    parameters = Parameters(names_for(machine.runtime, device), priors)
    numbers = fit(work, seconds, parameters)
    folds = np.arange(len(specs)) % FOLDS
    if len(specs) > FOLDS:
        estimated = left_out(work, seconds, folds, parameters)
    else:
        estimated = times(work, numbers).total_s
    low, high = interval(estimated, seconds, folds) if len(set(folds)) > 1 else (0.5, 2.0)
    here = Environment.here(device)
    return Profile(
        name="here",
        device=here.device,
        layout="",
        precision=label[1] if label else "fp32",
        machine=machine,
        sheet="that of a rough profile of such machines",
        inference=Fit(
            numbers=numbers,
            error=max(error(estimated, seconds), 1e-3),
            low=low,
            high=high,
            resolvable_ratio=resolvable_ratio(estimated, seconds),
            networks=len(specs),
            source=f"fullstride search: networks of the space, {' '.join(label or (MODULE,))}",
            software=f"torch {here.torch}",
            date=here.date[:10],
        ),
    )


def machine_here(label: Label | None, device: torch.device) -> tuple[Machine, Profile]:
    """How the runtime executes operators, and a profile of similar machines.

    Peaks scale the numbers that are fitted, so a rough profile's are good enough, up to the bounds
    of these numbers: a CPU with many threads has the peak of as many cores.
    """
    rough = profile_here()
    machine = rough.machine
    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        machine = replace(machine, peak_tflops=machine.peak_tflops * threads)
    runtime: Runtime = "eager" if label is None else machine.runtime
    if label and label[0] == "tensorrt":
        runtime = "tensorrt"
    return replace(machine, runtime=runtime, folded=label is not None), rough
