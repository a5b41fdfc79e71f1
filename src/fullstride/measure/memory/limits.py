"""How much memory is there, what is the peak of a call, and is a batch expected to fit?"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from fullstride.measure.cost.flops import COUNTED
from fullstride.storage import lacks_memory


def peak_mib(
    resident: Iterable[Tensor], call: Callable[[], object], device: torch.device
) -> float | None:
    """The peak memory of `call` with its `resident` tensors; None on the CPU.

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
    """Raise MemoryError if inference on `batch` images like this one is not expected to fit.

    For the CPU only: Linux grants memory that it does not have and kills the process later, a GPU
    raises. The estimate is the images and three times the largest layer's input and output, within
    20 % of the peak of TResNet-M and -tiny, GENet-normal, ResNet-50 and ResNet-RS-50 on a CPU with
    torch 2.15.

    Args:
        net: A network in evaluation mode.
        image: One image, (1, C, H, W).
        batch: Images.
    """
    if image.device.type != "cpu":
        return
    largest = 0

    def hook(_layer, inputs, out) -> None:
        nonlocal largest
        largest = max(largest, size_bytes(inputs[0]) + size_bytes(out))

    handles = [
        layer.register_forward_hook(hook) for layer in net.modules() if isinstance(layer, COUNTED)
    ]
    net(image)
    for handle in handles:
        handle.remove()
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
    """`gib` in bytes; None: all free memory of the device. Raises ValueError for more than that."""
    free = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    check_gib(gib)
    if gib is not None and gib * 2**30 > free:
        raise ValueError(
            f"memory of {gib:g} GiB: {device} has {free / 2**30:.1f} GiB free, use no more"
        )
    return free if gib is None else gib * 2**30


def check_gib(gib: float | None) -> None:
    if gib is not None and not 0 < gib < float("inf"):
        raise ValueError(f"memory of {gib:g} GiB: use a number above 0")


def limit_memory(limit_bytes: float, device: torch.device) -> None:
    """Limit this process: its whole memory of a GPU, or the CPU memory that it allocates yet.

    Raises ValueError where the system cannot limit the latter.
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
