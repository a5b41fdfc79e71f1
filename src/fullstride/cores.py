"""How many CPU cores may this process use?"""

import os


def cores() -> int:
    """The cores that this process may use. A container's limit on CPU time is not visible."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
