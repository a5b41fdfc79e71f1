"""Finds the largest batch that trains: predicts it from saved tensors, then proves it.

A proof is a few optimizer steps in a fresh process, `python -m fullstride.measure.max_batch`,
because a process that ran out of memory before has fragmented memory.
"""

import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fullstride.io.writing import lacks_memory
from fullstride.measure import workload
from fullstride.measure.activation_bytes import activation_bytes
from fullstride.measure.environment import choose_device, find_device
from fullstride.measure.protocols import MULTIPLE
from fullstride.measure.tracer import COUNTED
from fullstride.measure.workload import Precision, Step, StepOptions
from fullstride.nets.backbone import batch_shape
from fullstride.nets.efficiency import Efficiency, TrainingStep, is_compiled
from fullstride.nets.network import Network
from fullstride.nets.zoo import measurable


def peak_mib(
    resident: Iterable[Tensor], call: Callable[[], object], device: torch.device
) -> float | None:
    """Return the peak memory of `call` in MiB with its `resident` tensors; None on the CPU.

    Other tensors on the same GPU are not counted.
    """
    if device.type == "cpu":
        return None
    resident_bytes = sum(map(size_bytes, resident))
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return (resident_bytes + torch.cuda.max_memory_allocated(device) - before) / 2**20


def check_fits(net: nn.Module, image: Tensor, batch: int) -> None:
    """Raise MemoryError if inference on `batch` images is not expected to fit into CPU memory.

    Linux grants memory that it does not have and kills the process later; a GPU raises an error.
    The estimate is the images and three times the largest layer's input and output, within
    20 % of the peak of TResNet-M and -tiny, GENet-normal, ResNet-50 and ResNet-RS-50 on a CPU with
    torch 2.15. `net` is in evaluation mode, and `image` is (1, C, H, W).
    """
    if image.device.type != "cpu":
        return
    largest = 0

    def hook(_layer, inputs, out) -> None:
        nonlocal largest
        largest = max(largest, size_bytes(inputs[0]) + size_bytes(out))

    with ExitStack() as hooks:
        for layer in net.modules():
            if isinstance(layer, COUNTED):
                hooks.enter_context(layer.register_forward_hook(hook))
        net(image)
    if batch * (size_bytes(image) + 3 * largest) > available_bytes():
        raise MemoryError


def size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def available_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration):
        return float("inf")


def budget_bytes(gib: float | None, device: torch.device) -> float:
    """`gib` in bytes; None: the device's free memory. Raises ValueError for more than is free."""
    free = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    check_gib(gib)
    if gib is not None and gib * 2**30 > free:
        raise ValueError(
            f"memory of {gib:g} GiB: {device} has {free / 2**30:.1f} GiB free, use no more"
        )
    return free if gib is None else gib * 2**30


def check_gib(gib: float | None) -> None:
    if gib is not None and not 0 < gib < 1e9:
        raise ValueError(f"memory of {gib:g} GiB: use a number above 0, and below 1e9")


def limit_memory(limit_bytes: float, device: torch.device) -> None:
    """Limit this process: its total memory on a GPU, or the CPU memory that it allocates from now.

    Raises ValueError where the system cannot limit CPU memory.
    """
    if device.type == "cuda":
        set_memory_fraction(min(1.0, limit_bytes / torch.cuda.mem_get_info(device)[1]), device)
        return
    try:
        import resource  # not on Windows

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        raise ValueError(
            "only Linux can limit the memory of a process on the CPU: use --predict"
        ) from None
    limit = pages * resource.getpagesize() + int(limit_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def set_memory_fraction(fraction: float, device: torch.device) -> None:
    # torch requires an index here, unlike elsewhere
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(fraction, index)


@contextmanager
def memory_errors(subject: str, hint: str) -> Iterator[None]:
    """Turn lack of memory into a ValueError: "`subject` does not fit into memory: `hint`"."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if lacks_memory(error):
            raise ValueError(f"{subject} does not fit into memory: {hint}") from None
        raise


STEPS = 3  # after the first step
FLOAT_BYTES = 4
USABLE = 0.97  # fraction of a GPU's memory; fragmentation takes the rest
WORKSPACE_BYTES = 2**30  # for convolutions on a GPU
# Without this, glibc's heap has holes between freed maps, too small for aligned maps of equal size.
MALLOC_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_ARENA_MAX": "1"}
MAP_LIMIT = 2**31  # elements: many GPU kernels have 32-bit indices


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted memory of a training step: its saved tensors, weights and momentum."""

    bytes_per_image: int  # saved tensors and the image
    largest_map: int  # elements per image of the largest tensor that an eager step saves
    fixed_bytes: int  # weights, their momentum and casts, running statistics, workspace
    memory_bytes: float

    @property
    def batch(self) -> int:
        batch = max(0, int((self.memory_bytes - self.fixed_bytes) // self.bytes_per_image))
        return batch // MULTIPLE * MULTIPLE if batch > MULTIPLE else batch

    @property
    def map_batch(self) -> int:
        """The largest batch whose tensors all have fewer than 2^31 elements."""
        return (MAP_LIMIT - 1) // max(1, self.largest_map)


def predict(
    net: nn.Module,
    memory_bytes: float,
    resolution: int,
    precision: Precision = "bfloat16",
    in_channels: int = 3,
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    compiled: bool = False,
    efficiency: Efficiency = "plain",
) -> Prediction:
    """Predict the largest batch for training steps on a GPU, which need not be present, or the CPU.

    See `Step` for the arguments. `compiled` only matters for a `Network`; other networks are
    predicted as eager.
    """
    eager = activation_bytes(net, resolution, precision, in_channels, device=device)
    saved_bytes = eager.bytes_per_image
    if is_compiled(efficiency) or compiled and isinstance(net, Network):
        from fullstride.measure.compiled_bytes import compiled_bytes

        saved_bytes = compiled_bytes(net, resolution, precision, in_channels)
    gpu = device == "cuda"
    weights = sum(p.numel() for p in net.parameters()) * FLOAT_BYTES
    statistics = sum(b.numel() for b in net.buffers()) * FLOAT_BYTES
    # In float32, the first convolution saves the image.
    shape = batch_shape(net, 1, in_channels, resolution)
    image = math.prod(shape) * FLOAT_BYTES if precision != "float32" else 0
    return Prediction(
        bytes_per_image=saved_bytes + image,
        largest_map=eager.largest_map,
        fixed_bytes=2 * weights + statistics + eager.fixed_bytes + (WORKSPACE_BYTES if gpu else 0),
        memory_bytes=memory_bytes * (USABLE if gpu else 1),
    )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A few training steps at one batch."""

    batch: int
    # memory: out of memory; elements: any error at a batch with tensors of 2^31 elements or more
    outcome: Literal["fits", "memory", "elements"]
    peak_memory_mib: float | None = None  # GPU only
    why: str = ""

    @property
    def fits(self) -> bool:
        return self.outcome == "fits"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A training step to try in a fresh process, at any batch."""

    net: nn.Module
    resolution: int
    device: str
    memory_bytes: float
    options: StepOptions
    in_channels: int = 3

    @cached_property
    def prediction(self) -> Prediction:
        return predict(
            self.net,
            self.memory_bytes,
            self.resolution,
            self.options.precision,
            self.in_channels,
            device="cpu" if self.device.startswith("cpu") else "cuda",
            compiled=self.options.compiled,
            efficiency=self.options.efficiency,
        )

    def search(self) -> Iterator[Probe]:
        """Prove the prediction by real steps, starting at the predicted batch."""
        return search(self.probe, self.prediction.batch)

    def probe(self, batch: int) -> Probe:
        """Run the steps in a fresh process. Raises ValueError for any error but lack of memory."""
        command = [sys.executable, "-m", "fullstride.measure.max_batch"]
        variables = {**os.environ, **MALLOC_ENVIRONMENT}
        process = subprocess.run(
            command, input=pickle.dumps((self, batch)), env=variables, capture_output=True
        )
        try:
            result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            errors = process.stderr.decode(errors="replace").strip().splitlines()
            last = errors[-1] if errors else "no message"
            result = {"error": f"exit code {process.returncode}, {last}"}
        if "error" not in result:
            return Probe(**result)
        if batch > self.prediction.map_batch:
            return Probe(batch=batch, outcome="elements", why=result["error"])
        raise ValueError(f"training steps at batch {batch} failed: {result['error']}")

    def run(self, batch: int) -> Probe:
        """Run the steps in this process and limit its memory from then on."""
        device = find_device(self.device)

        def step(images: int) -> Step:
            size = images, self.resolution, device, self.in_channels
            return Step(self.net, "training", *size, self.options)

        with workload.exact_float32():
            if device.type == "cpu":
                step(2)()  # libraries allocate memory at their first use
            limit_memory(self.memory_bytes, device)
            try:
                work = step(batch)
                # The first step tries convolution algorithms, some of which fail to allocate.
                work()
                before = retries(device)
                peak = peak_mib(work.resident(), lambda: [work() for _ in range(STEPS)], device)
                if retries(device) > before:
                    return Probe(batch=batch, outcome="memory", why="the allocator retried")
            except (MemoryError, RuntimeError) as error:
                # oneDNN's error for lack of memory, which the step of two images did not raise.
                onednn = device.type == "cpu" and "could not create a" in str(error)
                if not (lacks_memory(error) or onednn):
                    raise
                return Probe(batch=batch, outcome="memory", why=str(error).partition("\n")[0])
        return Probe(batch=batch, outcome="fits", peak_memory_mib=peak)


def retries(device: torch.device) -> int:
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if device.type == "cuda" else 0


def search(probe: Callable[[int], Probe], start: int) -> Iterator[Probe]:
    """Grow or shrink from `start` until one batch fits and one does not, then bisect.

    The largest batch that fits, a multiple of 8 or less than 8, is the result.
    """
    low, high, unit = 0, None, MULTIPLE
    batch, stride = max(unit, start // unit * unit), max(unit, start // 32)
    while high is None or high - low > unit:
        result = probe(batch)
        yield result
        if result.fits:
            low = batch
        else:
            high = batch
        if (low, high) == (0, MULTIPLE):
            unit = 1
        if high is None:
            batch, stride = low + stride, 2 * stride
        elif low == 0 and unit > 1:
            batch, stride = high - stride, 2 * stride
        else:
            batch = (low + high) // 2
        batch = max(low + unit, batch // unit * unit)


def largest(probes: Iterable[Probe], subject: str) -> int:
    """The result of a search. Raises ValueError about `subject` if not even one image fits."""
    batch = max((probe.batch for probe in probes if probe.fits), default=0)
    if not batch:
        raise ValueError(
            f"{subject} does not fit into memory at batch 1: "
            "use a smaller resolution or more memory"
        )
    return batch


def plan(
    model: str,
    how: TrainingStep,
    *,
    device: str = "auto",
    compiled: bool = False,
    memory_gib: float | None = None,
    predict_only: bool = False,
) -> Trial:
    """The training step of a named network to try; see `fullstride measure capacity --help`.

    With `predict_only`, a GPU need not be present. Raises ValueError, in one line, for missing or
    contradictory arguments.
    """
    check_gib(memory_gib)
    absent = predict_only and device in ("auto", "cuda") and not torch.cuda.is_available()
    target = torch.device("cuda") if absent else choose_device(device)
    if memory_gib is None and (absent or target.type == "cpu"):
        raise ValueError(f"device {device} has no GPU whose memory could be read: set --memory-gib")
    precision, efficiency = workload.find_precision(how.precision), how.form.efficiency
    if target.type == "cpu" and precision == "float16":
        raise ValueError("training in fp16 is for GPUs: use --precision bf16 or fp32")
    memory_bytes = (memory_gib or 0) * 2**30 if absent else budget_bytes(memory_gib, target)
    if compiled:
        check_not_compiled_twice(efficiency)
    net = workload.in_training_form(measurable([model])[model], how.form, model)
    resolution = net.spec.resolution if how.resolution is None else how.resolution
    options = StepOptions(
        precision=precision, layout=how.layout, compiled=compiled, efficiency=efficiency
    )
    return Trial(
        net=net,
        resolution=resolution,
        device=str(target),
        memory_bytes=memory_bytes,
        options=options,
        in_channels=net.spec.in_channels,
    )


def check_not_compiled_twice(efficiency: Efficiency) -> None:
    """Raise ValueError for --compiled beside an efficiency other than plain."""
    if efficiency != "plain":
        raise ValueError(f"--compiled with --efficiency {efficiency}: leave one of them out")


def main() -> None:
    """Run the trial that `Trial.probe` sends on standard input, and print the result as JSON."""
    trial, batch = pickle.load(sys.stdin.buffer)
    try:
        result = asdict(trial.run(batch))
    except Exception as error:  # of any kind: the parent process reports it in one line
        result = {"error": f"{type(error).__name__} {' '.join(str(error).split())}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
