"""The proof of training on images without labels, in short: a student above its teacher."""

from importlib import import_module

import pytest

semi_supervised = import_module("semi_supervised")


@pytest.mark.slow
def test_a_student_with_images_without_labels_is_above_its_teacher(tmp_path):
    result = semi_supervised.scores(0, tmp_path, steps=120, baselines=False)
    teacher, student = result.values()
    assert teacher > 60  # far above chance, 10
    assert student > teacher


def test_the_labelled_and_the_other_digits_are_all_training_digits_once():
    data, others = semi_supervised.labelled(1)
    labels = [*data.train.targets]
    assert sorted(labels) == sorted(4 * [*range(10)])
    names = semi_supervised.pool().train.names
    assert sorted([*data.train.names, *(names[index] for index in others)]) == sorted(names)
    assert not {*data.test.names} & {*names}
