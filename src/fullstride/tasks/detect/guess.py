"""What is predicted for an image? An object: its class, a score and a box."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """An object: its class, the score of it, and where it is."""

    label: str
    probability: float
    box: tuple[float, float, float, float]  # left, top, right, bottom, in pixels

    def __str__(self) -> str:
        place = " ".join(f"{edge:.0f}" for edge in self.box)
        return f"{' '.join(self.label.split())} {100 * self.probability:.1f} % at {place}"
