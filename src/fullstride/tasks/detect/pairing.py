"""Do two ways to compute a network find the same boxes? Detections are paired, not rows.

The order of equal scores, and so of rows, may differ. Letters: N images, D detections of each.
"""

import torch
from torch import Tensor

SURE = 0.5  # score of detections that users see
CLOSE_PIXELS, CLOSE_SCORES = 2.0, 0.1  # between partners that users take for the same
COMPARED = 0.1  # score of detections that are compared; fainter ones may miss a threshold
PIXEL = 1e-3  # of a difference: as much as a thousandth of a score


def distances(a_nd6: Tensor, b_nd6: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels between the sides of all pairs, infinite for other classes, and between scores.

    Both (N, D, D).
    """
    pixels = (a_nd6[:, :, None, :4] - b_nd6[:, None, :, :4]).abs().amax(-1)
    same = a_nd6[:, :, None, 5].round() == b_nd6[:, None, :, 5].round()
    scores = (a_nd6[:, :, None, 4] - b_nd6[:, None, :, 4]).abs()
    return torch.where(same, pixels, torch.inf), scores


def predict_alike(a_nd6: Tensor, b_nd6: Tensor) -> Tensor:
    """(N,) of bool: whether every sure detection has a close one of its class in the other."""
    pixels_ndd, scores_ndd = distances(a_nd6, b_nd6)
    close = (pixels_ndd <= CLOSE_PIXELS) & (scores_ndd <= CLOSE_SCORES)
    fine_a = close.any(2) | (a_nd6[..., 4] < SURE)
    fine_b = close.any(1) | (b_nd6[..., 4] < SURE)
    return fine_a.all(1) & fine_b.all(1)


def difference(a_nd6: Tensor, b_nd6: Tensor) -> float:
    """The largest distance of a detection from its nearest in the other, of `PIXEL`s and scores.

    One without another of its class differs by its score.
    """
    pixels_ndd, scores_ndd = distances(a_nd6, b_nd6)
    apart_ndd = torch.maximum(PIXEL * pixels_ndd, scores_ndd)
    largest = 0.0
    for rows, dim in ((a_nd6, 2), (b_nd6, 1)):
        apart_nd = torch.minimum(apart_ndd.amin(dim), rows[..., 4])
        compared = rows[..., 4] >= COMPARED
        largest = max(largest, *apart_nd[compared].tolist(), 0.0)
    return largest
