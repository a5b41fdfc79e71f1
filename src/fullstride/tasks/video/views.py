"""Which views of a video are scored or predicted? `10x3`: ten clips, and three crops of each."""

import re

from fullstride.data.transforms.clips import Starts, ViewsOfVideo
from fullstride.nets.preprocessing import Preprocessing


def views_of(text: str, pre: Preprocessing, starts: Starts = "inclusive") -> ViewsOfVideo:
    """The views that `text` names, such as "10x3", by `pre`; see `clip_starts` for `starts`.

    Raises ValueError in one line.
    """
    numbers = re.fullmatch(r"([0-9]{1,4})x([13])", text)
    if not numbers:
        raise ValueError(f"--views {text}: use CLIPSxCROPS with 1 or 3 crops, such as 10x3")
    if not pre.frames:
        raise ValueError(f"--views {text}: the network takes images, not clips: leave it out")
    return ViewsOfVideo(pre, int(numbers[1]), 3 if numbers[2] == "3" else 1, starts)
