"""Which objects are in an image, and are their boxes usable? Boxes beyond it are clipped."""

import math
from typing import NamedTuple

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the upright image
CLIPPED = 0.5  # pixels beyond the image from which on a note counts the box


class Objects(NamedTuple):
    """The objects of an image, a value for each; an image may have none."""

    boxes: tuple[Box, ...]
    labels: tuple[int, ...]  # class indices
    # neither counts as missed nor as found: "difficult" of Pascal VOC, "iscrowd" of COCO
    difficult: tuple[bool, ...]


class BoxCheck:
    """Clips boxes to their images, and counts those that were changed or cannot be used."""

    def __init__(self) -> None:
        self.clipped: list[str] = []
        self.left_out: list[str] = []

    def usable(self, box: Box, size: tuple[int, int], where: str) -> Box | None:
        """`box` inside an image of `size` (width, height); None if it has no area there.

        `where` names the file and the entry.
        """
        left, top, right, bottom = box
        inside = (
            min(max(left, 0.0), size[0]),
            min(max(top, 0.0), size[1]),
            min(max(right, 0.0), size[0]),
            min(max(bottom, 0.0), size[1]),
        )
        is_finite = all(map(math.isfinite, box))
        if not is_finite or inside[2] <= inside[0] or inside[3] <= inside[1]:
            self.left_out.append(where)
            return None
        if max(abs(a - b) for a, b in zip(box, inside, strict=True)) > CLIPPED:
            self.clipped.append(where)
        return inside

    def notes(self) -> tuple[str, ...]:
        """A line on each kind of problem that there was."""
        return tuple(
            f"{len(names):,} boxes {problem}; the first is {names[0]}"
            for names, problem in (
                (self.clipped, "reach beyond their images and are clipped"),
                (self.left_out, "are empty, inverted, outside or not finite and are left out"),
            )
            if names
        )
