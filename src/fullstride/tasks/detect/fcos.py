"""The head of FCOS, its loss, and the post-processing in evaluation.

Source: FCOS, arXiv:1904.01355 and arXiv:2006.09214: centre-ness beside the boxes, distances in
strides with a learnable scale for each level, group norm in both towers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_iou, generalized_box_iou_loss, sigmoid_focal_loss

from fullstride.io.console import print_note
from fullstride.tasks.dense import Pyramid
from fullstride.tasks.task import full_precision, mean_over_processes

# The assignment of objects to locations by adaptive training sample selection.
#
# Source: ATSS, arXiv:1912.02424. Letters: N images, M most objects of an image, A locations of all
# levels, k candidates of a level.

CANDIDATES = 9  # k
ANCHOR = 8  # side of a location's square / stride
INSIDE = 0.01  # least pixels from the centre of a location to the sides of an object


def locations(sizes: Sequence[tuple[int, int]], strides: Sequence[int], like: Tensor) -> Tensor:
    """(A, 2): x, y of the centres of the cells of maps of `sizes` (H, W), in pixels of the input.

    The order is level by level, row by row.
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
    locations of each level nearest to the object's centre; the first ones among equal distances. A
    candidate is positive if the IoU of its anchor and the object reaches the mean plus the standard
    deviation (unbiased) over the object's candidates, and if its centre is inside the object. A
    location that is positive for several objects learns the first object with the highest IoU.

    Args:
        points_a2: The `locations`, in float32.
        level_sizes: The number of locations of each level.
        strides: The stride of each level.
        boxes_nm4: x1, y1, x2, y2 in pixels; M is 1 or more.
        is_object_nm: False for rows that only pad images with fewer objects.
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
    half_a1 = ANCHOR / 2 * level_strides(level_sizes, strides, points_a2)[:, None]
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


# Non-maximum suppression with fixed shapes.
#
# Letters: N images, A boxes, C candidate boxes, D detections. PyTorch and exported files share this
# code: there is no loop over images, and no shape depends on data.

CANDIDATES_OF_IMAGE = 1000  # most boxes, by score, that are compared
COLUMNS = 6  # of a detection: x1, y1, x2, y2, score, class
NO_CLASS = -1  # of rows without a detection


def top(scores_na: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """The `limit` highest scores, or all scores if fewer, falling, and their indices: (N, C)."""
    return scores_na.topk(torch.sym_min(limit, scores_na.shape[1]), dim=1)


def suppress(
    boxes_nc4: Tensor, labels_nc: Tensor, scores_nc: Tensor, *, iou: float, rounds: int = 32
) -> Tensor:
    """(N, C) of bool: which candidates remain; they are sorted by falling score.

    A candidate remains if its score is above 0 and no remaining candidate of the same class before
    it overlaps by more than `iou`. Each round decides all candidates by the results of the round
    before, so that the first r candidates of any chain are right after r rounds.
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
    """(N, C, C): the IoU of all pairs of boxes of an image; 0 for empty boxes."""
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
    candidates: int = CANDIDATES_OF_IMAGE,
    limit: int = 100,
) -> Tensor:
    """(N, `limit`, 6): x1, y1, x2, y2, score and class, sorted by falling score.

    Suppression compares the `candidates` boxes of each image with the highest scores above 0. Rows
    without a detection are 0, with class -1.
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
    # pad to at least `limit` rows, then cut to `limit`
    rows = F.pad(rows, (0, 0, 0, limit))[:, :limit]
    return rows + rows.new_tensor([0.0] * (COLUMNS - 1) + [NO_CLASS])


GROUPS, GROUP_CHANNELS = 32, 8  # of group norm: most groups, least channels of a group
PRIOR = 0.01  # probability of every class before training (arXiv:1708.02002)
START_DISTANCE = 2.0  # strides to each side before training; at 0 the gradient of ReLU is dead

MIN_SCORE = 0.05  # least class probability of a candidate box
MAX_IOU = 0.6  # most of two detections of one class
PER_LEVEL = 1000  # most candidates of a level, the best by score


class Predictions(NamedTuple):
    """The head's outputs for A locations of N images, from which `detection_loss` is computed."""

    classes_nak: Tensor  # logits
    distances_na4: Tensor  # to the left, top, right and bottom, in strides, 0 or more
    centerness_na: Tensor  # logits
    points_a2: Tensor  # x, y of the locations, in pixels of the input
    level_sizes: tuple[int, ...]  # locations of each level; their sum is A


class FcosHead(nn.Module):
    """Maps of a network -> `Predictions` in training, detections (N, 100, 6) in evaluation.

    A detection is x1, y1, x2, y2 in pixels of the input, the score sqrt(class probability *
    centre-ness), and the class; see `detections`.
    """

    class_rows: ClassVar[Mapping[str, int]] = {"classes": 1}  # see `Backbone.class_rows`

    def __init__(
        self,
        channels: Sequence[int],
        strides: Sequence[int],
        classes: int,
        *,
        width: int = 256,
        convs: int = 4,
        candidates: int = CANDIDATES_OF_IMAGE,
    ):
        super().__init__()
        self.candidates = candidates
        if width < GROUP_CHANNELS or width % GROUP_CHANNELS:
            raise ValueError(f"head_width {width}: use a multiple of {GROUP_CHANNELS}")
        self.stride = strides[0]
        self.pyramid = Pyramid(channels, strides, width=width)
        self.class_tower = tower(width, convs)
        self.box_tower = tower(width, convs)
        self.classes = nn.Conv2d(width, classes, 3, padding=1)
        self.distances = nn.Conv2d(width, 4, 3, padding=1)
        self.centerness = nn.Conv2d(width, 1, 3, padding=1)
        self.scales = nn.Parameter(torch.ones(len(Pyramid.strides)))
        towers = self.class_tower, self.box_tower
        for part in (*towers, self.classes, self.distances, self.centerness):
            normal_weights(part)
        biases = {self.classes: -math.log((1 - PRIOR) / PRIOR), self.distances: START_DISTANCE}
        for conv, bias in biases.items():
            assert conv.bias is not None
            nn.init.constant_(conv.bias, bias)

    def forward(self, maps: Sequence[Tensor]) -> Predictions | Tensor:
        predictions = self.predict(maps)
        if self.training:
            return predictions
        h, w = (side * self.stride for side in maps[0].shape[-2:])
        return self.detect(predictions, h, w)

    def predict(self, maps: Sequence[Tensor]) -> Predictions:
        levels = self.pyramid(maps)
        sizes = [(level.shape[2], level.shape[3]) for level in levels]
        classes, distances, centerness = [], [], []
        for level, scale in zip(levels, self.scales, strict=True):
            x = self.box_tower(level)
            classes.append(rows(self.classes(self.class_tower(level))))
            distances.append(rows((self.distances(x) * scale).relu()))
            centerness.append(rows(self.centerness(x)))
        return Predictions(
            full_precision(torch.cat(classes, 1)),
            full_precision(torch.cat(distances, 1)),
            # an index in place of `squeeze` is a gather, whose axes OpenVINO misplaces in int8
            full_precision(torch.cat(centerness, 1)).squeeze(-1),
            locations(sizes, Pyramid.strides, levels[0]),
            tuple(h * w for h, w in sizes),
        )

    def detect(self, predictions: Predictions, h: int, w: int) -> Tensor:
        """(N, 100, 6) for images of `h` x `w` pixels, to which boxes are clipped."""
        boxes_na4 = decode_boxes(predictions)
        limit = torch.tensor([w, h, w, h], dtype=boxes_na4.dtype, device=boxes_na4.device)
        boxes_na4 = torch.minimum(boxes_na4.clamp(min=0), limit)
        probability_nak = predictions.classes_nak.sigmoid()
        centre_na1 = predictions.centerness_na[..., None].sigmoid()
        score_nak = (probability_nak * centre_na1).sqrt()
        score_nak = torch.where(probability_nak > MIN_SCORE, score_nak, 0.0)
        classes, first = score_nak.shape[2], 0
        scores, boxes, labels = [], [], []
        for count in predictions.level_sizes:
            level = score_nak[:, first : first + count].flatten(1)
            score_nc, index_nc = top(level, PER_LEVEL)
            place = torch.div(index_nc, classes, rounding_mode="floor")
            scores.append(score_nc)
            labels.append(index_nc - place * classes)
            boxes.append(boxes_na4.gather(1, (first + place)[..., None].expand(-1, -1, 4)))
            first += count
        parts = (torch.cat(each, 1) for each in (boxes, labels, scores))
        return detections(*parts, iou=MAX_IOU, candidates=self.candidates)


def decode_boxes(predictions: Predictions) -> Tensor:
    """(N, A, 4): x1, y1, x2, y2 in pixels of the input."""
    points = predictions.points_a2
    strides = level_strides(predictions.level_sizes, Pyramid.strides, points)
    distances = predictions.distances_na4 * strides[:, None]
    return torch.cat((points - distances[..., :2], points + distances[..., 2:]), -1)


def level_strides(level_sizes: Sequence[int], strides: Sequence[int], like: Tensor) -> Tensor:
    """(A,): the stride of each location."""
    pairs = zip(level_sizes, strides, strict=True)
    return torch.cat([like.new_full((count,), stride) for count, stride in pairs])


def rows(x: Tensor) -> Tensor:
    """(N, C, H, W) -> (N, H W, C)."""
    return x.flatten(2).transpose(1, 2)


def tower(width: int, convs: int) -> nn.Sequential:
    """`convs` 3 x 3 convolutions, each with group norm and ReLU.

    A group has at least 8 channels: normalised over few values, it would be near 0 on maps of one
    pixel.
    """
    layers: list[nn.Module] = []
    for _ in range(convs):
        layers += [
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(math.gcd(GROUPS, width // GROUP_CHANNELS), width),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


def normal_weights(module: nn.Module) -> None:
    """Weights with a standard deviation of 0.01, and biases of 0 (arXiv:1708.02002)."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.normal_(part.weight, std=0.01)
            assert part.bias is not None
            nn.init.zeros_(part.bias)


# The loss: focal loss of classes, GIoU of boxes, and cross-entropy of centre-ness.
#
# Source: ATSS, arXiv:1912.02424, and FCOS, arXiv:1904.01355. Letters: N images, M most objects of
# an image, A locations.

Objects = Mapping[str, Tensor]  # boxes (n, 4) in pixels, labels (n,) and difficult (n,) of an image


def detection_loss(
    predictions: Predictions, targets: Sequence[Objects], *, box_weight: float = 2.0
) -> Tensor:
    """The sum of three losses, each finite for images without objects too.

    Classes: focal loss (0.25, 2) over all locations / positives. Boxes: GIoU loss weighted by
    centre-ness targets / the sum of the weights, times `box_weight`. Centre-ness: binary
    cross-entropy / positives. Both divisors are means over all processes. Difficult objects and
    crowds are not learned: their locations are background.
    """
    boxes_nm4, labels_nm, is_object_nm = pad_targets(targets, predictions.points_a2)
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
    if not len(wanted_p4) and is_object_nm.any():
        print_note(
            "a batch teaches no object, as none of its boxes has a location of the detector inside "
            "that fits: with a larger --resolution boxes have more pixels"
        )
    centre_p = centerness(points.expand(len(boxes_na4), -1, -1)[positive_na], wanted_p4)
    giou_p = generalized_box_iou_loss(decode_boxes(predictions)[positive_na], wanted_p4)
    centres = F.binary_cross_entropy_with_logits(
        predictions.centerness_na[positive_na], centre_p, reduction="sum"
    )
    sums = mean_over_processes(torch.stack((positive_na.sum().to(centre_p.dtype), centre_p.sum())))
    count, weight = sums[0].clamp(min=1), sums[1].clamp(min=1e-6)
    return (classes + centres) / count + box_weight * (giou_p * centre_p).sum() / weight


def centerness(points_p2: Tensor, boxes_p4: Tensor) -> Tensor:
    """(P,): 1 in the middle of a box and 0 at its sides, for points inside boxes."""
    low, high = points_p2 - boxes_p4[:, :2], boxes_p4[:, 2:] - points_p2
    return (torch.minimum(low, high) / torch.maximum(low, high)).prod(1).sqrt()


def pad_targets(targets: Sequence[Objects], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes (N, M, 4), labels (N, M), and which rows are objects to learn (N, M); M is 1 or more.

    Difficult objects and rows of padding are not learned.
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
