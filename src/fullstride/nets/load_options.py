"""How is a network loaded, and how are images prepared for it? What a user may choose."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fullstride.nets.preprocessing import Fit

WeightsKind = Literal["averaged", "raw"]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What replaces that which is known of a network's weights."""

    # Pixels a side; by default those of a bundle, of a known released file, or of the family.
    resolution: int | None = None
    # Keep the aspect ratio of an image and crop its center, or resize it to a square.
    fit: Fit | None = None
    # Side of the center crop / shorter side of the image.
    crop: float | None = None
    # A file with the name of a class in each line, in the order of the network's outputs.
    classes: Path | None = None
    # Which weights of a checkpoint that has both.
    weights_kind: WeightsKind = "averaged"
    # The network of a file of weights that fits several, or timm/NAME.
    network: str = ""


BY_DEFAULT = LoadOptions()
