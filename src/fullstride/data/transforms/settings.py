"""The settings of the random transforms of training, which the command line reads."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fullstride.io.records import Bounds, Count, NonNegative, Positive, Probability, check_bounds

RandForm = Literal["relative", "tpu", "timm"]
Fill = Literal["noise", "mean"]
MAX_LEVEL = 30  # of RandAugment; 10 is full
Area = Annotated[float, Bounds(gt=0, le=4)]


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random transforms of a training image. The comment on a field is its command-line help.

    Crop, rotation and flip come first, then AutoAugment, TrivialAugment, RandAugment, Cutout and
    erasing.
    """

    # random resized crop: range of the area fraction; above 1 the image is padded with black
    scale: tuple[Area, Area] = (0.08, 1.0)
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)  # random resized crop: width / height
    # random rotation by up to this angle in either direction; the corners become black
    rotation_degrees: Annotated[float, Bounds(ge=0, le=180)] = 0.0
    # probability of a horizontal flip; not applied where a mirrored image changes its class
    hflip_prob: Probability = 0.5
    # resize the crop with bilinear or bicubic interpolation at random, not with the network's; the
    # decoder opencv has its own
    random_kernel: bool = False
    trivial_augment: bool = False  # TrivialAugment: one operation per image, of any strength
    # RandAugment: relative (distances in shares of the side), tpu (in pixels and with the
    # arithmetic of ResNet-RS's code), or timm (its fill, interpolation and levels up to 10)
    rand_form: RandForm = "relative"
    rand_layers: Count = 0  # RandAugment: operations per image; 0: off
    rand_magnitude: Annotated[float, Bounds(ge=0, le=MAX_LEVEL)] = 10.0  # RandAugment: magnitude
    # RandAugment: every operation gets stronger with the magnitude (inc1 in timm)
    rand_increasing: bool = False
    rand_std: NonNegative = 0.0  # RandAugment: standard deviation of the magnitude
    rand_probability: Probability = 1.0  # RandAugment: probability of each operation
    auto_augment: bool = False  # AutoAugment with the ImageNet policy
    cutout: Probability = 0.0  # side of the gray square / side of the image; 0: off
    random_erasing_prob: Probability = 0.0  # probability of random erasing
    random_erasing_fill: Fill = "noise"  # what an erased rectangle has

    def __post_init__(self) -> None:
        check_augmentation(self)


def check_augmentation(settings: Any, prefix: str = "") -> None:
    """Raise ValueError for numbers out of bounds, and for settings that exclude each other."""
    check_bounds(settings, prefix)
    for name in ("scale", "ratio"):
        low, high = getattr(settings, name)
        if low > high:
            raise ValueError(f"{prefix}{name} {(low, high)}: use two rising numbers")
    if settings.rand_form == "tpu" and settings.rand_increasing:
        raise ValueError(
            f"{prefix}rand_form tpu has no increasing operations: leave rand_increasing out, or "
            "use the form timm"
        )
