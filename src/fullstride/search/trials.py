"""How do the trials of a study run? One at a time here, or one per device in processes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a study, in a folder of its own, which is the record of it."""

    folder: Path
    arguments: dict[str, Any]  # of the function that runs it, which a process can be sent
