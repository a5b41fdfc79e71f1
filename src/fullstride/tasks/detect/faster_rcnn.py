"""The head of Faster R-CNN over P3 to P7, with torchvision's parts in training.

Source: ResNet-RS, arXiv:2103.07579, appendix F, with the numbers of its code base (tensorflow/tpu)
where the paper has none: anchors of 8 strides, three ratios, a box head of four convolutions and a
fully connected layer of 1024, the Huber loss of its boxes with delta 1. torchvision has 1/9 there,
which the loss of the proposals keeps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image, roi_align
from torchvision.ops.poolers import LevelMapper

from fullstride.nets.backbone import Backbone, Masks
from fullstride.tasks.dense import Pyramid
from fullstride.tasks.detect import fcos
from fullstride.tasks.task import full_precision

RATIOS = (0.5, 1.0, 2.0)  # height / width of the anchors of a location
PER_LEVEL, PROPOSALS = 2000, 1000  # in training: the best of a level, and of an image after NMS
PER_LEVEL_TEST = 1000
PROPOSAL_IOU, MAX_IOU = 0.7, 0.5  # most of two proposals, and of two detections of one class
MIN_SCORE = 0.05  # least class probability of a candidate box
POOLED, SAMPLES = 7, 2  # cells a side of a proposal, and samples a side of a cell
HUBER_DELTA = 1.0  # of the box loss
CANONICAL_SIDE, CANONICAL_LEVEL = 224, 4  # a proposal with this side is pooled from P4


class Anchors(nn.Module):
    """Boxes around the centres of all cells; the area is (8 strides)², whatever the ratio."""

    def forward(self, images: ImageList, features: list[Tensor]) -> list[Tensor]:
        """(A, 4) for each image, in the order of `AnchorGenerator`: cell by cell, then ratio."""
        return [anchors(features)] * len(images.image_sizes)


def anchors(maps: Sequence[Tensor]) -> Tensor:
    """(A, 4): x1, y1, x2, y2 of the anchors of `maps`, level by level."""
    levels = []
    for x, stride in zip(maps, Pyramid.strides, strict=True):
        points = fcos.locations([(x.shape[2], x.shape[3])], [stride], x)
        side, ratios = float(fcos.ANCHOR * stride), torch.tensor(RATIOS, device=x.device)
        half_h, half_w = side * ratios.sqrt() / 2, side / ratios.sqrt() / 2
        around = torch.stack((-half_w, -half_h, half_w, half_h), 1)
        levels.append((points.repeat(1, 2)[:, None] + around).reshape(-1, 4))
    return torch.cat(levels)


class ProposalHead(RPNHead):
    """torchvision's head with float32 outputs under any precision, as boxes depend on them."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        objectness, deltas = super().forward(x)
        return [full_precision(each) for each in objectness], [full_precision(d) for d in deltas]


class FasterRcnnHead(nn.Module):
    """Maps and targets -> losses by name in training; maps -> detections (N, 100, 6) in evaluation.

    Maps without targets in training -> the numbers that decide the boxes, see `before_boxes`.
    A detection is x1, y1, x2, y2 in pixels of the input, the probability, and the class. Shapes in
    evaluation do not depend on data, so that exported files have the same code.
    """

    class_rows: ClassVar[Mapping[str, int]] = {  # see `Backbone.class_rows`
        "roi.box_predictor.cls_score": 1,
        "roi.box_predictor.bbox_pred": 4,
    }

    def __init__(
        self,
        channels: Sequence[int],
        strides: Sequence[int],
        classes: int,
        *,
        width: int = 256,
        convs: int = 4,
        hidden: int = 1024,
        candidates: int = fcos.CANDIDATES_OF_IMAGE,
    ):
        super().__init__()
        self.candidates = candidates
        self.stride = strides[0]
        self.pyramid = Pyramid(channels, strides, width=width)
        self.rpn = RegionProposalNetwork(
            Anchors(),  # pyright: ignore[reportArgumentType]  # torchvision's lie between cells
            ProposalHead(width, len(RATIOS)),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": PER_LEVEL, "testing": PER_LEVEL_TEST},
            post_nms_top_n={"training": PROPOSALS, "testing": PROPOSALS},
            nms_thresh=PROPOSAL_IOU,
        )
        self.roi = RoIHeads(
            pooling(),
            FastRCNNConvFCHead((width, POOLED, POOLED), [width] * convs, [hidden]),
            FastRCNNPredictor(hidden, classes + 1),
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            batch_size_per_image=512,
            positive_fraction=0.25,
            bbox_reg_weights=None,
            score_thresh=MIN_SCORE,
            nms_thresh=MAX_IOU,
            detections_per_img=100,
        )

    def forward(
        self, maps: Sequence[Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | tuple[Tensor, ...] | Tensor:
        levels = self.pyramid(maps)
        h, w = (side * self.stride for side in maps[0].shape[-2:])
        if not self.training:
            return self.detect(levels, h, w)
        if targets is None:
            return self.before_boxes(levels)
        return self.losses(levels, [objects_of(each) for each in targets], h, w)

    # ---- training

    def losses(
        self, levels: list[Tensor], targets: list[dict[str, Tensor]], h: int, w: int
    ) -> dict[str, Tensor]:
        """The four losses, each a mean over samples."""
        sizes, features = [(h, w)] * len(targets), levels_by_name(levels)
        proposals, first = self.rpn(ImageList(levels[0], sizes), features, targets)
        roi: Any = self.roi
        proposals, _, labels, regression = roi.select_training_samples(proposals, targets)
        pooled = roi.box_roi_pool(features, proposals, sizes)
        logits, deltas = roi.box_predictor(roi.box_head(pooled))
        class_loss, box_loss = roi_losses(logits, deltas, torch.cat(labels), torch.cat(regression))
        return {
            "proposal_class": first["loss_objectness"],
            "proposal_box": first["loss_rpn_box_reg"],
            "class": class_loss,
            "box": box_loss,
        }

    def before_boxes(self, levels: list[Tensor]) -> tuple[Tensor, ...]:
        """Objectness and box deltas of all anchors, then logits and box deltas of some.

        They change smoothly with the layers. Up to `PROPOSALS` anchors at equal distances stand for
        proposals, which would be other boxes after a small change.
        """
        objectness, deltas = (
            torch.cat([*map(fcos.rows, each)], 1) for each in self.rpn.head(levels)
        )
        boxes = anchors(levels)
        boxes = boxes[:: math.ceil(len(boxes) / PROPOSALS)].expand(len(objectness), -1, -1)
        roi: Any = self.roi
        return objectness, deltas, *roi.box_predictor(roi.box_head(pool(levels, boxes)))

    # ---- evaluation

    def detect(self, levels: list[Tensor], h: int, w: int) -> Tensor:
        """(N, 100, 6) for images of `h` x `w` pixels, to which boxes are clipped."""
        proposals_nr4, present_nr = self.proposals(levels, h, w)
        n, r = proposals_nr4.shape[:2]
        roi: Any = self.roi
        pooled = pool(levels, proposals_nr4)
        logits, deltas = roi.box_predictor(roi.box_head(pooled))
        probability = full_precision(logits).softmax(-1)[:, 1:]  # 0 is the background
        boxes = roi.box_coder.decode_single(full_precision(deltas), proposals_nr4.flatten(0, 1))
        boxes = clip_boxes_to_image(boxes.reshape(n * r, -1, 4)[:, 1:], (h, w))
        k = probability.shape[1]
        probability = probability * present_nr.flatten()[:, None]
        scores_na = torch.where(probability > MIN_SCORE, probability, 0.0).reshape(n, r * k)
        labels_na = torch.arange(k, device=logits.device).repeat(r).expand(n, -1)
        boxes_na4 = boxes.reshape(n, r * k, 4)
        return fcos.detections(
            boxes_na4, labels_na, scores_na, iou=MAX_IOU, candidates=self.candidates
        )

    def proposals(self, levels: list[Tensor], h: int, w: int) -> tuple[Tensor, Tensor]:
        """(N, R, 4), the best region proposals, and bool (N, R), which rows have a proposal."""
        rpn: Any = self.rpn
        objectness, deltas = rpn.head(levels)
        all_anchors, first = anchors(levels), 0
        boxes, scores = [], []
        for level, logits_map, deltas_map in zip(levels, objectness, deltas, strict=True):
            count = level.shape[2] * level.shape[3] * len(RATIOS)
            score_nc, index_nc = fcos.top(fcos.rows(logits_map).flatten(1), PER_LEVEL_TEST)
            delta_na4 = fcos.rows(deltas_map).reshape(level.shape[0], count, 4)
            delta_nc4 = delta_na4.gather(1, index_nc[..., None].expand(-1, -1, 4))
            anchor_nc4 = all_anchors[first : first + count][index_nc]
            decoded = rpn.box_coder.decode_single(delta_nc4.flatten(0, 1), anchor_nc4.flatten(0, 1))
            box_nc4 = clip_boxes_to_image(decoded, (h, w)).reshape_as(delta_nc4)
            sides = box_nc4[..., 2:] - box_nc4[..., :2]
            score_nc = score_nc.sigmoid() * (sides.amin(-1) >= rpn.min_size)
            # boxes without an area come last
            score_nc, order = fcos.top(score_nc, score_nc.shape[1])
            box_nc4 = box_nc4.gather(1, order[..., None].expand(-1, -1, 4))
            remain = fcos.suppress(box_nc4, torch.zeros_like(order), score_nc, iou=PROPOSAL_IOU)
            boxes.append(box_nc4)
            scores.append(score_nc * remain)
            first += count
        score_nr, index_nr = fcos.top(torch.cat(scores, 1), PROPOSALS)
        box_nr4 = torch.cat(boxes, 1).gather(1, index_nr[..., None].expand(-1, -1, 4))
        return box_nr4, score_nr > 0


class WithTargets(nn.Module):
    """Images, masks and targets -> the losses of a head that takes targets."""

    def __init__(self, net: Backbone):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, masks: Masks | None, targets: Any) -> Any:
        head = self.net.task_head
        assert head is not None
        return head(self.net.head_input(x, masks), targets)


def roi_losses(
    logits: Tensor, deltas: Tensor, labels_s: Tensor, regression_s4: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and the Huber loss of the boxes of objects, as means over all S samples.

    `labels_s` are classes from 1, and 0 for the background.
    """
    logits, deltas = full_precision(logits), full_precision(deltas)
    objects = (labels_s > 0).nonzero()[:, 0]
    own = deltas.reshape(len(labels_s), -1, 4)[objects, labels_s[objects]]
    total = F.huber_loss(own, regression_s4[objects], reduction="sum", delta=HUBER_DELTA)
    return F.cross_entropy(logits, labels_s), total / labels_s.numel()


def objects_of(target: dict[str, Tensor]) -> dict[str, Tensor]:
    """Targets as torchvision has them, without difficult objects; classes begin with 1."""
    clear = ~target["difficult"]
    return {"boxes": target["boxes"][clear], "labels": target["labels"][clear] + 1}


def levels_by_name(levels: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(number): level for number, level in enumerate(levels)}


def pooling() -> MultiScaleRoIAlign:
    """torchvision's RoI pooling with the pyramid's scales for images of any size."""
    names = [str(i) for i in range(len(Pyramid.strides))]
    align = MultiScaleRoIAlign(names, POOLED, SAMPLES)
    align.scales = [1 / stride for stride in Pyramid.strides]
    align.map_levels = level_mapper()  # pyright: ignore[reportAttributeAccessIssue]
    return align


def level_mapper() -> LevelMapper:
    last = CANONICAL_LEVEL - 1 + len(Pyramid.strides) - 1  # the first is P3
    return LevelMapper(CANONICAL_LEVEL - 1, last, CANONICAL_SIDE, CANONICAL_LEVEL)


def pool(levels: Sequence[Tensor], boxes_nr4: Tensor) -> Tensor:
    """(N R, C, 7, 7): `MultiScaleRoIAlign` with shapes that do not depend on data."""
    n, r = boxes_nr4.shape[:2]
    image = torch.arange(n, device=boxes_nr4.device, dtype=boxes_nr4.dtype)
    boxes = boxes_nr4.flatten(0, 1)
    rois = torch.cat((image[:, None].expand(n, r).reshape(-1, 1), boxes), 1)
    level_of = level_mapper()([boxes])
    pooled = []
    for number, (x, stride) in enumerate(zip(levels, Pyramid.strides, strict=True)):
        read = roi_align(x, rois.to(x.dtype), (POOLED, POOLED), 1 / stride, SAMPLES)
        pooled.append(read * (level_of == number)[:, None, None, None])
    return torch.stack(pooled).sum(0)
