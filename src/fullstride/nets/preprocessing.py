"""Describes how images are prepared for a network; a mistake costs accuracy without an error."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WHITE = "white"
MAX_FRAMES = 1024  # of a clip, and of a stride
MAX_RESOLUTION = 4096  # an image has 200 MB in float32, and a network needs several times as much

Kernel = Literal["bilinear", "bicubic", "lanczos"]
Fit = Literal["crop", "squish", "pad"]


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Resize to a square, scale to 0..1, subtract `mean`, divide by `std`.

    Examples:
        >>> import fullstride
        >>> pixels = fullstride.Preprocessing(resolution=64, mean=(0.5,), std=(0.25,), crop=1.0)
        >>> pixels.resolution, pixels.kernel, pixels.fit
        (64, 'bilinear', 'crop')
    """

    resolution: int = 224  # pixels a side
    mean: tuple[float, ...] = IMAGENET_MEAN  # one per channel: 1 is gray, 3 is RGB
    std: tuple[float, ...] = IMAGENET_STD  # as many
    kernel: Kernel = "bilinear"  # of the resize, antialiased
    # Keep the aspect ratio and crop the centre; resize to a square; or keep the aspect ratio, make
    # the longer side `resolution`, at the top left, and fill the rest with the mean colour.
    fit: Fit = "crop"
    crop: float = 0.875  # with "crop": side of the centre crop / shorter side of the image
    # Decode large JPEGs at 1/2, 1/4 or 1/8 of their size. Files that lack the field do not.
    draft: bool = False
    # The colour behind transparent pixels: a name of CSS, such as black, or #rrggbb.
    background: str = WHITE
    frames: int = 0  # of a clip; 0: pictures
    frame_stride: int = 1  # from a frame of a clip to the next one, in frames of the video

    def __post_init__(self) -> None:
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std):
            raise ValueError(
                f"mean {self.mean} and std {self.std}: give 1 number each for gray images or 3 for "
                "RGB"
            )
        if type(self.resolution) is not int or not 1 <= self.resolution <= MAX_RESOLUTION:
            raise ValueError(f"resolution {self.resolution}: use 1 to {MAX_RESOLUTION} pixels")
        for name, value, kinds in (("kernel", self.kernel, Kernel), ("fit", self.fit, Fit)):
            if value not in get_args(kinds):
                raise ValueError(f"{name} {value!r}: use {' or '.join(get_args(kinds))}")
        if not 0 <= self.frames <= MAX_FRAMES or not 1 <= self.frame_stride <= MAX_FRAMES:
            raise ValueError(
                f"frames {self.frames} and frame_stride {self.frame_stride}: use 0 frames for "
                f"pictures, up to {MAX_FRAMES}, and a stride from 1"
            )
        check_colour("background", self.background)
        if self.frames and self.background != WHITE:
            raise ValueError(
                f"background {self.background!r} is for pictures, and clips have no transparent "
                "pixels: leave it out"
            )
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop {self.crop}: use a ratio above 0, up to 1")
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise ValueError(
                f"mean {self.mean} and std {self.std}: use finite numbers, and std above 0"
            )

    def __str__(self) -> str:
        views = {
            "crop": f"center crop of {self.crop:.3g}",
            "squish": "squished to a square",
            "pad": "padded to a square",
        }
        text = f"{self.resolution} pixels, {views[self.fit]}"
        if self.background != WHITE:
            text += f", on {self.background}"
        if not self.frames:
            return text
        return f"{self.frames} frames with stride {self.frame_stride}, {text}"

    @property
    def fill(self) -> tuple[int, ...]:
        """The mean colour in 0..255, for the padding."""
        return tuple(min(255, max(0, round(255 * value))) for value in self.mean)

    @property
    def channels(self) -> int:
        return len(self.mean)


def check_colour(name: str, colour: str) -> None:
    """Raise ValueError unless `colour` is an opaque colour."""
    if colour == WHITE:  # so that a default needs no import of Pillow
        return
    from PIL import ImageColor

    try:
        if len(ImageColor.getrgb(colour)) == 3:
            return
    except ValueError:
        pass
    raise ValueError(
        f"{name} {colour!r} is no colour: use white, black, another name of CSS, or #rrggbb"
    )


WeightsKind = Literal["averaged", "raw"]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Settings that replace the preprocessing and class names of loaded weights."""

    # Pixels a side; by default from the bundle, the known released file, or the family.
    resolution: int | None = None
    # Keep the aspect ratio of an image and crop its center, or resize it to a square.
    fit: Fit | None = None
    # Side of the center crop / shorter side of the image.
    crop: float | None = None
    # A file with the name of a class in each line, in the order of the network's outputs.
    class_names: Path | None = None
    # Which weights of a checkpoint that has both.
    weights_kind: WeightsKind = "averaged"
    # The network of a file of weights that fits several networks, or timm/NAME.
    network: str = ""


BY_DEFAULT = LoadOptions()
