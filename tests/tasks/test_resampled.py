"""Scores over resamples of the images are those of the images that are drawn, as often as that."""

import numpy as np
import pytest
import torch

from fullstride.tasks.depth import DepthScore
from fullstride.tasks.detect.average_precision import DetectionScore
from fullstride.tasks.multilabel import MultiLabelScore
from fullstride.tasks.retrieval import RetrievalScore
from fullstride.tasks.segment import SegmentScore
from fullstride.tasks.task import RESAMPLES

N, K = 12, 3
RNG = np.random.default_rng(1)


def scene(number):
    """Outputs and the target of an image with three objects, of which two are detected."""
    corners = RNG.uniform(0, 50, (3, 2))
    boxes = np.concatenate((corners, corners + 20), 1)
    labels = RNG.integers(K, size=3)
    rows = np.zeros((3, 6))
    rows[:, :4], rows[:, 4], rows[:, 5] = boxes, RNG.uniform(0.1, 1, 3), labels
    rows[2, :4] += 15
    target = {
        "boxes": torch.tensor(boxes, dtype=torch.float32),
        "labels": torch.tensor(labels),
        "difficult": torch.zeros(3, dtype=torch.bool),
        "scale": torch.tensor(1.0),
    }
    return torch.tensor(rows, dtype=torch.float32)[None], [target]


def normal(*shape):
    return torch.tensor(RNG.standard_normal(shape), dtype=torch.float32)


def integers(most, *shape):
    return torch.tensor(RNG.integers(most, size=shape))


CASES = {
    "map": (MultiLabelScore, [(normal(1, K), integers(2, 1, K)) for _ in range(N)]),
    "ap50": (lambda: DetectionScore(K), [scene(number) for number in range(N)]),
    "miou": (SegmentScore, [(normal(1, K, 4, 4), integers(K, 1, 4, 4)) for _ in range(N)]),
    "delta1": (
        DepthScore,
        [
            (normal(1, 1, 4, 4).exp(), normal(1, 4, 4).exp() * integers(2, 1, 4, 4))
            for _ in range(N)
        ],
    ),
}


def scored(kind, batches):
    score = kind()
    for outputs, targets in batches:
        score.update(outputs, targets)
    return score


@pytest.mark.parametrize("metric", CASES)
def test_a_resample_has_the_score_of_the_images_that_it_draws(metric):
    kind, batches = CASES[metric]
    values = scored(kind, batches).resampled()
    drawn_bn = np.random.default_rng(0).multinomial(N, np.full(N, 1 / N), RESAMPLES)
    assert len(values) == RESAMPLES
    for value, times_n in list(zip(values, drawn_bn, strict=True))[:5]:
        images = np.repeat(np.arange(N), times_n)
        expected = scored(kind, [batches[image] for image in images]).compute()[metric]
        assert value == pytest.approx(expected, rel=1e-6)


def test_a_resample_of_a_retrieval_has_the_recall_of_the_queries_that_it_draws():
    """The gallery stays whole, so that a copy of a query does not retrieve itself."""
    embeddings, labels = normal(N, 4), integers(3, N)
    score = scored(RetrievalScore, [(embeddings, labels)])
    near = (torch.cdist(embeddings, embeddings) + torch.eye(N) * 1e9).argmin(1)
    is_right = (labels[near] == labels).numpy()
    drawn_bn = np.random.default_rng(0).multinomial(N, np.full(N, 1 / N), RESAMPLES)
    np.testing.assert_allclose(score.resampled(), 100 * drawn_bn @ is_right / N)


def test_one_image_says_nothing_of_others():
    kind, batches = CASES["map"]
    score = scored(kind, batches[:1])
    assert np.isnan(score.resampled()).all()
    assert score.interval() is None
