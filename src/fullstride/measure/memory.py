"""Does a batch fit, and what does it take at most?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from fullstride.measure.cost import COUNTED


def peak_mib(net: nn.Module, call: Callable[[Tensor], object], images: Tensor) -> float | None:
    """What `net`, its input and one call take at most, although others wait on the same GPU; None on the CPU."""
    if images.device.type == "cpu":
        return None
    held = sum(map(size_bytes, (*net.parameters(), *net.buffers(), images)))
    before = torch.cuda.memory_allocated(images.device)
    torch.cuda.reset_peak_memory_stats(images.device)
    call(images)
    return (held + torch.cuda.max_memory_allocated(images.device) - before) / 2**20


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

    handles = [layer.register_forward_hook(hook) for layer in net.modules() if isinstance(layer, COUNTED)]
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
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


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
    """Whether memory ran out: torch says so by a RuntimeError, of a kind of its own on a GPU."""
    said = str(error)
    return isinstance(error, MemoryError) or "out of memory" in said or "allocate memory" in said
