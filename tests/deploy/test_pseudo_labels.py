"""A teacher's labels of images without labels: what is stored, and which are trained on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stores import refused, settings_of, store_of, tiny

from fullstride.data.unlabelled import open_unlabelled
from fullstride.deploy.comparison import readable
from fullstride.deploy.offline import write_pseudo_labels
from fullstride.deploy.predict import probabilities
from fullstride.train.distill import open_images_of, read_pseudo_labels, select


def labels_of(out: Path, best: list[tuple[int, float]], names: int = 3):
    """Pseudo-labels with one class for each image."""
    classes = np.array([[index] for index, _ in best], np.int32)
    values = np.array([[value] for _, value in best], np.float16)
    return read_pseudo_labels(store_of(out, classes, values, names))


def test_labels_are_the_teachers_probabilities_in_half_precision(tmp_path):
    model, data = tiny(), open_unlabelled("digits")
    data = replace(data, images=data.images.subset(range(99)))
    write_pseudo_labels(model, data, tmp_path / "ten", 10, settings_of({"part_images": 999}))
    write_pseudo_labels(model, data, tmp_path / "two", 2, settings_of({"part_images": 999}))
    expected = probabilities(model, [each.view for each in readable(model, data.images)])
    rows = range(len(expected))
    ten, two = (read_pseudo_labels(tmp_path / name) for name in ("ten", "two"))
    np.testing.assert_allclose(ten.dense(rows).numpy(), expected, atol=1e-3)
    dense = two.dense(rows).numpy()
    np.testing.assert_allclose(dense.sum(1), 1, atol=1e-6)
    top, rest = np.sort(expected)[:, -2:], np.sort(dense)[:, :-2]
    np.testing.assert_allclose(np.sort(dense)[:, -2:], top, atol=1e-3)
    np.testing.assert_allclose(rest, (1 - top.sum(1))[:, None] / 8 + 0 * rest, atol=1e-3)
    assert open_images_of(ten, tmp_path / "ten").images.names[:99] == data.images.names


def test_confident_images_are_chosen_and_classes_are_balanced(tmp_path):
    best = [(0, 0.9), (0, 0.5), (0, 0.9), (0, 0.29), (1, 0.4), (1, 0.2), (0, 0.7)]
    labels = labels_of(tmp_path / "store", best)
    every = select(labels, 0.3, 0)
    assert every.rows.tolist() == [0, 1, 2, 4, 6]
    chosen = select(labels, 0.3, 3)
    assert chosen.rows.tolist() == [0, 2, 4, 4, 4, 6]  # of equal ones the first
    rows = [(c.name, c.predicted, c.confident, c.used, c.repeated) for c in chosen.by_class]
    assert rows == [("c0", 5, 4, 3, 0), ("c1", 2, 1, 1, 2), ("c2", 0, 0, 0, 0)]
    assert not len(select(labels, 0.95, 3).rows)


def test_labels_are_matched_by_the_names_of_classes(tmp_path):
    labels = labels_of(tmp_path / "store", [(0, 0.9), (2, 0.8)])
    ours = labels.for_classes(("c2", "c0", "c1"))
    assert ours.dense([0, 1]).argmax(1).tolist() == [1, 0]
    for classes in (("c0", "c1"), ("c0", "c1", "other")):
        with pytest.raises(ValueError, match="classes"):
            labels.for_classes(classes)


K = dict(classes=np.array([[0, 1]], np.int32), values=np.array([[0.5, 0.5]], np.float16))


@pytest.mark.parametrize(
    "changes",
    [
        dict(classes=np.array([[0, 10]], np.int32)),
        dict(classes=np.array([[0, -1]], np.int32)),
        dict(classes=np.array([[1, 1]], np.int32)),
        dict(classes=np.array([[0, 1]], np.int64)),
        dict(classes=np.array([[0]], np.int32)),
        dict(values=np.array([[np.nan, 0.5]], np.float16)),
        dict(values=np.array([[2.0, 0.5]], np.float16)),
        dict(values=np.array([[0.5, 0.5]], np.float32)),
        dict(kind="predictions"),
        dict(names=1),
    ],
    ids=str,
)
def test_what_is_no_store_of_labels_is_one_line(changes, tmp_path):
    store_of(tmp_path / "store", **{**K, **changes})
    with pytest.raises(ValueError, match="store") as raised:
        read_pseudo_labels(tmp_path / "store")
    assert len(str(raised.value).splitlines()) == 1


def test_the_command_prints_what_is_left_of_each_class(tmp_path, capsys):
    from fullstride import cli

    tiny().save(tmp_path / "teacher")
    words = f"data label {tmp_path}/teacher digits --out {tmp_path}/store --device cpu"
    assert cli.run(f"{words} --min-confidence 0.05 --per-class 7".split()) == 0
    labels = read_pseudo_labels(tmp_path / "store")
    counts = select(labels, 0.05, 7).by_class
    lines = capsys.readouterr().out.splitlines()
    for count in counts:
        numbers = (count.predicted, count.confident, count.used, count.repeated)
        row = [count.name, *(f"{number:,}" for number in numbers)]
        assert any(line.replace("│", " ").split() == row for line in lines)
    assert "min-confidence" in refused(f"{words} --min-confidence 2", capsys)
