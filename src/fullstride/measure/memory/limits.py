"""Does a batch fit, what does it take at most, and how much is there?"""

import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from fullstride.measure.cost.flops import COUNTED


def peak_mib(
    held: Iterable[Tensor], call: Callable[[], object], device: torch.device
) -> float | None:
    """What `call` takes at most with what it holds before, although others wait on the same GPU; None on the CPU."""
    if device.type == "cpu":
        return None
    held_bytes = sum(map(size_bytes, held))
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return (held_bytes + torch.cuda.max_memory_allocated(device) - before) / 2**20


def check_fits(net: nn.Module, image: Tensor, batch: int) -> None:
    """MemoryError if `batch` images like this one (1, C, H, W) are not expected to fit into the memory of the CPU.

    Linux grants memory that it does not have and later kills the process without a word; a GPU refuses.
    The estimate is the images and three times the largest layer's input and output: within 20 % of what
    TResNet-M and -tiny, GENet-normal, ResNet-50 and ResNet-RS-50 took on a CPU with torch 2.15.
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


def asked_bytes(gib: float | None, device: torch.device) -> float:
    """`gib` of the device in bytes, all that is free where None. Raises ValueError for more than the device has."""
    has = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    check_gib(gib)
    if gib is not None and gib * 2**30 > has:
        raise ValueError(
            f"memory of {gib:g} GiB: {device} has {has / 2**30:.1f} GiB free, use no more"
        )
    return has if gib is None else gib * 2**30


def check_gib(gib: float | None) -> None:
    if gib is not None and not 0 < gib < float("inf"):
        raise ValueError(f"memory of {gib:g} GiB: use a number above 0")


def limit_memory(limit_bytes: float, device: torch.device) -> None:
    """From here on this process gets no more: of a GPU in all, of the CPU beside what it holds now."""
    if device.type == "cuda":
        share = limit_bytes / torch.cuda.mem_get_info(device)[1]
        share_memory(min(1.0, share), device)
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(limit_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def share_memory(share: float, device: torch.device) -> None:
    # torch wants a number here, where it takes "cuda" elsewhere
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(share, index)


@contextmanager
def memory_errors(what: str, hint: str) -> Iterator[None]:
    """Lack of memory becomes one line: "`what` does not fit into memory: `hint`"."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if lacks_memory(error):
            raise ValueError(f"{what} does not fit into memory: {hint}") from None
        raise


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out: a GPU has types of its own for that, on the CPU torch says it by a RuntimeError."""
    said = str(error)
    typed = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return typed or any(
        words in said for words in ("out of memory", "allocate memory", "ALLOC_FAILED", "bad_alloc")
    )
