"""How does a pyramid become boxes? The head of FCOS, with the post-processing in evaluation.

Source: FCOS, arXiv:1904.01355 and arXiv:2006.09214: centre-ness beside the boxes, distances in
strides with a learnable scale for each level, group norm in both towers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fullstride.tasks.detect.atss import locations
from fullstride.tasks.detect.nms import detections, top
from fullstride.tasks.pyramid import Pyramid
from fullstride.tasks.task import full_precision

GROUPS, GROUP_CHANNELS = 32, 8  # of group norm: so many groups, or fewer of so many channels
PRIOR = 0.01  # probability of every class before training (arXiv:1708.02002)
START_DISTANCE = 2.0  # strides to each side before training; at 0 the gradient of ReLU is dead

MIN_SCORE = 0.05  # probability of its class from which a box is a candidate
MAX_IOU = 0.6  # of two detections of one class
PER_LEVEL = 1000  # candidates, the best by score


class Predictions(NamedTuple):
    """What the head computes for A locations of N images; `loss` takes it in training."""

    classes_nak: Tensor  # logits
    distances_na4: Tensor  # to the left, top, right and bottom, in strides, 0 or more
    centerness_na: Tensor  # logits
    points_a2: Tensor  # x, y of the locations, in pixels of the input
    level_sizes: tuple[int, ...]  # locations of each level; their sum is A


class FcosHead(nn.Module):
    """Maps of a network -> `Predictions` in training, detections (N, 100, 6) in evaluation.

    A detection is x1, y1, x2, y2 in pixels of the input, the score, which is the square root of the
    class's probability times the centre-ness, and the class; see `nms.detections`.
    """

    def __init__(
        self,
        channels: Sequence[int],
        strides: Sequence[int],
        classes: int,
        *,
        width: int = 256,
        convs: int = 4,
    ):
        super().__init__()
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
        for part in (self.class_tower, self.box_tower, self.classes, self.distances):
            normal_weights(part)
        normal_weights(self.centerness)
        for conv, bias in (
            (self.classes, -math.log((1 - PRIOR) / PRIOR)),
            (self.distances, START_DISTANCE),
        ):
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
            full_precision(torch.cat(centerness, 1))[..., 0],
            locations(sizes, Pyramid.strides, levels[0]),
            tuple(h * w for h, w in sizes),
        )

    def detect(self, predictions: Predictions, h: int, w: int) -> Tensor:
        """(N, 100, 6) for images of `h` x `w` pixels, in which boxes end."""
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
        return detections(
            torch.cat(boxes, 1), torch.cat(labels, 1), torch.cat(scores, 1), iou=MAX_IOU
        )


def decode_boxes(predictions: Predictions) -> Tensor:
    """(N, A, 4): x1, y1, x2, y2 in pixels of the input."""
    points = predictions.points_a2
    strides = level_strides(predictions.level_sizes, points)
    distances = predictions.distances_na4 * strides[:, None]
    return torch.cat((points - distances[..., :2], points + distances[..., 2:]), -1)


def level_strides(level_sizes: Sequence[int], like: Tensor) -> Tensor:
    """(A,): the stride of each location."""
    pairs = zip(level_sizes, Pyramid.strides, strict=True)
    return torch.cat([like.new_full((count,), stride) for count, stride in pairs])


def rows(x: Tensor) -> Tensor:
    """(N, C, H, W) -> (N, H W, C)."""
    return x.flatten(2).transpose(1, 2)


def tower(width: int, convs: int) -> nn.Sequential:
    """So many 3 x 3 convolutions, each with group norm and ReLU.

    Groups of fewer than 8 channels would be 0 on maps of one pixel.
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
