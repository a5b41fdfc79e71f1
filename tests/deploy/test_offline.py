"""Predictions for any number of images, each once, whatever stops the work; pseudo-labels."""

import errno
import json
import os
import re
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forks import Fork
from stores import refused, settings_of, store_of, tiny

from fullstride import cli
from fullstride.data.dataset import open_data
from fullstride.data.prediction_store import METADATA, check_store, read_key, read_table
from fullstride.data.unlabelled import open_unlabelled
from fullstride.deploy.comparison import readable
from fullstride.deploy.offline import (
    OfflineSettings,
    write_outputs,
)
from fullstride.deploy.predict import predict, probabilities
from fullstride.deploy.settings import ExportOptions
from fullstride.io import writing
from fullstride.nets.bundle import Bundle
from fullstride.train.distill import open_images_of, read_pseudo_labels, select

IMAGES = 23


@pytest.fixture(scope="module")
def model() -> Bundle:
    return tiny()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "bundle"
    model.save(folder)
    return folder


@pytest.fixture
def photos(tmp_path) -> Path:
    """Digits as files in a tree without classes."""
    folder = tmp_path / "photos"
    (folder / "deep" / "er").mkdir(parents=True)
    images = open_data("digits").train
    for index in range(IMAGES):
        where = (folder, folder / "deep", folder / "deep" / "er")[index % 3]
        images.picture(index).save(where / f"{index:02}.png")
    return folder


def write(model, where, out, top=3, **settings):
    return write_outputs(
        "predictions", model, open_unlabelled(str(where)), out, top, settings_of(settings)
    )


def same(ours: pa.Table, theirs: pa.Table) -> bool:
    """Whether two stores have the same rows; sums in batches of other sizes round otherwise."""
    floats = ["probability", "probabilities"]
    return ours.drop_columns(floats).equals(theirs.drop_columns(floats)) and np.allclose(
        ours["probability"].to_numpy(), theirs["probability"].to_numpy(), rtol=1e-4
    )


def test_the_rows_are_what_predict_says_of_each_photo(model, photos, tmp_path):
    write(model, photos, tmp_path / "out")
    table = read_table(tmp_path / "out")
    paths = [photos / name for name in table["path"].to_pylist()]
    assert sorted(paths) == sorted(photos.rglob("*.png"))
    assert "true_label" not in table.column_names
    for row, expected in zip(table.to_pylist(), predict(model, paths, top=3), strict=True):
        assert row["labels"] == [guess.label for guess in expected.guesses]
        assert row["label"] == row["labels"][0]
        np.testing.assert_allclose(
            row["probabilities"], [guess.probability for guess in expected.guesses], rtol=1e-4
        )
        assert row["error"] is None


def test_ranks_workers_parts_and_files_do_not_change_the_rows(model, photos, tmp_path):
    write(model, photos, tmp_path / "one.parquet")
    whole = read_table(tmp_path / "one.parquet")
    first = write(model, photos, tmp_path / "out", rank=1, ranks=2)
    assert (first.parts, first.missing) == (2, 3)
    with pytest.raises(ValueError, match="2 of 5 parts"):
        read_table(tmp_path / "out")
    write(model, photos, tmp_path / "out", rank=0, ranks=2, workers=1)
    assert same(read_table(tmp_path / "out"), whole)
    write(model, photos, tmp_path / "other", part_images=7, batch=16)
    assert same(read_table(tmp_path / "other"), whole)


def test_finished_parts_are_not_computed_again(model, photos, tmp_path):
    out = tmp_path / "out"
    write(model, photos, out)
    whole = read_table(out)
    lost = out / "part-000003.parquet"
    lost.unlink()
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    again = write(model, photos, out, batch=3)  # what does not change the rows may differ
    assert (again.parts, again.images, again.present) == (1, 5, 4)
    after = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path != lost}
    assert after == before
    assert same(read_table(out), whole)


def test_other_readers_read_the_folder(model, photos, tmp_path):
    """pandas.read_parquet, too, reads a folder by `pyarrow.parquet`."""
    out = tmp_path / "out"
    write(model, photos, out)
    assert pq.read_table(out)["path"].equals(read_table(out)["path"])


def test_an_image_that_cannot_be_read_has_a_row_with_the_reason(model, photos, tmp_path, capsys):
    bad = [photos / "00.png", photos / "deep" / "01.png", photos / "zz.png"]
    bad += [photos / "deep" / "er" / f"{index:02}.png" for index in range(2, IMAGES, 3)]
    for path in bad:  # among them all images of a part
        path.write_bytes(b"no image")
    summary = write(model, photos, tmp_path / "out")
    rows = read_table(tmp_path / "out").to_pylist()
    assert len(rows) == IMAGES + 1
    errors = {photos / row["path"] for row in rows if row["error"]}
    assert errors == {*bad} == {photos / name for name in summary.skipped}
    assert all((row["label"] is None) == bool(row["error"]) for row in rows)
    parts = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]
    assert any(part["label"].null_count == len(part) for part in parts)
    for path in photos.rglob("*.png"):
        path.write_bytes(b"no image")
    model.save(tmp_path / "bundle")
    words = f"predict {tmp_path}/bundle {photos} --out {tmp_path}/none --device cpu"
    assert cli.run(words.split()) == 2
    assert "none of the images" in capsys.readouterr().err
    assert read_table(tmp_path / "none")["error"].null_count == 0


def test_a_store_of_another_job_is_refused_in_one_line(saved, photos, tmp_path, capsys):
    out = tmp_path / "out"
    words = f"predict {saved} {photos} --out {out} --device cpu"
    assert cli.run(words.split()) == 0
    tiny(seed=1).save(tmp_path / "other")
    assert "the model differs" in refused(words.replace(str(saved), f"{tmp_path}/other"), capsys)
    assert "arguments differs" in refused(f"{words} --top 2", capsys)
    assert "part_images differs" in refused(f"{words} --part-images 7", capsys)
    labels = words.replace("predict", "data label", 1)
    assert "kind differs" in refused(f"{labels} --top 3", capsys)
    (photos / "00.png").unlink()
    assert "the images differs" in refused(words, capsys)


def test_flags_of_rows_need_out_and_flags_of_lines_and_videos_do_not_go_with_it(
    saved, photos, tmp_path, capsys
):
    words = f"predict {saved} {photos} --device cpu"
    rows = "--rank 0 --ranks 2 --part-images 7 --workers 3"
    names = "--workers, --rank, --ranks, --part-images"
    assert f"{names} without --out" in refused(f"{words} {rows}", capsys)
    lines = f"--out {tmp_path}/out --views 10x3 --clip-starts slowfast --json"
    assert "--json, --views, --clip-starts with --out" in refused(f"{words} {lines}", capsys)
    assert not (tmp_path / "out").exists()


def test_ranks_are_those_of_torchrun_unless_they_are_given(monkeypatch):
    assert OfflineSettings().share == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert OfflineSettings().share == (2, 4)
    assert OfflineSettings(rank=0, ranks=2).share == (0, 2)
    with pytest.raises(ValueError, match="belong together"):
        OfflineSettings(rank=1)
    with pytest.raises(ValueError, match="rank 2: use 0 to 1"):
        OfflineSettings(rank=2, ranks=2)


def shards_without_labels(photos: Path, folder: Path) -> Path:
    folder.mkdir()
    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for path in sorted(photos.rglob("*.png"))[number::2]:
                tar.add(path, path.name)
    return folder


def test_images_without_labels_are_read_from_folders_lists_shards_and_idx(photos, tmp_path):
    def pixels(images):
        return sorted(np.asarray(images.picture(i).convert("L")).tobytes() for i in range(IMAGES))

    expected = pixels(open_unlabelled(str(photos)).images)
    names = [path.relative_to(tmp_path).as_posix() for path in sorted(photos.rglob("*.png"))]
    (tmp_path / "list.txt").write_text("\n".join([*names, "", names[0]]))
    (tmp_path / "list.csv").write_text("path;note\n" + "\n".join(f"{n};x" for n in names))
    shards = shards_without_labels(photos, tmp_path / "shards")
    idx = tmp_path / "idx"
    idx.mkdir()
    digits = open_data("digits").train
    arrays = np.stack([np.asarray(digits.picture(index)) for index in range(IMAGES)])
    head = bytes([0, 0, 8, 3]) + np.array(arrays.shape, ">u4").tobytes()
    (idx / "train-images-idx3-ubyte").write_bytes(head + arrays.tobytes())
    for where in (tmp_path / "list.txt", tmp_path / "list.csv", shards, shards / "*.tar", idx):
        data = open_unlabelled(str(where))
        assert pixels(data.images) == expected
        assert not data.has_labels
        assert open_unlabelled(data.where).fingerprint == data.fingerprint
    labelled = "\n".join(f"{name},{index % 2}" for index, name in enumerate(names))
    (tmp_path / "list.csv").write_text(f"image,label\n{labelled}\n")
    data = open_unlabelled(str(tmp_path / "list.csv"))
    assert data.images.targets == tuple(str(index % 2) for index in range(IMAGES))


@pytest.mark.parametrize("text", ["", "\n\n", "label\n1\n", 'path\n"a'], ids=repr)
def test_a_list_without_images_is_refused_in_one_line(text, tmp_path):
    for suffix in (".csv", ".txt") if not text.strip() else (".csv",):
        (tmp_path / f"list{suffix}").write_text(text)
        with pytest.raises(ValueError, match=f"list{suffix}") as raised:
            open_unlabelled(str(tmp_path / f"list{suffix}"))
        assert len(str(raised.value).splitlines()) == 1


def test_names_with_any_characters_are_rows_and_lines(model, tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    names = [b"new\nline.png", b"\xff\xfe.png", b"\x1b[2J.png", b"ok.png"]
    for name in names:
        open_data("digits").train.picture(0).save(folder / "x.png")
        (folder / "x.png").rename(folder / os.fsdecode(name))
    (folder / os.fsdecode(names[2])).write_bytes(b"broken")
    model.save(tmp_path / "bundle")
    words = ["predict", str(tmp_path / "bundle"), str(folder), "--out", str(tmp_path / "out")]
    assert cli.run([*words, "--device", "cpu"]) == 0
    assert "\x1b" not in "".join(capsys.readouterr())
    table = read_table(tmp_path / "out")
    assert len(table) == 4
    assert {"ok.png", "new\nline.png", "\\udcff\\udcfe.png"} < {*table["path"].to_pylist()}


def test_a_damaged_or_foreign_part_is_one_line(model, photos, tmp_path):
    out = tmp_path / "out"
    write(model, photos, out)
    part = out / "part-000001.parquet"
    good = part.read_bytes()
    table = pq.read_table(part)
    key = json.loads(table.schema.metadata[METADATA])
    others = {
        "cut short": good[: len(good) // 2],
        "no file of parquet": b"PAR1" + bytes(100) + b"PAR1",
        "empty": b"",
    }
    for data in others.values():
        part.write_bytes(data)
        for read in (lambda: read_table(out), lambda: write(model, photos, out)):
            with pytest.raises(ValueError, match=re.escape(str(part))) as raised:
                read()
            assert len(str(raised.value).splitlines()) == 1
    keys = [{"a": 1}, {**key, "images": -1}, {**key, "images": 10**30}, {**key, "model": []}, []]
    for foreign in (None, "[" * 100_000, *map(json.dumps, keys)):
        metadata = None if foreign is None else {METADATA: foreign.encode()}
        pq.write_table(table.replace_schema_metadata(metadata), part)
        with pytest.raises(ValueError, match=re.escape(str(part))):
            read_table(out)
    pq.write_table(pa.concat_tables([table, table]), part)  # too many rows
    with pytest.raises(ValueError, match=re.escape(str(part))):
        read_table(out)
    pq.write_table(table.drop_columns(["label"]), part)
    with pytest.raises(ValueError, match="columns"):
        read_table(out)


def test_a_file_of_others_is_not_replaced(model, photos, tmp_path):
    out = tmp_path / "mine.parquet"
    for data in (b"mine", b"PAR1 mine PAR1"):
        out.write_bytes(data)
        with pytest.raises(ValueError, match="mine.parquet"):
            write(model, photos, out)
        assert out.read_bytes() == data
    pq.write_table(pa.table({"mine": [1]}), out)
    before = out.read_bytes()
    with pytest.raises(ValueError, match="mine.parquet"):
        write(model, photos, out)
    assert out.read_bytes() == before


def test_rows_of_another_job_are_replaced_neither_in_a_folder_nor_in_a_file(
    model, photos, tmp_path
):
    for out in (tmp_path / "out", tmp_path / "one.parquet"):
        write(model, photos, out)
        before = read_table(out)
        with pytest.raises(ValueError, match=f"{out.name} has other predictions: arguments"):
            write(model, photos, out, top=1)
        write(model, photos, out)
        assert same(read_table(out), before)


@pytest.mark.parametrize("name", ["rows.csv", "rows.JSON"])
def test_a_name_of_another_kind_of_file_does_not_become_a_folder(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} would be a folder .* ends in .parquet"):
        check_store(tmp_path / name)
    check_store(tmp_path / "rows.v2")
    check_store(tmp_path / "rows.parquet")
    (tmp_path / name).mkdir()
    check_store(tmp_path / name)


def test_an_exported_file_writes_the_rows_of_its_bundle(model, photos, tmp_path):
    from fullstride.deploy.comparison import ComparisonImages
    from fullstride.deploy.export import export
    from fullstride.deploy.formats import open_file

    write(model, photos, tmp_path / "bundle.parquet")
    expected = read_table(tmp_path / "bundle.parquet")
    images = open_data("digits").test
    pictures = ComparisonImages([images.picture(index) for index in range(3)])
    for kind in ("normalised", "pixels"):
        export(model, tmp_path / f"{kind}.onnx", pictures, ExportOptions(input_kind=kind))
        exported = open_file(tmp_path / f"{kind}.onnx")
        write(exported, photos, tmp_path / f"{kind}.parquet", workers=1)
        table = read_table(tmp_path / f"{kind}.parquet")
        assert table["label"].equals(expected["label"])
        ours, theirs = (each["probability"].to_numpy() for each in (table, expected))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
        assert (
            read_key(tmp_path / f"{kind}.parquet").fingerprint
            != read_key(tmp_path / "bundle.parquet").fingerprint
        )


def test_on_a_full_disk_one_line_and_the_same_command_goes_on(
    saved, photos, tmp_path, capsys, monkeypatch
):
    sync, out = writing._sync, tmp_path / "out"
    words = f"predict {saved} {photos} --out {out} --device cpu --part-images 9".split()
    for name in ("_predictions.json", "part-000001.parquet"):

        def full(path: Path, name: str = name) -> None:
            if path.name.startswith(f".{name}."):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(path)

        monkeypatch.setattr(writing, "_sync", full)
        assert cli.run(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert str(out / name) in line
        assert not list(tmp_path.rglob(".*.new"))
    monkeypatch.setattr(writing, "_sync", sync)
    assert cli.run(words) == 0
    assert len(read_table(out)) == IMAGES


def command(say: object, words: list[str]) -> None:
    assert cli.run(words) == 0


@pytest.mark.slow
def test_killed_at_any_time_each_image_stands_once(saved, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    words = f"predict {saved} digits --device cpu --call-batch 8 --part-images 100 --out".split()
    assert cli.run([*words, str(whole)]) == 0
    kills, rng = 0, np.random.default_rng(0)
    while kills < 3:
        fork = Fork(command, [*words, str(out)])
        before = len(list(out.glob("part-*")))
        while len(list(out.glob("part-*"))) <= before and fork.process.is_alive():
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.2))
        fork.kill()
        if fork.end() == 0:
            break
        kills += 1
    assert kills
    assert cli.run([*words, str(out)]) == 0
    assert same(read_table(out), read_table(whole))
    assert read_table(out)["path"].to_pylist() == list(open_unlabelled("digits").images.names)
    assert not list(out.glob(".*"))


def labels_of(out: Path, best: list[tuple[int, float]], names: int = 3):
    """Pseudo-labels with one class for each image."""
    classes = np.array([[index] for index, _ in best], np.int32)
    values = np.array([[value] for _, value in best], np.float16)
    return read_pseudo_labels(store_of(out, classes, values, names))


def test_labels_are_the_teachers_probabilities_in_half_precision(tmp_path):
    model, data = tiny(), open_unlabelled("digits")
    data = replace(data, images=data.images.subset(range(99)))
    large = settings_of({"part_images": 999})
    write_outputs("pseudo_labels", model, data, tmp_path / "ten", 10, large)
    write_outputs("pseudo_labels", model, data, tmp_path / "two", 2, large)
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
        with pytest.raises(ValueError, match="classes") as caught:
            labels.for_classes(classes)
        assert "--" not in str(caught.value)  # train has no flag for the names of outputs


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


def test_what_is_no_collection_of_pictures_is_refused_in_words(model):
    with pytest.raises(ValueError, match="pictures of the type int: use paths"):
        next(predict(model, 123))
    with pytest.raises(ValueError, match=r"a picture of uint8 \(0, 8, 3\): use uint8"):
        next(predict(model, np.zeros((0, 8, 3), np.uint8)))
