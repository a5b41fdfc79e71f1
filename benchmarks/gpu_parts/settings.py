"""What the parts of `benchmarks/gpu.py` share."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FORMATS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}
TIME_SHARE = 0.9  # of a part's time, after which no more work starts


@dataclass(frozen=True, kw_only=True)
class Settings:
    device: torch.device
    out: Path
    seconds: float  # limit of the part

    @property
    def gpu(self) -> bool:
        """Else networks and maps are tiny: the numbers mean nothing, and the work is checked."""
        return self.device.type == "cuda"


Result = dict[str, Any]  # JSON; "summary" is its line, "ok" says whether it passes
Work = tuple[str, Callable[[], Result]]  # a name and what to run
Results = Mapping[str, Result]  # of a part, by the name of the work


def read(path: Path) -> dict[str, Any]:
    """The file of a part; without results where there is none."""
    nothing = {"environment": {}, "planned": [], "results": {}}
    return json.loads(path.read_text()) if path.exists() else nothing


def run_command(*words: str) -> tuple[int, list[str]]:
    """The exit code of a command of fullstride, and its lines."""
    command = [sys.executable, "-m", "fullstride", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).splitlines()
