"""Records the device, the software and the commit of every measurement."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import device as torch_device  # the field `torch` hides the module inside the class

COMMAND_S = 5  # limit for git and nvidia-smi, which may hang on a faulty machine


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine and software that a number depends on. `asdict` makes it JSON."""

    device: str  # "AMD EPYC 7B13", "NVIDIA H200"
    threads: int  # of torch on the CPU
    os: str
    python: str
    torch: str
    cuda: str | None  # version that torch was built for; None on the CPU
    driver: str | None  # of the GPU; None on the CPU
    fullstride: str | None  # version; None if the package is not installed
    commit: str | None  # of the checkout, with "+" for changed tracked files; None without one
    date: str  # UTC
    timm: str | None = None  # version; None if not installed
    triton: str | None = None
    # The state of a GPU; None on the CPU and if nvidia-smi has no value.
    cudnn: str | None = None
    clock_mhz: float | None = None  # clock of the cores at the time
    clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_cap_w: float | None = None
    temperature_c: float | None = None
    held_back_by: str | None = None  # reasons for a lower clock at the time, or "nothing"

    @classmethod
    def here(cls, device: torch_device | str = "cpu") -> "Environment":
        where = find_device(device)
        gpu = where.type == "cuda"
        return cls(
            device=torch.cuda.get_device_name(where) if gpu else cpu_name(),
            threads=torch.get_num_threads(),
            os=platform.platform(),
            python=platform.python_version(),
            torch=torch.__version__,
            cuda=torch.version.cuda if gpu else None,
            driver=driver() if gpu else None,
            fullstride=version("fullstride"),
            commit=commit(Path(__file__).resolve().parents[1]),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            timm=version("timm"),
            triton=version("triton"),
            cudnn=str(torch.backends.cudnn.version()) if gpu else None,
            **(gpu_state(str(torch.cuda.get_device_properties(where).uuid)) if gpu else {}),
        )


def find_device(device: torch.device | str) -> torch.device:
    """Find a device by name. Raises ValueError, which names an existing device, if it is absent."""
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r}: use cpu, cuda or cuda:1")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{device} is not here: use cpu")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ValueError(f"{device} is not here: use cuda:0{f' to cuda:{last}' if last else ''}")
    return place


def choose_device(device: str) -> torch.device:
    """`find_device`, with "auto" for a GPU if available."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return find_device(device)


def has_bf16(device: torch.device) -> bool:
    """Whether the device is a GPU with bf16 in hardware."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


@cache
def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def driver() -> str | None:
    text = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.partition("\n")[0] or None


# Field -> nvidia-smi's name. Older drivers call the mask of reasons OLD_NAME.
GPU_QUERY = {
    "clock_mhz": "clocks.sm",
    "clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_cap_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "held_back_by": "clocks_event_reasons.active",
}
OLD_NAME = "clocks_throttle_reasons.active"
REASONS = {  # nvml.h, nvmlClocksEventReason*
    0x1: "idle",
    0x2: "clocks set by hand",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
    0x100: "display clock",
}


def gpu_state(uuid: str) -> dict[str, Any]:
    """The fields of a GPU that change under load; {} if nvidia-smi does not answer."""
    gpu = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    for reasons in (GPU_QUERY["held_back_by"], OLD_NAME):
        query = ",".join([*list(GPU_QUERY.values())[:-1], reasons])
        line = output(
            "nvidia-smi", "-i", gpu, f"--query-gpu={query}", "--format=csv,noheader,nounits"
        )
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(GPU_QUERY):
            fields = [*map(float_or_none, values[:-1]), clock_reasons(values[-1])]
            return dict(zip(GPU_QUERY, fields, strict=True))
    return {}


def float_or_none(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def clock_reasons(mask: str) -> str:
    try:
        bits = int(mask, 16)
    except ValueError:
        return mask
    return ", ".join(reason for bit, reason in REASONS.items() if bits & bit) or "nothing"


@cache
def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache  # of the code in this process, which a later commit does not change
def commit(package: Path) -> str | None:
    """The commit of fullstride's checkout that holds `package`; None for other repositories."""
    checkout = package.parents[1]
    try:
        is_checkout = package == checkout / "src" / "fullstride" and (checkout / ".git").exists()
        project = (checkout / "pyproject.toml").read_text() if is_checkout else ""
        if 'name = "fullstride"' not in project:
            return None
    except (OSError, UnicodeDecodeError):
        return None
    arguments = ("describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=+")
    return output("git", "--no-optional-locks", *arguments, folder=checkout) or None


def output(*command: str, folder: Path | None = None) -> str:
    """The output of a command; "" if the command does not exist, fails or takes too long."""
    # With variables of a hook, git would read another repository.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=COMMAND_S
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
