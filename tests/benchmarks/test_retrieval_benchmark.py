"""benchmarks/retrieval.py: the gallery of a digit has no digit by its own writer."""

from difflib import SequenceMatcher
from importlib import import_module

import pytest
import torch

from fullstride.data.dataset import open_data
from fullstride.tasks.retrieval import METRICS

retrieval = import_module("retrieval")


@pytest.fixture(scope="module")
def labels() -> list[int]:
    data = open_data("digits")
    return [*data.train.targets, *data.val.targets, *data.test.targets]


def test_all_forms_have_nearly_the_same_digits_in_the_same_order(labels):
    numbers = retrieval.forms(labels)
    sizes = numbers.bincount()[1:]
    # 13 people by the description of the data, so that one of them has two forms
    assert len(sizes) == 14
    # the eighth form lacks its first zero, so its first digits are counted to the seventh
    assert 114 <= sizes.min() <= sizes.max() <= 139
    assert (numbers.diff() >= 0).all()
    texts = [
        "".join(str(k) for k, n in zip(labels, numbers, strict=True) if n == m)
        for m in range(1, 15)
    ]
    assert all(SequenceMatcher(None, texts[0], text).ratio() > 0.9 for text in texts)


def test_the_forms_of_the_test_are_those_of_all_digits(labels):
    assert retrieval.forms(labels[-500:]).tolist() == (retrieval.forms(labels)[-500:] - 10).tolist()


def test_the_nearest_digit_in_pixels_is_mostly_on_the_own_form():
    pixels, targets = retrieval.pixels_of_test()
    scores = retrieval.scores_of(pixels, targets)
    assert scores["recall_at_1_whole"] > 98
    assert scores["recall_at_1"] < 90
    assert scores["same_form"] > 3 * retrieval.same_form_by_chance(targets)


def test_an_embedding_of_the_class_alone_has_the_highest_score_and_no_writer():
    _, targets = retrieval.pixels_of_test()
    noise = torch.rand(500, 1, generator=torch.Generator().manual_seed(0)) / 100
    embedding = torch.nn.functional.one_hot(targets, 10) + noise
    scores = retrieval.scores_of(embedding, targets)
    assert all(scores[metric.name] == 100 for metric in METRICS)
    assert scores["same_form"] == pytest.approx(retrieval.same_form_by_chance(targets), abs=6)
    rows = {name: [scores] for name in ("raw pixels", *retrieval.ROWS)}
    assert "| raw pixels | 100.00 | 100.00 |" in retrieval.page(rows, 23.5)
    assert "higher with the triplet loss in 0 of 1 seeds" in retrieval.page(rows, 23.5)
