"""Scores of several labels equal those of scikit-learn, and cases computed by hand."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, precision_score, recall_score

from fullstride.tasks.multilabel import (
    DEFAULT,
    MIN_IMAGES,
    MultiLabel,
    MultiLabelScore,
    _Ranking,
    average_precisions,
    best_threshold,
)

RNG = np.random.default_rng(0)
HAS = RNG.random((400, 7)) < np.linspace(0.05, 0.6, 7)
LOGITS = (RNG.standard_normal(HAS.shape) + HAS - 0.5).astype(np.float32)
TIES = np.round(LOGITS, 1)  # hundreds of equal scores


def scored(logits, has, **options):
    score = MultiLabelScore(**options)
    score.update(torch.tensor(logits), torch.tensor(has).float())
    return score


@pytest.mark.parametrize(
    "logits", [LOGITS, TIES, np.zeros_like(LOGITS)], ids=["distinct", "ties", "equal"]
)
def test_average_precisions_are_those_of_scikit_learn(logits):
    expected = [average_precision_score(HAS[:, k], logits[:, k]) for k in range(HAS.shape[1])]
    np.testing.assert_allclose(average_precisions(logits, HAS), expected, rtol=0, atol=1e-9)
    assert scored(logits, HAS).compute()["map"] == pytest.approx(100 * np.mean(expected), abs=1e-7)


def test_constant_scores_have_the_mean_share_of_each_label_as_map():
    scores = scored(np.zeros_like(LOGITS), HAS).compute()
    assert scores["map"] == pytest.approx(100 * HAS.mean(0).mean(), abs=1e-9)


def test_precision_recall_and_f1_are_those_of_scikit_learn():
    scores, predicted = scored(LOGITS, HAS).compute(), LOGITS >= 0
    for name, average, of in (
        ("cp", "macro", precision_score),
        ("cr", "macro", recall_score),
        ("mean_f1", "macro", f1_score),
        ("op", "micro", precision_score),
        ("or", "micro", recall_score),
        ("of1", "micro", f1_score),
    ):
        expected = 100 * of(HAS, predicted, average=average, zero_division=0)
        assert scores[name] == pytest.approx(expected, abs=1e-9), name
    cp, cr = scores["cp"], scores["cr"]
    assert scores["cf1"] == pytest.approx(2 * cp * cr / (cp + cr))
    assert scores["cf1"] != pytest.approx(scores["mean_f1"], abs=0.01)


def test_the_scores_of_a_case_by_hand():
    """Label c: no image. Label d: predicted for none. Image 3 has no label."""
    has = np.array([[1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]], bool)
    logits = np.array([[3.0, 2.0, 1.0, -2.0], [-1.0, 1.0, -1.0, -3.0], [2.0, -1.0, -2.0, -4.0]])
    scores = scored(logits, has).compute()
    assert scores["absent_classes"] == 1
    # a: one of two predicted, one of two images; b: one of two, its only image; d: nothing
    assert scores["cp"] == pytest.approx(100 * (1 / 2 + 1 / 2 + 0) / 3)
    assert scores["cr"] == pytest.approx(100 * (1 / 2 + 1 + 0) / 3)
    assert scores["mean_f1"] == pytest.approx(100 * (1 / 2 + 2 / 3 + 0) / 3)
    assert (scores["op"], scores["or"]) == (pytest.approx(100 * 2 / 5), pytest.approx(100 * 2 / 4))
    # a at ranks 1 and 3, b at 1, d at 2
    assert scores["map"] == pytest.approx(100 * ((1 + 2 / 3) / 2 + 1 + 1 / 2) / 3)
    # of image 1 the third label is predicted too, with three it is within them: nothing is cut
    assert scores["of1_top3"] == scores["of1"]
    four = scored(np.full((1, 4), 1.0), np.array([[0, 0, 0, 1]], bool)).compute()
    assert (four["or"], four["or_top3"]) == (100, 0)  # of equal ones the first three count
    assert "cf1_top3" not in scored(logits[:, :3], has[:, :3]).compute()


def test_scores_do_not_depend_on_batches_and_processes():
    whole, parts = scored(LOGITS, HAS), [MultiLabelScore() for _ in range(2)]
    for start in range(0, len(HAS), 64):
        part = slice(start, start + 64)
        rows = torch.tensor(LOGITS[part]), torch.tensor(HAS[part]).float()
        parts[start // 64 % 2].update(*rows)
    parts[0].merge(parts[1])
    assert parts[0].compute() == pytest.approx(whole.compute(), rel=1e-12)


def test_images_without_any_label_have_no_score():
    with pytest.raises(ValueError, match="none of the 400 images"):
        scored(LOGITS, np.zeros_like(HAS)).compute()


def test_a_threshold_has_the_highest_f1_of_all():
    probability = torch.tensor(TIES).sigmoid().numpy()
    thresholds = MultiLabel().fit(torch.tensor(TIES), torch.tensor(HAS)).thresholds
    for k, threshold in enumerate(thresholds):
        candidates = np.append(np.unique(probability[:, k]), 2)
        best = max(
            f1_score(HAS[:, k], probability[:, k] >= each, zero_division=0) for each in candidates
        )
        assert f1_score(HAS[:, k], probability[:, k] >= threshold) == pytest.approx(best)
        assert threshold not in probability[:, k]
    rows = scored(TIES, HAS, thresholds=thresholds).by_class("abcdefg")
    assert scored(TIES, HAS, thresholds=thresholds).compute()["mean_f1_thresholds"] == (
        pytest.approx(np.mean([row.f1 for row in rows]))
    )
    assert [row.threshold for row in rows] == [100 * each for each in thresholds]


def test_labels_of_few_images_keep_the_default_threshold():
    probability, has = np.linspace(0, 1, 50), np.arange(50) >= 50 - MIN_IMAGES
    assert best_threshold(probability, has) == pytest.approx(np.mean(probability[39:41]))
    assert best_threshold(probability, np.arange(50) > 50 - MIN_IMAGES) == DEFAULT
    assert best_threshold(probability, np.ones(50, bool)) == DEFAULT


@pytest.mark.parametrize("logits", [LOGITS, TIES], ids=["distinct", "ties"])
def test_the_precision_of_a_resample_is_that_of_its_images(logits):
    """Each image as many times as it is drawn, by the function for whole sets."""
    drawn = np.random.default_rng(1).multinomial(len(HAS), np.full(len(HAS), 1 / len(HAS)), 3)
    for k in range(HAS.shape[1]):
        ranking = _Ranking.of(logits[:, k], HAS[:, k])
        values, _ = ranking.average_precision(drawn.T)
        for times, value in zip(drawn, values, strict=True):
            rows = np.repeat(np.arange(len(HAS)), times)
            expected = average_precisions(logits[rows, k : k + 1], HAS[rows, k : k + 1])
            assert value == pytest.approx(expected[0], abs=1e-12)


def test_the_interval_has_the_width_of_the_spread_over_samples():
    """Of 100 samples of 400 images the mAP has a deviation; an interval is about four of these."""
    means = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        has = rng.random((400, 3)) < 0.2
        logits = rng.standard_normal(has.shape) + has
        means.append(100 * average_precisions(logits, has).mean())
    low, high = scored(logits, has).interval()
    assert low < means[-1] < high
    assert (high - low) / (2 * 1.96 * np.std(means)) == pytest.approx(1, abs=0.35)


def test_the_rows_of_classes_are_those_of_scikit_learn():
    rows = scored(LOGITS, HAS).by_class("abcdefg")
    predicted = LOGITS >= 0
    for k, row in enumerate(rows):
        assert (row.images, row.predicted) == (HAS[:, k].sum(), predicted[:, k].sum())
        assert row.precision == pytest.approx(100 * precision_score(HAS[:, k], predicted[:, k]))
        assert row.f1 == pytest.approx(100 * f1_score(HAS[:, k], predicted[:, k]))
        expected = 100 * average_precision_score(HAS[:, k], LOGITS[:, k])
        assert row.average_precision == pytest.approx(expected)
