"""How are boxes shown to people? Rectangles in the colours of their classes, with names."""

import colorsys
from collections.abc import Sequence

from PIL import Image, ImageDraw

from fullstride.tasks.detect.guess import Box

SHOWN = 0.3  # score from which a box is drawn
GOLDEN = 0.618034  # of the circle of hues, by which each class differs from the one before


def draw_boxes(picture: Image.Image, guesses: Sequence[Box], classes: Sequence[str]) -> Image.Image:
    """A copy of `picture` with the boxes of a score of `SHOWN` or more, the highest on top."""
    image = picture.convert("RGB")
    pen = ImageDraw.Draw(image)
    width = max(1, round(min(image.size) / 200))
    size = max(10, round(min(image.size) / 40))
    for guess in reversed(guesses):
        if guess.probability < SHOWN:
            continue
        left, top, right, bottom = guess.box
        colour = class_colour(list(classes).index(guess.label))
        pen.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=width)
        text = f"{' '.join(guess.label.split())} {100 * guess.probability:.0f} %"
        box = pen.textbbox((left, top), text, anchor="lb", font_size=size)
        shift = max(0, -box[1])  # names of boxes at the upper edge are inside
        pen.rectangle((box[0], box[1] + shift, box[2], box[3] + shift), fill=colour)
        pen.text((left, top + shift), text, fill="black", anchor="lb", font_size=size)
    return image


def class_colour(index: int) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(index * GOLDEN % 1, 0.7, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)
