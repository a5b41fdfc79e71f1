"""What does a detector minimise? Focal loss of classes, GIoU of boxes, and that of centre-ness.

Source: ATSS, arXiv:1912.02424, and FCOS, arXiv:1904.01355. Letters: N images, M objects of the
image that has most, A locations.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

from fullstride.tasks.detect.atss import assign
from fullstride.tasks.detect.fcos import Predictions, decode_boxes
from fullstride.tasks.processes import mean_over_processes
from fullstride.tasks.pyramid import Pyramid

Objects = Mapping[str, Tensor]  # boxes (n, 4) in pixels, labels (n,) and difficult (n,) of an image


def detection_loss(
    predictions: Predictions, targets: Sequence[Objects], *, box_weight: float = 2.0
) -> Tensor:
    """The sum of three losses, each of them finite for images without objects too.

    Classes: focal loss (0.25, 2) over all locations / positives. Boxes: GIoU weighted by the
    centre-ness target / the sum of these, times `box_weight`. Centre-ness: binary cross-entropy /
    positives. Both divisors are means over all processes. Difficult objects, and crowds, are not
    learned: their locations are background.
    """
    boxes_nm4, labels_nm, is_object_nm = padded(targets, predictions.points_a2)
    points, sizes = predictions.points_a2, predictions.level_sizes
    object_na = assign(points, sizes, Pyramid.strides, boxes_nm4, is_object_nm)
    positive_na = object_na >= 0
    index_na = object_na.clamp(min=0)
    logits_nak = predictions.classes_nak
    wanted_nak = torch.zeros_like(logits_nak)
    label_na1 = labels_nm.gather(1, index_na)[..., None]
    wanted_nak.scatter_(2, label_na1, positive_na[..., None].to(wanted_nak.dtype))
    classes = sigmoid_focal_loss(logits_nak, wanted_nak, alpha=0.25, gamma=2, reduction="sum")

    boxes_na4 = boxes_nm4.gather(1, index_na[..., None].expand(-1, -1, 4))
    wanted_p4 = boxes_na4[positive_na]
    centre_p = centerness(points.expand(len(boxes_na4), -1, -1)[positive_na], wanted_p4)
    giou_p = generalized_box_iou_loss(decode_boxes(predictions)[positive_na], wanted_p4)
    centres = F.binary_cross_entropy_with_logits(
        predictions.centerness_na[positive_na], centre_p, reduction="sum"
    )
    sums = mean_over_processes(torch.stack((positive_na.sum().to(centre_p.dtype), centre_p.sum())))
    count, weight = sums[0].clamp(min=1), sums[1].clamp(min=1e-6)
    return (classes + centres) / count + box_weight * (giou_p * centre_p).sum() / weight


def centerness(points_p2: Tensor, boxes_p4: Tensor) -> Tensor:
    """(P,): 1 in the middle of a box, and 0 at its sides; `points_p2` are inside."""
    low, high = points_p2 - boxes_p4[:, :2], boxes_p4[:, 2:] - points_p2
    return (torch.minimum(low, high) / torch.maximum(low, high)).prod(1).sqrt()


def padded(targets: Sequence[Objects], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes (N, M, 4), labels (N, M), and which rows are objects to learn (N, M); M is 1 or more.

    No difficult objects are, nor the rows that fill up images with fewer than M.
    """
    most = max(1, *(len(each["boxes"]) for each in targets))
    boxes = like.new_zeros(len(targets), most, 4)
    labels = torch.zeros(len(targets), most, dtype=torch.long, device=like.device)
    is_object = torch.zeros(len(targets), most, dtype=torch.bool, device=like.device)
    for row, each in enumerate(targets):
        count = len(each["boxes"])
        boxes[row, :count] = each["boxes"].to(boxes.dtype)
        labels[row, :count] = each["labels"]
        is_object[row, :count] = ~each["difficult"]
    return boxes, labels, is_object
