"""AP50 as Pascal VOC counts it, and COCO's scores."""

import numpy as np
import pytest
import torch
from detections import random_scenes
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchvision.ops import box_iou

from fullstride.tasks.detect import average_precision
from fullstride.tasks.detect.average_precision import DetectionScore, Scene


def slow_ap50(scenes: list[Scene], label: int) -> float:
    """VOC2007's loop over all detections by falling score, and its 11 points."""
    rows = [
        (row[4], image, row[:4])
        for image, scene in enumerate(scenes)
        for row in scene.detections
        if row[5] == label
    ]
    rows.sort(key=lambda row: -row[0])
    taken, right, wrong, curve = set(), 0, 0, []
    objects = sum(int(((s.labels == label) & ~s.difficult).sum()) for s in scenes)
    for _, image, box in rows:
        scene, best, place = scenes[image], -1.0, -1
        for m in np.flatnonzero(scene.labels == label):
            iou = box_iou(torch.tensor(box[None]), torch.tensor(scene.boxes[m][None])).item()
            if iou > best:
                best, place = iou, m
        if best < 0.5:
            wrong += 1
        elif scene.difficult[place]:
            continue
        elif (image, place) in taken:
            wrong += 1
        else:
            taken.add((image, place))
            right += 1
        curve.append((right, right / (right + wrong)))
    points = (
        max([p for hits, p in curve if hits * 10 >= t * objects], default=0) for t in range(11)
    )
    return sum(points) / 11


@pytest.mark.parametrize("seed", range(3))
def test_ap50_is_that_of_a_slow_obvious_loop(seed: int) -> None:
    scenes = random_scenes(seed)
    expected = [slow_ap50(scenes, label) for label in range(3)]
    assert 0.2 < min(expected) < max(expected) < 0.9
    np.testing.assert_allclose(average_precision.average_precisions(scenes, 3), expected)


def scene(detections: list[list[float]], boxes: list[list[float]], **others: list) -> Scene:
    labels = others.get("labels", [0] * len(boxes))
    difficult = others.get("difficult", [False] * len(boxes))
    rows = np.array(detections, float).reshape(-1, 6)
    return Scene(
        rows,
        np.array(boxes, float).reshape(-1, 4),
        np.array(labels, int),
        np.array(difficult, bool),
    )


def test_a_second_hit_is_false_and_a_difficult_object_neither() -> None:
    """Recall 1/2 at precision 1, then 1 at 2/3: 6 points of 1 and 5 of 2/3."""
    one = scene(
        [[0, 0, 10, 10, 0.9, 0], [0, 0, 10, 9, 0.8, 0], [20, 0, 30, 10, 0.7, 0]],
        [[0, 0, 10, 10], [20, 0, 30, 10]],
    )
    hard = scene([[0, 0, 8, 8, 0.95, 0]] * 2, [[0, 0, 8, 8]], difficult=[True])
    assert average_precision.average_precisions([one, hard], 1) == pytest.approx(
        [(6 + 5 * 2 / 3) / 11]
    )


def test_a_class_without_objects_is_left_out_and_counted() -> None:
    score = DetectionScore(3)
    score.scenes = [scene([[0, 0, 9, 9, 0.9, 0], [0, 0, 9, 9, 0.8, 2]], [[0, 0, 9, 9]])]
    result = score.compute()
    assert (result["ap50"], result["absent_classes"]) == (pytest.approx(100), 2)
    assert [row.ap50 for row in score.by_class(("a", "b", "c"))] == [100, None, None]


@pytest.mark.parametrize("seed", range(3))
def test_the_chosen_score_has_the_best_f1_of_a_slow_obvious_loop(seed: int) -> None:
    scenes = random_scenes(seed)
    chosen = average_precision.best_min_score(scenes, 3)

    def f1(least: float) -> float:
        score = DetectionScore(3, least)
        score.scenes = scenes
        rows = score.by_class("abc")
        hits = sum((row.recall or 0) * row.images for row in rows)
        return 2 * hits / sum(row.images + row.predicted for row in rows)

    scores = {row[4] for each in scenes for row in each.detections}
    assert f1(chosen) == pytest.approx(max(map(f1, scores)))
    assert f1(chosen) > max(f1(min(scores)), f1(average_precision.DEFAULT_SCORE))
    few = [scene([[0, 0, 9, 9, 0.9, 0]], [[0, 0, 9, 9]])] * 9
    assert average_precision.best_min_score(few, 1) == average_precision.DEFAULT_SCORE


@pytest.mark.parametrize("seed", range(2))
def test_coco_scores_are_those_of_pycocotools(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hotcoco")
    scenes = random_scenes(seed)
    coco = average_precision.coco_scores(scenes, 3)
    assert capsys.readouterr().out == ""
    truth = COCO()
    truth.dataset = average_precision.as_coco(scenes, 3)
    truth.createIndex()
    evaluation = COCOeval(truth, truth.loadRes(average_precision.coco_results(scenes)), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    names = ("ap", "coco_ap50", "coco_ap75", "ap_small", "ap_medium", "ap_large")
    expected = dict(
        zip((*names, "ar100"), [*evaluation.stats[:6], evaluation.stats[8]], strict=True)
    )
    assert coco == pytest.approx({k: 100 * v for k, v in expected.items() if v >= 0})


def test_parts_of_processes_add_up_and_the_interval_holds_the_score() -> None:
    scenes = random_scenes(5)
    whole, part, other = DetectionScore(3), DetectionScore(3), DetectionScore(3)
    whole.scenes, part.scenes, other.scenes = scenes, scenes[:15], scenes[15:]
    part.merge(other)
    assert part.compute() == whole.compute()
    low, high = whole.interval() or (0, 0)
    assert 0 < low < whole.compute()["ap50"] < high < 100
    assert high - low < 40


def test_without_the_extra_there_is_voc_score(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, alone = DetectionScore(3), DetectionScore(3)
    whole.scenes = alone.scenes = random_scenes(1)
    expected = whole.compute()
    monkeypatch.setattr(average_precision, "has_coco", lambda: False)
    assert alone.compute() == {name: expected[name] for name in ("ap50", "f1", "absent_classes")}


def test_boxes_are_compared_in_pixels_of_the_picture() -> None:
    """At a scale of 1/4 an object of 10 x 10 pixels of the view is none of COCO's small ones."""
    pytest.importorskip("hotcoco")
    box = torch.tensor([[5.0, 5, 15, 15]])
    target = dict(
        boxes=box,
        labels=torch.tensor([0]),
        difficult=torch.tensor([False]),
        scale=torch.tensor(0.25),
    )
    rows = torch.zeros(1, 100, 6)
    rows[..., 5] = -1
    rows[0, 0] = torch.tensor([5.0, 5, 15, 15, 0.8, 0])
    score = DetectionScore(1)
    score.update(rows, [target])
    assert "ap_small" not in score.compute()
    assert score.compute()["ap_medium"] == pytest.approx(100)
    assert score.scenes[0].boxes.tolist() == [[20, 20, 60, 60]]


def test_images_without_any_object_have_no_score() -> None:
    score = DetectionScore(1)
    score.scenes = [scene([], [])]
    with pytest.raises(ValueError, match="none of 1 image to score on"):
        score.compute()
