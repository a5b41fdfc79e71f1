"""Scores of classification are those of scikit-learn, whatever the batches and processes."""

import time
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics

from fullstride.tasks.classify import ClassificationScore, Classify
from fullstride.tasks.task import ConfusionMatrix

NAMES = tuple("abcdefghijkl")


def outputs(images=300, classes=12, absent=(3,), never=(5,), seed=0):
    """Logits that are right for about half of the images, and labels.

    No image has a class of `absent`, and a class of `never` is never predicted.
    """
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=rng)
    for label in absent:
        labels[labels == label] = (label + 1) % classes
    logits = 2 * torch.randn(images, classes, generator=rng, dtype=torch.float64)
    logits[torch.arange(images), labels] += 3
    logits[:, list(never)] -= 15
    return logits, labels


def scored(logits, labels, batch=37):
    score = ClassificationScore()
    for part in zip(logits.split(batch), labels.split(batch), strict=True):
        score.update(*part)
    return score


@pytest.mark.parametrize(
    "case",
    [
        dict(),
        dict(absent=(), never=()),
        dict(images=6, classes=30),
        dict(classes=2, absent=(0,), never=()),
    ],
    ids=["absent and never predicted", "all classes", "fewer images than classes", "two classes"],
)
def test_scores_are_those_of_scikit_learn(case):
    logits, labels = outputs(**case)
    values = scored(logits, labels).compute()
    truth, predicted = labels.numpy(), logits.argmax(1).numpy()
    probabilities = logits.softmax(1).numpy()
    known = range(logits.shape[1])
    with warnings.catch_warnings():  # that predicted classes have no images
        warnings.simplefilter("ignore")
        expected = {
            "top1": 100 * metrics.accuracy_score(truth, predicted),
            "balanced_accuracy": 100 * metrics.balanced_accuracy_score(truth, predicted),
            "macro_f1": 100 * metrics.f1_score(truth, predicted, average="macro"),
            "loss": metrics.log_loss(truth, probabilities, labels=known),
        }
        if len(known) > 5:
            top5 = metrics.top_k_accuracy_score(truth, probabilities, k=5, labels=known)
            expected["top5"] = 100 * top5
    del values["ece"]
    assert values == pytest.approx(expected, rel=1e-12)


def test_scores_by_class_are_those_of_scikit_learn_and_none_where_they_divide_by_zero():
    logits, labels = outputs()
    truth, predicted = labels.numpy(), logits.argmax(1).numpy()
    rows = scored(logits, labels).confusion().by_class(NAMES)
    precision, recall, f1, images = metrics.precision_recall_fscore_support(
        truth, predicted, labels=range(12), zero_division=np.nan
    )
    nan = float("nan")
    for ours, theirs in (("precision", precision), ("recall", recall), ("f1", f1)):
        values = [nan if (value := getattr(row, ours)) is None else value for row in rows]
        np.testing.assert_allclose(values, 100 * theirs, rtol=1e-12)
    assert tuple(row.name for row in rows) == NAMES
    assert [row.images for row in rows] == images.tolist()
    assert [row.predicted for row in rows] == np.bincount(predicted, minlength=12).tolist()
    assert (rows[3].images, rows[3].recall) == (0, None)
    assert (rows[5].predicted, rows[5].precision, rows[5].f1) == (0, None, 0)


def test_the_confusion_matrix_is_that_of_scikit_learn_and_its_largest_errors_come_first():
    logits, labels = outputs()
    matrix = scored(logits, labels).confusion()
    expected = metrics.confusion_matrix(labels, logits.argmax(1), labels=range(12))
    np.testing.assert_array_equal(matrix.dense(), expected)
    assert 0 not in matrix.images
    np.fill_diagonal(expected, 0)
    worst = matrix.most_confused(4)
    assert [images for *_, images in worst] == sorted(expected.ravel())[:-5:-1]
    assert all(expected[label, other] == images for label, other, images in worst)


def test_the_calibration_is_that_of_the_definition():
    logits, labels = outputs()
    probabilities = logits.softmax(1)
    confidence, predicted = probabilities.max(1)
    expected, rows = 0.0, []
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        is_right = (predicted == labels) & inside
        rows.append((inside.sum(), is_right.sum(), confidence[inside].sum()))
        if inside.any():
            right = is_right[inside].double().mean()
            gap = abs(right - confidence[inside].mean())
            expected += 100 * (inside.double().mean() * gap).item()
    score = scored(logits, labels)
    assert score.compute()["ece"] == pytest.approx(expected, rel=1e-9)
    bins = score.calibration()
    columns = zip(bins.images, bins.correct, bins.probability, strict=True)
    for column, row in zip(columns, rows, strict=True):
        assert column == pytest.approx([number.item() for number in row])


def test_equal_logits_are_ranked_by_the_order_of_the_classes():
    labels = torch.arange(8)
    values = scored(torch.zeros(8, 8), labels).compute()
    assert (values["top1"], values["top5"]) == (100 / 8, 100 * 5 / 8)


def test_the_scores_of_two_processes_merged_are_those_of_one():
    logits, labels = outputs()
    whole, empty = scored(logits, labels), ClassificationScore()
    parts = [scored(logits[rank::2], labels[rank::2]) for rank in range(2)]
    parts[0].merge(parts[1])
    parts[0].merge(empty)
    empty.merge(parts[0])
    for merged in (parts[0], empty):
        assert merged.compute() == pytest.approx(whole.compute(), rel=1e-12)
        assert merged.confusion() == whole.confusion()


def test_the_memory_of_a_score_is_that_of_the_pairs_that_occur():
    logits, labels = outputs(images=400)
    score = scored(logits, labels)
    pairs = {*zip(labels.tolist(), logits.argmax(1).tolist(), strict=True)}
    score.update(logits, labels)
    assert score.pairs.keys() == pairs
    assert score.pairs.total() == 800


@pytest.mark.slow
def test_50_000_images_of_1_000_classes_are_scored_within_a_second_and_100_mb():
    logits, labels = torch.randn(500, 1000), torch.randint(1000, (100, 500))
    score, begin = ClassificationScore(), time.process_time()
    for part in labels:
        score.update(logits, part)
    score.compute()
    assert time.process_time() - begin < 1
    tracemalloc.start()  # of NumPy; a batch of tensors is some megabytes
    again = ClassificationScore()
    for part in labels:
        again.update(logits, part)
    again.confusion().by_class([*map(str, range(1000))])
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


def test_a_metric_is_one_of_the_task_s_scores():
    task, names = Classify(), {"top1", "top5", "balanced_accuracy", "macro_f1", "loss", "ece"}
    logits, labels = outputs()
    assert names == scored(logits, labels).compute().keys()
    assert {task.find_metric(name, 12).name for name in names} == names
    assert task.find_metric("", 12) is task.metric
    assert not task.find_metric("loss").higher_is_better
    with pytest.raises(ValueError, match=r"recipe\.score 'f1': .* macro_f1"):
        task.find_metric("f1")
    with pytest.raises(ValueError, match="with 5 classes has top1, balanced_accuracy"):
        task.find_metric("top5", 5)


@pytest.mark.parametrize(
    "columns", [((0,), (0, 1), (3,)), ((0,), (2,), (3,))], ids=["lengths", "classes"]
)
def test_a_confusion_matrix_that_does_not_fit_is_refused(columns):
    with pytest.raises(ValueError, match="confusion matrix"):
        ConfusionMatrix(2, *columns)
