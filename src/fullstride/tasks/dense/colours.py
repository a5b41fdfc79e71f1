"""How is a value for each pixel shown to people? Colours of classes, and of depths."""

import colorsys

import numpy as np
from PIL import Image

from fullstride.data.readers.map_files import IGNORED

OPACITY = 0.6  # of colours over a picture
GOLDEN = 0.618034  # of the circle of hues, by which each class differs from the one before
# Depths from near to far: light yellow, orange, violet, dark blue.
NEAR_TO_FAR = np.array([(252, 253, 191), (251, 135, 97), (146, 43, 129), (20, 14, 54)])


def class_colours() -> np.ndarray:
    """A colour for each class, uint8 (256, 3): black for class 0, white for `IGNORED`."""
    hues = ((k * GOLDEN % 1, 0.9 if k % 2 else 0.6, 0.9) for k in range(IGNORED + 1))
    colours = np.array([[round(255 * x) for x in colorsys.hsv_to_rgb(*hue)] for hue in hues])
    colours[0], colours[IGNORED] = 0, 255
    return colours.astype(np.uint8)


def class_picture(classes: np.ndarray) -> Image.Image:
    """Classes, uint8 (H, W), as an image with a palette: its values are the classes."""
    image = Image.fromarray(classes)
    image.putpalette(class_colours().tobytes())
    return image


def over_picture(picture: Image.Image, colours: np.ndarray) -> Image.Image:
    """`picture` with colours, uint8 (H, W, 3), over it."""
    return Image.blend(picture.convert("RGB"), Image.fromarray(colours), OPACITY)


def depth_colours(metres: np.ndarray) -> np.ndarray:
    """Metres (H, W), 0 where there are none -> uint8 (H, W, 3), from the nearest to the farthest.

    Equal ratios of depths are equal steps of colours. Pixels without a depth are black.
    """
    shown = metres > 0
    logs = np.log(np.where(shown, metres, 1.0))
    least, most = (logs[shown].min(), logs[shown].max()) if shown.any() else (0.0, 0.0)
    places = (logs - least) / max(most - least, 1e-6) * (len(NEAR_TO_FAR) - 1)
    channels = [np.interp(places, range(len(NEAR_TO_FAR)), column) for column in NEAR_TO_FAR.T]
    return np.where(shown[..., None], np.stack(channels, -1), 0).astype(np.uint8)
