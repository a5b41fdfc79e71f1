"""How good are detections by the rules of COCO? AP, AP50, AP75, by size, and AR100, by hotcoco.

It is bit-identical with pycocotools, and an extra. Sizes are areas of boxes: those of COCO's own
files are areas of masks, which boxes do not have.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from fullstride.tasks.detect.voc_ap import Scene

SIZES = ("", "_small", "_medium", "_large")  # areas to 32 x 32 and to 96 x 96 pixels, and above
MOST = 2  # place of 100 detections of an image in the tables, after 1 and 10


def has_coco() -> bool:
    """Whether the extra is installed."""
    return find_spec("hotcoco") is not None


def coco_scores(scenes: Sequence[Scene], classes: int) -> dict[str, float]:
    """Scores in percent; without those of sizes that no object has. Difficult objects are crowds.

    At least one object is not difficult.
    """
    from hotcoco import COCO, COCOeval  # an optional extra

    truth = COCO(as_coco(scenes, classes))
    rows = results(scenes)
    if not len(rows):
        return {"ap": 0.0, "coco_ap50": 0.0, "coco_ap75": 0.0, "ar100": 0.0}
    evaluation = COCOeval(truth, truth.load_res(rows), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    # by IoU from 0.5 to 0.95, recall, class and size; its own summary is printed
    tables = evaluation.eval
    assert tables is not None
    precision = np.asarray(tables["precision"])[..., MOST]
    values = {f"ap{size}": precision[..., place] for place, size in enumerate(SIZES)}
    values |= {"coco_ap50": precision[0, ..., 0], "coco_ap75": precision[5, ..., 0]}
    values["ar100"] = np.asarray(tables["recall"])[:, :, 0, MOST]
    present = {name: value[value >= 0] for name, value in values.items()}
    return {name: 100 * float(value.mean()) for name, value in present.items() if len(value)}


def as_coco(scenes: Sequence[Scene], classes: int) -> dict[str, Any]:
    """The objects as the contents of a file of annotations; images are numbered from 1."""
    annotations: list[dict[str, Any]] = [
        dict(image_id=image, category_id=int(label), bbox=box, iscrowd=int(difficult))
        for image, scene in enumerate(scenes, 1)
        for box, label, difficult in zip(
            with_sizes(scene.boxes).tolist(), scene.labels, scene.difficult, strict=True
        )
    ]
    for number, each in enumerate(annotations, 1):
        _, _, width, height = each["bbox"]
        each |= {"id": number, "area": width * height}
    return dict(
        images=[dict(id=image) for image in range(1, len(scenes) + 1)],
        annotations=annotations,
        categories=[dict(id=k, name=str(k)) for k in range(classes)],
    )


def results(scenes: Sequence[Scene]) -> np.ndarray:
    """(rows, 7): image, x, y, width, height, score, class of all detections."""
    parts = [
        np.column_stack(
            (
                np.full(len(scene.detections), image),
                with_sizes(scene.detections[:, :4]),
                scene.detections[:, 4:],
            )
        )
        for image, scene in enumerate(scenes, 1)
    ]
    return np.concatenate(parts).astype(np.float64)


def with_sizes(boxes: np.ndarray) -> np.ndarray:
    """x1, y1, x2, y2 -> x, y, width, height."""
    return np.concatenate((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), 1)
