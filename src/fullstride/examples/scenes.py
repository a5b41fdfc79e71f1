"""Draws scenes: digits at random places in front of a photograph, on a floor, or in motion."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.ndimage import find_objects, map_coordinates

from fullstride.data.dataset import open_data

SPLITS = ("train", "val", "test")  # the digits have the same splits
# Functions of skimage.data, and files of sklearn.datasets.load_sample_image.
TRAINING_PHOTOGRAPHS = (
    *("brick", "grass", "coffee", "chelsea", "immunohistochemistry", "rocket", "astronaut"),
    *("coins", "camera", "clock", "hubble_deep_field", "retina", "page", "text"),
    "stereo_motorcycle",
)
TEST_PHOTOGRAPHS = ("gravel", "moon", "china.jpg", "flower.jpg")


class Digits(NamedTuple):
    images: np.ndarray  # uint8 (N, 8, 8)
    labels: np.ndarray  # int (N,)


@cache
def load_digits(split: str) -> Digits:
    """The digits of a split of scenes."""
    images = getattr(open_data("digits"), split)
    pictures = [np.asarray(images.picture(index)) for index in range(len(images))]
    return Digits(np.stack(pictures), np.array(images.targets))


@cache
def load_photographs(split: str) -> tuple[np.ndarray, ...]:
    """Photographs (H, W, 3) uint8; the test has other photographs than training.

    Raises ValueError without the extra `examples`.
    """
    names = TEST_PHOTOGRAPHS if split == "test" else TRAINING_PHOTOGRAPHS
    return tuple(map(_photograph, names))


def _photograph(name: str) -> np.ndarray:
    try:
        import skimage.data
        from sklearn.datasets import load_sample_image
    except ImportError:
        raise ValueError(
            "scenes need photographs of scikit-image and scikit-learn: pip install "
            "'fullstride[examples]'"
        ) from None
    pixels = load_sample_image(name) if "." in name else getattr(skimage.data, name)()
    if isinstance(pixels, tuple):  # two views and their disparity
        pixels = pixels[0]
    return pixels if pixels.ndim == 3 else np.stack([pixels] * 3, 2)


KINDS = ("digits", "floor")
MIN_VISIBLE = 0.7  # fraction of a digit's pixels that other digits leave visible
MIN_CONTRAST = 60  # difference in mean grey level between a digit and its background
TRIES = 20  # to place a digit
TINT = (0.3, 1.0)  # factors of a photograph's channels
MIN_SIDE = 6  # pixels of a far digit, at least 5 of them above half

# The camera of the kind "floor" is level; lengths are in metres.
HORIZONS = (0.08, 0.7)  # row of the horizon from the top / side
FOCAL = 1.0  # focal length / side
CAMERA_HEIGHT = 1.5
DIGIT_HEIGHTS = (0.6, 1.2)  # below the camera's height: no digit reaches the horizon
MAX_DEPTH = 10.0  # farther pixels have no depth
PIXELS_PER_METRE = 60  # of the photograph on the floor


class Look(NamedTuple):
    """The number, size and clarity of a scene's digits."""

    most: int = 4  # digits; all numbers from 0 are equally frequent
    sides: tuple[float, float] = (0.22, 0.5)  # side of a digit / the scene's; not for "floor"
    is_plain: bool = False  # white digits on a photograph of half its brightness


LOOK = Look()
Photographs = Sequence[np.ndarray]


class Scene(NamedTuple):
    image: np.ndarray  # uint8 (side, side, 3)
    boxes: np.ndarray  # int (n, 4): left, top, right, bottom of the visible pixels; right exclusive
    labels: np.ndarray  # int (n,): which digit
    mask: np.ndarray  # uint8 (side, side): 1 + the number of the digit in front, 0: none
    depth: np.ndarray | None = None  # uint16 (side, side): millimetres, 0: none


class Sprite(NamedTuple):
    """A digit at its place."""

    alpha: np.ndarray  # float (h, w), 0..1; a digit's pixels are those above 0.5
    colour: np.ndarray  # (3,)
    label: int
    place: tuple[slice, slice]  # rows and columns of the scene
    depth: int = 0  # millimetres


def split_scene(
    number: int, side: int, seed: int, split: str, kind: str = "digits", look: Look = LOOK
) -> Scene:
    """Scene `number` of a split, a function of the arguments."""
    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    make = floor_scene if kind == "floor" else flat_scene
    return make(rng, load_digits(split), load_photographs(split), side, look)


def flat_scene(
    rng: np.random.Generator, digits: Digits, photographs: Photographs, side: int, look: Look
) -> Scene:
    """A square of a photograph with digits of random number, size, place and colour."""
    background = photograph_square(rng, photographs, side)
    background = background * np.float32(0.5) if look.is_plain else tinted(rng, background)
    smallest, largest = (round(share * side) for share in look.sides)

    def place() -> Sprite:
        index, size = rng.integers(len(digits.labels)), int(rng.integers(smallest, largest + 1))
        top, left = rng.integers(0, side - size + 1, 2)
        box = (slice(top, top + size), slice(left, left + size))
        colour = np.full(3, 255) if look.is_plain else rng.integers(0, 256, 3)
        return Sprite(resized(digits.images[index], size), colour, int(digits.labels[index]), box)

    return _scene(background, _place(rng, look.most, place, background))


def floor_scene(
    rng: np.random.Generator, digits: Digits, photographs: Photographs, side: int, look: Look
) -> Scene:
    """Digits that stand on a floor, which a level camera sees up to a horizon of random height."""
    horizon = rng.uniform(*HORIZONS) * side
    floor = floor_depths(horizon, side)
    background = photograph_square(rng, photographs, side).astype(np.float32)
    _lay_floor(rng, background, photographs[int(rng.integers(len(photographs)))], horizon)
    background = tinted(rng, background)
    rows = np.flatnonzero(floor)

    def place() -> Sprite:
        index, bottom = rng.integers(len(digits.labels)), int(rng.choice(rows))
        size = rng.uniform(*DIGIT_HEIGHTS) / CAMERA_HEIGHT * (bottom + 0.5 - horizon)
        alpha = resized(digits.images[index], max(round(size), MIN_SIDE))
        visible = np.flatnonzero((alpha > 0.5).any(1))  # a digit stands on its lowest pixels
        alpha = alpha[visible[0] : visible[-1] + 1, : min(alpha.shape[1], side)]
        alpha = alpha[max(len(alpha) - bottom - 1, 0) :]
        height, width = alpha.shape
        left = int(rng.integers(side - width + 1))
        box = (slice(bottom + 1 - height, bottom + 1), slice(left, left + width))
        colour = rng.integers(0, 256, 3)
        return Sprite(alpha, colour, int(digits.labels[index]), box, int(floor[bottom]))

    sprites = _place(rng, look.most, place, background)
    scene = _scene(background, sprites)
    depths = np.array([0, *(each.depth for each in sprites)], np.uint16)
    return scene._replace(depth=np.where(scene.mask > 0, depths[scene.mask], floor[:, None]))


def floor_depths(horizon: float, side: int) -> np.ndarray:
    """Millimetres of the floor along the camera's axis in each row, uint16; 0: none."""
    below = np.arange(side) + 0.5 - horizon
    with np.errstate(divide="ignore"):
        metres = FOCAL * side * CAMERA_HEIGHT / below
    return np.where((below > 0) & (metres <= MAX_DEPTH), np.round(1000 * metres), 0).astype("u2")


def compose(background: np.ndarray, sprites: Sequence[Sprite]) -> tuple[np.ndarray, np.ndarray]:
    """The image, float32, and the mask. Near digits hide far ones; at one depth the later wins."""
    image, mask = background.astype(np.float32), np.zeros(background.shape[:2], np.uint8)
    for number, each in sorted(enumerate(sprites, 1), key=lambda pair: -pair[1].depth):
        image[each.place] += each.alpha[..., None] * (each.colour - image[each.place])
        mask[each.place][each.alpha > 0.5] = number
    return image, mask


def photograph_square(
    rng: np.random.Generator, photographs: Sequence[np.ndarray], side: int
) -> np.ndarray:
    """A random square of a random photograph, in one of eight orientations."""
    photograph = photographs[int(rng.integers(len(photographs)))]
    height, width = photograph.shape[:2]
    size = int(rng.integers(min(height, width) // 4, min(height, width)))
    top, left = int(rng.integers(height - size + 1)), int(rng.integers(width - size + 1))
    square = Image.fromarray(photograph[top : top + size, left : left + size])
    pixels = np.asarray(square.resize((side, side), Image.Resampling.BILINEAR))
    pixels = np.rot90(pixels, int(rng.integers(4)))
    return pixels[:, ::-1] if rng.integers(2) else pixels


def tinted(rng: np.random.Generator, pixels: np.ndarray) -> np.ndarray:
    """Pixels (H, W, 3) in light of a random colour, float32.

    Most training photographs are grey, so without a tint every coloured pixel would be a digit's.
    """
    return pixels * rng.uniform(*TINT, 3).astype(np.float32)


def _place(
    rng: np.random.Generator, most: int, place: Callable[[], Sprite], background: np.ndarray
) -> list[Sprite]:
    """Random sprites that stand out from their background and leave enough of each visible."""
    sprites: list[Sprite] = []
    image, _ = compose(background, sprites)
    for _ in range(rng.integers(most + 1)):
        for _ in range(TRIES):
            sprite = place()
            behind = image[sprite.place][sprite.alpha > 0.5]
            if abs(sprite.colour.mean() - behind.mean()) < MIN_CONTRAST:
                continue
            after, mask = compose(background, [*sprites, sprite])
            if all(
                (mask[each.place] == number).sum() >= MIN_VISIBLE * (each.alpha > 0.5).sum()
                for number, each in enumerate([*sprites, sprite], 1)
            ):
                sprites.append(sprite)
                image = after
                break
    return sprites


def _lay_floor(
    rng: np.random.Generator, image: np.ndarray, photograph: np.ndarray, horizon: float
) -> None:
    """Draw the photograph, repeated in mirror images, as the floor of `image` (side, side, 3)."""
    side, start = len(image), rng.uniform(0, 1000, 2)
    quarters = (np.arange(4 * side) + 0.5) / 4 - horizon  # four samples a row: the floor is oblique
    quarters = quarters[quarters > 0]
    rows = len(quarters) // 4
    distance = FOCAL * side * CAMERA_HEIGHT / quarters[len(quarters) - 4 * rows :, None]
    across = (np.arange(side) + 0.5 - side / 2) * distance / (FOCAL * side)
    points = np.stack(np.broadcast_arrays(across, distance)) * PIXELS_PER_METRE
    points += start[:, None, None]
    for channel in range(3):
        samples = map_coordinates(photograph[..., channel], points, float, order=1, mode="mirror")
        image[side - rows :, :, channel] = samples.reshape(rows, 4, side).mean(1)


def resized(digit: np.ndarray, size: int) -> np.ndarray:
    """A digit's opacity, (size, size), 0..1."""
    picture = Image.fromarray(digit)
    return np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC)) / 255


def _scene(background: np.ndarray, sprites: Sequence[Sprite]) -> Scene:
    image, mask = compose(background, sprites)
    places = find_objects(mask.astype(int), len(sprites)) if sprites else []
    boxes = [(across.start, down.start, across.stop, down.stop) for down, across in places]
    boxes = np.reshape(boxes, (len(sprites), 4)).astype(int)
    labels = np.array([each.label for each in sprites], int)
    return Scene(image.astype(np.uint8), boxes, labels, mask)


# ---- clips of four directions of motion that no frame tells apart
#
# A digit moves by whole pixels in front of a photograph and comes back on the other side. The first
# place is uniform, so single frames have the same distribution in all four classes. A clip played
# backwards has the opposite direction, so a model that ignores the order of frames can only tell
# horizontal from vertical motion, and gets at most half of the clips right.


STEPS = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}  # rows and columns
FRAMES = 16
SIDES = (0.4, 0.7)  # side of a digit / the clip's
DIMMED = np.float32(0.4)  # brightness of the photograph
BRIGHT = (150, 256)  # channel values of a digit; exclusive
SPEEDS = (1, 2)  # pixels per frame


class Clip(NamedTuple):
    pixels: np.ndarray  # uint8 (T, side, side, 3)
    direction: str  # key of `STEPS`


def split_clip(number: int, side: int, seed: int, split: str, frames: int = FRAMES) -> Clip:
    """Clip `number` of a split, a function of the arguments. Directions alternate."""
    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    digits = load_digits(split)
    background = DIMMED * tinted(rng, photograph_square(rng, load_photographs(split), side))
    low, high = (round(share * side) for share in SIDES)
    digit = digits.images[rng.integers(len(digits.labels))]
    alpha = resized(digit, int(rng.integers(low, high + 1)))
    colour = rng.integers(*BRIGHT, 3)
    first, speed = rng.integers(0, side, 2), rng.integers(SPEEDS[0], SPEEDS[1] + 1)
    direction = [*STEPS][number % len(STEPS)]
    step = speed * np.array(STEPS[direction])
    return Clip(moving(background, alpha, colour, first, step, frames), direction)


def moving(
    background: np.ndarray,
    alpha: np.ndarray,
    colour: np.ndarray,
    first: np.ndarray,
    step: np.ndarray,
    frames: int,
) -> np.ndarray:
    """Draw a digit over a background (H, W, 3), from `first`, moving by `step` per frame.

    `alpha` is (h, w), 0..1; places are (row, column). The digit wraps around at the edges.
    """
    whole = np.zeros(background.shape[:2])
    whole[: len(alpha), : alpha.shape[1]] = alpha
    pixels = np.empty((frames, *background.shape), np.uint8)
    for number in range(frames):
        row, column = first + number * step
        at = np.roll(whole, (int(row), int(column)), (0, 1))[..., None]
        pixels[number] = background + at * (colour - background)
    return pixels
