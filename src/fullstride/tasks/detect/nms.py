"""Which of many overlapping boxes remain? Non-maximum suppression with shapes that are fixed.

Letters: N images, A boxes, C candidates among them, D detections. One code for PyTorch and for
exported files: there is no loop over images, and no shape depends on data.
"""

import torch
from torch import Tensor

COLUMNS = 6  # of a detection: x1, y1, x2, y2, score, class
NO_CLASS = -1  # of rows without a detection


def top(scores_na: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """The `limit` highest scores, or all of fewer, and their indices: both (N, C), falling."""
    return scores_na.topk(torch.sym_min(limit, scores_na.shape[1]), dim=1)


def suppress(
    boxes_nc4: Tensor, labels_nc: Tensor, scores_nc: Tensor, *, iou: float, rounds: int = 32
) -> Tensor:
    """(N, C) of bool: which candidates remain. They are sorted by falling score.

    A candidate remains if its score is above 0 and no remaining one of the same class before it
    overlaps by more than `iou`. In each round all are decided by the results of the round before,
    so that the first r candidates of any chain are right after r rounds.
    """
    count = boxes_nc4.shape[1]
    order = torch.arange(count, device=boxes_nc4.device)
    conflicts = (overlaps(boxes_nc4) > iou) & (labels_nc[:, :, None] == labels_nc[:, None])
    conflicts = (conflicts & (order[:, None] < order)).to(scores_nc.dtype)
    present = scores_nc > 0
    remain = present
    for _ in range(rounds):
        suppressing = remain.to(scores_nc.dtype)[:, None] @ conflicts
        remain = present & (suppressing[:, 0] == 0)
    return remain


def overlaps(boxes_nc4: Tensor) -> Tensor:
    """(N, C, C): the IoU of all pairs of boxes of an image; 0 of empty ones."""
    low, high = boxes_nc4[..., :2], boxes_nc4[..., 2:]
    areas = (high - low).clamp(min=0).prod(-1)
    both = torch.minimum(high[:, :, None], high[:, None]) - torch.maximum(
        low[:, :, None], low[:, None]
    )
    inter = both.clamp(min=0).prod(-1)
    union = areas[:, :, None] + areas[:, None] - inter
    return inter / union.clamp(min=1e-9)


def detections(
    boxes_na4: Tensor,
    labels_na: Tensor,
    scores_na: Tensor,
    *,
    iou: float,
    candidates: int = 1000,
    limit: int = 100,
) -> Tensor:
    """(N, `limit`, 6): x1, y1, x2, y2, score and class, sorted by falling score.

    Of each image the `candidates` boxes of the highest scores are compared; those with score 0 are
    no candidates. Rows without a detection are 0, with class -1.
    """
    scores_nc, index_nc = top(scores_na, candidates)
    boxes_nc4 = boxes_na4.gather(1, index_nc[..., None].expand(-1, -1, 4))
    labels_nc = labels_na.gather(1, index_nc)
    remain_nc = suppress(boxes_nc4, labels_nc, scores_nc, iou=iou)
    scores_nd, index_nd = top(torch.where(remain_nc, scores_nc, 0.0), limit)
    boxes_nd4 = boxes_nc4.gather(1, index_nd[..., None].expand(-1, -1, 4))
    labels_nd = labels_nc.gather(1, index_nd).to(scores_nd.dtype)
    rows = torch.cat((boxes_nd4, scores_nd[..., None], labels_nd[..., None] - NO_CLASS), -1)
    rows = torch.where(scores_nd[..., None] > 0, rows, 0.0)
    # `limit` rows are added, and as many as there are too many are taken away
    rows = torch.nn.functional.pad(rows, (0, 0, 0, limit))[:, :limit]
    return rows + rows.new_tensor([0.0] * (COLUMNS - 1) + [NO_CLASS])
