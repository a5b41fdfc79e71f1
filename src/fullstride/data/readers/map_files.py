"""What does a file of a value for each pixel say? Classes or metres, or UnreadableImage."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fullstride.data.readers.decode import MAX_MEGAPIXELS, OversizedImage, UnreadableImage
from fullstride.storage import check_regular, open_regular

IGNORED = 255  # the class of a pixel that is neither trained on nor scored
MAX_CLASSES = IGNORED
MILLIMETRES = 1000.0  # in a metre


@dataclass(frozen=True)
class MaskFile:
    """The classes of a picture's pixels, in a PNG of one channel or with a palette."""

    root: Path
    name: str  # POSIX path below `root`
    classes: bytes  # of each value from 0 on, `IGNORED` for those that are left out

    def read(self) -> np.ndarray:
        """Classes from 0 on, and `IGNORED`: uint8 (H, W). 255 is `IGNORED` too.

        Raises UnreadableImage for other files, and for a value that has no class.
        """
        values = read_png(self.root / self.name, self.name)
        unknown = (values >= len(self.classes)) & (values != IGNORED)
        if unknown.any():
            raise UnreadableImage(
                self.name,
                f"it has the value {values[unknown].min()}, and the classes are 0 to "
                f"{len(self.classes) - 1}, and {IGNORED} for pixels without one",
            )
        table = np.full(IGNORED + 1, IGNORED, np.uint8)
        table[: len(self.classes)] = np.frombuffer(self.classes, np.uint8)
        return table[values]


@dataclass(frozen=True)
class DepthFile:
    """The depths of a picture's pixels: a PNG in millimetres, or a NumPy array in metres."""

    root: Path
    name: str  # POSIX path below `root`

    def read(self) -> np.ndarray:
        """Metres, 0 where there is no depth: float32 (H, W). Raises UnreadableImage."""
        path = self.root / self.name
        if path.suffix.lower() != ".npy":
            return read_png(path, self.name).astype(np.float32) / np.float32(MILLIMETRES)
        try:
            check_regular(path)
            metres = np.array(np.load(path, mmap_mode="r", allow_pickle=False), np.float32)
        except (OSError, ValueError, TypeError) as error:
            raise UnreadableImage(self.name, f"it is no array of numbers: {error}") from error
        if metres.ndim != 2:
            raise UnreadableImage(self.name, f"its shape is {metres.shape}: use (H, W)")
        return np.where(np.isfinite(metres) & (metres > 0), metres, np.float32(0))


MapFile = MaskFile | DepthFile


def read_png(path: Path, name: str) -> np.ndarray:
    """The values of a PNG as they are stored: bool, uint8 or uint16 (H, W) as integers.

    Raises UnreadableImage, also for one of several channels.
    """
    try:
        with warnings.catch_warnings(), open_regular(path) as file:
            warnings.simplefilter("ignore")
            with Image.open(file, formats=("PNG",)) as image:
                if image.width * image.height > 1e6 * MAX_MEGAPIXELS:
                    limit = f"more than {MAX_MEGAPIXELS:g} megapixels"
                    raise OversizedImage(name, f"it has {limit}")
                values = np.asarray(image)
    except UnreadableImage:
        raise
    except Exception as error:  # Pillow raises a dozen kinds on a broken file
        what = getattr(error, "strerror", None) or "it is no whole PNG"
        raise UnreadableImage(name, what) from error
    if values.ndim != 2:
        raise UnreadableImage(
            name, f"it has {values.shape[2]} channels: use one, with a number for each pixel"
        )
    return values.astype(np.int32)
