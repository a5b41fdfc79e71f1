"""What is done with a value for each pixel? Maps are stacked, and put back on their picture."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullstride.data.readers.decode import Size
from fullstride.data.transforms.geometry import view_geometry
from fullstride.data.transforms.masks import nearest
from fullstride.nets.preprocessing import Preprocessing


def stacked(maps: list[Any]) -> Tensor:
    """Arrays (H, W) of N images -> (N, H, W); N may be 0."""
    return torch.from_numpy(np.stack(maps)) if maps else torch.empty(0)


def on_picture(values: np.ndarray, size: Size, pre: Preprocessing, outside: float) -> np.ndarray:
    """The map of a view, (side, side), on the pixels of its picture: the nearest values, (h, w).

    `outside` is the value of pixels that the view does not show.
    """
    geometry = view_geometry(size, pre)
    columns = (np.arange(size[0]) + 0.5) * geometry.scale_x - geometry.left
    rows = (np.arange(size[1]) + 0.5) * geometry.scale_y - geometry.top
    return nearest(values, rows, columns, outside)
