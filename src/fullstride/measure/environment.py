"""Where was a number made? Device, software and commit, to stand beside every measurement."""

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

COMMAND_S = (
    5  # git and nvidia-smi may hang on a sick machine; the number must come out all the same
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine and the software that a number depends on. `asdict` of it is JSON."""

    device: str  # as people call it: "AMD EPYC 7B13", "NVIDIA H200"
    threads: int  # of torch on the CPU
    os: str
    python: str
    torch: str
    cuda: str | None  # that torch was built for; None on the CPU
    driver: str | None  # of the GPU; None on the CPU
    fullstride: str | None  # version; None where the package is not installed
    commit: (
        str | None
    )  # of the checkout, with "+" if a tracked file was changed; None outside a checkout
    date: str  # UTC
    timm: str | None = None  # versions, None where they are not installed
    triton: str | None = None
    cudnn: str | None = (
        None  # this and what follows: of a GPU, None on the CPU and where nvidia-smi does not say
    )
    clock_mhz: float | None = None  # of its cores, as it was then
    clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_cap_w: float | None = None
    temperature_c: float | None = None
    held_back_by: str | None = None  # what kept the clock down then, "nothing" where nothing did

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
    """The device that is meant, or a ValueError that names one that is here."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r}: use cpu, cuda or cuda:1")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{device} is not here: use cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{device} is not here: use cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    return found


def choose_device(device: str) -> torch.device:
    """`find_device`, with "auto" for the GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return find_device(device)


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
    return (
        output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[
            0
        ]
        or None
    )


# Field -> what nvidia-smi calls it. The mask of reasons was renamed; drivers of before know the second name.
ASKED = {
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
    """The fields of a GPU that change while it works, as it is now; empty where nvidia-smi does not say."""
    gpu = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    for reasons in (ASKED["held_back_by"], OLD_NAME):
        asked = ",".join([*list(ASKED.values())[:-1], reasons])
        answer = output(
            "nvidia-smi", "-i", gpu, f"--query-gpu={asked}", "--format=csv,noheader,nounits"
        )
        values = [value.strip() for value in answer.split(",")]
        if len(values) == len(ASKED):
            return dict(
                zip(ASKED, [*map(number, values[:-1]), told_reasons(values[-1])], strict=True)
            )
    return {}


def number(said: str) -> float | None:
    try:
        return float(said)
    except ValueError:  # "[N/A]"
        return None


def told_reasons(mask: str) -> str:
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


def commit(package: Path) -> str | None:
    """The commit of the checkout that holds `package`, if it is one of fullstride and not of who uses it."""
    checkout = package.parents[1]
    try:
        ours = package == checkout / "src" / "fullstride" and (checkout / ".git").exists()
        if not ours or 'name = "fullstride"' not in (checkout / "pyproject.toml").read_text():
            return None
    except (OSError, UnicodeDecodeError):
        return None
    asked = ("describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=+")
    return output("git", "--no-optional-locks", *asked, folder=checkout) or None


def output(*command: str, folder: Path | None = None) -> str:
    """What a command prints; nothing if it is not there, fails or takes too long."""
    # git would follow these to another repository, as it does inside a hook
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=COMMAND_S
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
