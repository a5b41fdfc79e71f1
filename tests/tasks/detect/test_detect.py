"""Which locations learn which object, what is minimised, and which boxes remain."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from detections import random_boxes, random_targets
from torch import Tensor
from torchvision.ops import batched_nms, box_iou, generalized_box_iou_loss, sigmoid_focal_loss

from fullstride.tasks.dense import Pyramid
from fullstride.tasks.detect.fcos import (
    FcosHead,
    Predictions,
    assign,
    decode_boxes,
    detection_loss,
    detections,
    locations,
    pad_targets,
    suppress,
)

STRIDES = Pyramid.strides


def sizes_of(side: int) -> list[tuple[int, int]]:
    sizes = [(side // 8, side // 8)]
    while len(sizes) < len(STRIDES):
        sizes.append((math.ceil(sizes[-1][0] / 2), math.ceil(sizes[-1][1] / 2)))
    return sizes


def slow_assign(points: Tensor, level_sizes: list[int], boxes: Tensor) -> list[int]:
    """The rule of ATSS, object by object and location by location."""
    best: list[tuple[float, int]] = [(-1.0, -1)] * len(points)
    stride_of = [s for s, count in zip(STRIDES, level_sizes, strict=True) for _ in range(count)]
    ends = [0, *np.cumsum(level_sizes).tolist()]
    for number, box in enumerate(boxes):
        centre = (box[:2] + box[2:]) / 2
        candidates: list[int] = []
        for start, end in pairwise(ends):
            distance = {a: ((centre - points[a]) ** 2).sum().item() for a in range(start, end)}
            candidates += sorted(distance, key=lambda a: (distance[a], a))[:9]  # noqa: B023
        ious = torch.stack(
            [
                box_iou(
                    box[None],
                    torch.cat((points[a] - 4 * stride_of[a], points[a] + 4 * stride_of[a]))[None],
                )[0, 0]
                for a in candidates
            ]
        )
        threshold = ious.mean() + ious.std()
        for a, iou in zip(candidates, ious, strict=True):
            x, y = points[a].tolist()
            x1, y1, x2, y2 = box.tolist()
            inside = min(x - x1, y - y1, x2 - x, y2 - y) > 0.01
            if iou >= threshold and inside and iou.item() > best[a][0]:
                best[a] = (iou.item(), number)
    return [number for _, number in best]


@pytest.mark.parametrize("part", range(4))
def test_the_assignment_equals_a_slow_obvious_one(part: int) -> None:
    """On 50 random scenes each; thresholds that rounding decides would be differences."""
    rng = np.random.default_rng(part)
    positives = 0
    for _ in range(50):
        side = int(rng.choice([64, 96]))
        sizes = sizes_of(side)
        counts = [h * w for h, w in sizes]
        points = locations(sizes, STRIDES, torch.zeros(1))
        boxes = torch.from_numpy(random_boxes(rng, int(rng.integers(1, 7)), side)).float()
        assigned = assign(points, counts, STRIDES, boxes[None], torch.ones(1, len(boxes)).bool())
        assert assigned[0].tolist() == slow_assign(points, counts, boxes)
        positives += int((assigned >= 0).sum())
    assert positives > 200


def test_objects_of_an_image_do_not_depend_on_the_others_of_its_batch() -> None:
    targets = random_targets(0, 5, 3, 96)
    sizes = sizes_of(96)
    counts, points = [h * w for h, w in sizes], locations(sizes, STRIDES, torch.zeros(1))
    together = assign(points, counts, STRIDES, *padded_boxes(targets, points))
    for image, target in enumerate(targets):
        alone = assign(points, counts, STRIDES, *padded_boxes([target], points))
        assert torch.equal(alone[0], together[image])
    assert (together[0] == -1).all()


def padded_boxes(targets: list[dict[str, Tensor]], points: Tensor) -> tuple[Tensor, Tensor]:
    boxes, _, is_object = pad_targets(targets, points)
    return boxes, is_object


def random_predictions(seed: int, images: int, classes: int, side: int) -> Predictions:
    torch.manual_seed(seed)
    sizes = sizes_of(side)
    counts = tuple(h * w for h, w in sizes)
    total = sum(counts)
    return Predictions(
        torch.randn(images, total, classes, requires_grad=True),
        (torch.rand(images, total, 4) * 3).requires_grad_(),
        torch.randn(images, total, requires_grad=True),
        locations(sizes, STRIDES, torch.zeros(1)),
        counts,
    )


def test_the_loss_equals_its_definition() -> None:
    """Location by location, with torchvision's functions of one box."""
    predictions, targets = random_predictions(1, 3, 4, 64), random_targets(1, 3, 4, 64)
    points, counts = predictions.points_a2, predictions.level_sizes
    boxes_na4 = decode_boxes(predictions)
    focal, giou, centre_loss = torch.zeros(3).double().unbind()
    positives, centres = 0, 0.0
    for image, target in enumerate(targets):
        easy = ~target["difficult"]
        boxes, labels = target["boxes"][easy], target["labels"][easy]
        owners = slow_assign(points, list(counts), boxes) if len(boxes) else [-1] * len(points)
        for a, owner in enumerate(owners):
            wanted = torch.zeros(4)
            if owner >= 0:
                wanted[labels[owner]] = 1
                (x, y), (x1, y1, x2, y2) = points[a].tolist(), boxes[owner].tolist()
                across, down = (x - x1, x2 - x), (y - y1, y2 - y)
                centre = math.sqrt(min(across) / max(across) * min(down) / max(down))
                positives, centres = positives + 1, centres + centre
                pair = boxes_na4[image, a][None], boxes[owner][None]
                giou = giou + centre * generalized_box_iou_loss(*pair)[0]
                log_p = torch.nn.functional.logsigmoid(predictions.centerness_na[image, a])
                log_q = torch.nn.functional.logsigmoid(-predictions.centerness_na[image, a])
                centre_loss = centre_loss - centre * log_p - (1 - centre) * log_q
            row = sigmoid_focal_loss(predictions.classes_nak[image, a], wanted)
            focal = focal + row.sum()
    expected = (focal + centre_loss) / positives + 2 * giou / centres
    assert positives > 5
    torch.testing.assert_close(
        detection_loss(predictions, targets), expected.float(), rtol=1e-4, atol=1e-4
    )


def test_images_without_objects_have_a_finite_loss_and_gradients() -> None:
    predictions = random_predictions(0, 2, 3, 64)
    empty = random_targets(0, 1, 3, 64) * 2
    loss = detection_loss(predictions, empty)
    loss.backward()
    assert loss.isfinite()
    for values in predictions[:3]:
        assert values.grad is not None
        assert values.grad.isfinite().all()


def test_the_loss_is_of_float32_under_16_bits() -> None:
    torch.manual_seed(0)
    head = FcosHead((8, 8, 8), (8, 16, 32), 3, width=16, convs=1)
    # From 128 pixels on: under bfloat16, oneDNN's gradient of a convolution of 3 x 3 with stride 2
    # on a map of one pixel has values that were never written (avx512_bf16, torch 2.14).
    maps = [torch.randn(2, 8, 128 // s, 128 // s) for s in (8, 16, 32)]
    targets = random_targets(3, 2, 3, 128)
    expected = detection_loss(head(maps), targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = detection_loss(head(maps), targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())


def test_suppression_equals_torchvision() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        boxes = random_boxes(rng, 300, 120, least=20)
        boxes = torch.from_numpy(boxes + rng.uniform(0, 0.1, boxes.shape)).float()  # no IoU is 0.6
        scores = torch.from_numpy(rng.permutation(300) / 300).float()  # no two are equal
        labels = torch.from_numpy(rng.integers(0, 3, 300))
        expected = batched_nms(boxes, scores, labels, 0.6)
        order = scores.argsort(descending=True)
        remain = suppress(boxes[order][None], labels[order][None], scores[order][None], iou=0.6)
        expected = expected[scores[expected] > 0]
        assert order[remain[0]].tolist() == expected.tolist()


def test_detections_are_sorted_and_filled_up() -> None:
    boxes = torch.tensor([[[0.0, 0, 4, 4], [10, 10, 14, 14], [0, 0, 4, 5], [1, 1, 2, 2]]])
    scores = torch.tensor([[0.5, 0.9, 0.6, 0.0]])
    found = detections(boxes, torch.tensor([[2, 1, 2, 0]]), scores, iou=0.6, limit=5)[0]
    rows = [[10, 10, 14, 14, 0.9, 1], [0, 0, 4, 5, 0.6, 2], *[[0, 0, 0, 0, 0, -1]] * 3]
    torch.testing.assert_close(found, torch.tensor(rows, dtype=torch.float32))


@pytest.mark.parametrize("width", [32, 48])
def test_the_head_finds_the_boxes_that_its_maps_tell_of(width: int) -> None:
    """Evaluation returns the locations' boxes, decoded one by one, that torchvision keeps."""
    torch.manual_seed(0)
    head = FcosHead((8, 8, 8, 8), (4, 8, 16, 32), 3, width=width, convs=1).eval()
    torch.nn.init.normal_(head.classes.weight, std=0.3)
    maps = [torch.randn(2, 8, 96 // s, 64 // s) for s in (4, 8, 16, 32)]
    with torch.inference_mode():
        found, predictions = head(maps), head.predict(maps)
    assert found.shape == (2, 100, 6)
    assert found[..., [0, 2]].max() <= 64
    assert found[..., [1, 3]].max() <= 96
    for image in range(2):
        boxes, scores, labels = [], [], []
        starts = np.cumsum([0, *predictions.level_sizes])
        for a, (x, y) in enumerate(predictions.points_a2.tolist()):
            stride = STRIDES[int(np.searchsorted(starts, a, side="right")) - 1]
            left, up, right, down = (predictions.distances_na4[image, a] * stride).tolist()
            box = (max(0, x - left), max(0, y - up), min(64, x + right), min(96, y + down))
            for k in range(3):
                p = predictions.classes_nak[image, a, k].sigmoid().item()
                if p > 0.05:
                    boxes.append(box)
                    scores.append(math.sqrt(p * predictions.centerness_na[image, a].sigmoid()))
                    labels.append(k)
        expected = batched_nms(
            torch.tensor(boxes), torch.tensor(scores), torch.tensor(labels), 0.6
        )[:100]
        rows = torch.cat(
            (
                torch.tensor(boxes)[expected],
                torch.tensor(scores)[expected, None],
                torch.tensor(labels)[expected, None],
            ),
            1,
        )
        present = found[image][found[image, :, 5] >= 0]
        torch.testing.assert_close(present, rows, rtol=1e-4, atol=1e-3)


def test_a_head_of_an_impossible_width_is_refused() -> None:
    with pytest.raises(ValueError, match="head_width 20"):
        FcosHead((8, 8, 8), (8, 16, 32), 3, width=20)
