"""Which location learns which object? Adaptive training sample selection.

Source: ATSS, arXiv:1912.02424. Letters: N images, M objects of the image that has most, A locations
of all levels, k candidates of a level.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import box_iou

CANDIDATES = 9  # k
ANCHOR = 8  # side of a location's square / its stride
INSIDE = 0.01  # pixels that the centre of a location is away from the sides of an object, or more


def locations(sizes: Sequence[tuple[int, int]], strides: Sequence[int], like: Tensor) -> Tensor:
    """(A, 2): x, y of the centres of all cells of maps of `sizes` (H, W), in pixels of the input.

    Level by level, in rows: as the maps, flattened.
    """
    levels = []
    for (h, w), stride in zip(sizes, strides, strict=True):
        x, y = (
            (torch.arange(count, dtype=torch.float32, device=like.device) + 0.5) * stride
            for count in (w, h)
        )
        levels.append(torch.stack((x.expand(h, w), y[:, None].expand(h, w)), -1).reshape(-1, 2))
    return torch.cat(levels)


@torch.no_grad()
def assign(
    points_a2: Tensor,
    level_sizes: Sequence[int],
    strides: Sequence[int],
    boxes_nm4: Tensor,
    is_object_nm: Tensor,
) -> Tensor:
    """(N, A): the index of the object that each location learns, or -1 for background.

    A location has a square anchor with a side of 8 strides. The candidates of an object are the 9
    locations of each level that are nearest to its centre, of equal distances those that come
    first. Those are positive whose anchor's IoU with the object is not below the mean plus the
    standard deviation (unbiased) over its candidates, and whose centre is inside the object. Of
    several objects, a location learns that of the highest IoU, of equal ones the first.

    Args:
        points_a2: The `locations`, in float32.
        level_sizes: The number of locations of each level.
        strides: Of each level.
        boxes_nm4: x1, y1, x2, y2 in pixels; M is 1 or more.
        is_object_nm: False for rows that only fill up images with fewer objects.
    """
    boxes = boxes_nm4.float()
    centres_nm2 = (boxes[..., :2] + boxes[..., 2:]) / 2
    candidates, first = [], 0
    for count in level_sizes:
        offsets = centres_nm2[:, :, None] - points_a2[first : first + count]
        order = offsets.square().sum(-1).argsort(dim=-1, stable=True)
        candidates.append(first + order[..., :CANDIDATES])
        first += count
    candidate_nmc = torch.cat(candidates, -1)
    halves = [ANCHOR / 2 * stride for stride in strides]
    half_a1 = torch.cat(
        [points_a2.new_full((n, 1), half) for n, half in zip(level_sizes, halves, strict=True)]
    )
    anchors_a4 = torch.cat((points_a2 - half_a1, points_a2 + half_a1), 1)
    iou_nma = box_iou(boxes.flatten(0, 1), anchors_a4).unflatten(0, boxes.shape[:2])
    iou_nmc = iou_nma.gather(-1, candidate_nmc)
    threshold_nm1 = iou_nmc.mean(-1, keepdim=True) + iou_nmc.std(-1, keepdim=True)
    near_nmc2 = points_a2[candidate_nmc]
    margins = torch.cat((near_nmc2 - boxes[:, :, None, :2], boxes[:, :, None, 2:] - near_nmc2), -1)
    positive_nmc = (iou_nmc >= threshold_nm1) & (margins.amin(-1) > INSIDE)
    positive_nmc &= is_object_nm[..., None]
    claimed_nma = torch.full_like(iou_nma, -1.0)
    claimed_nma.scatter_(-1, candidate_nmc, torch.where(positive_nmc, iou_nmc, -1.0))
    best_na, object_na = claimed_nma.max(1)
    return torch.where(best_na >= 0, object_na, -1)
