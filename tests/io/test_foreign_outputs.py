"""Whatever a command is told to write to: nothing that fullstride did not write is replaced."""

import io
import os
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from PIL import Image

from fullstride import cli
from fullstride.commands import COMMANDS
from fullstride.nets.bundle import Bundle
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.train import run_folder
from fullstride.train.recipes.named import DIGITS

# (command, flag, ending of the path) -> the words before the path.
WORDS = {
    ("data pack", "out", ""): "data pack digits",
    ("train", "out", ""): "train digits --model genet_tiny --out",
    ("train", "teacher_cache", ""): "train digits --model genet_tiny --recipe.epochs 1 "
    "--recipe.resolution 16 --out RUN --recipe.teacher TEACHER --teacher-cache",
    ("validate", "out", ".json"): "validate TEACHER --data digits --device cpu --out",
    ("predict", "out", ""): "predict TEACHER digits --device cpu --out",
    ("data label", "out", ""): "data label TEACHER digits --device cpu --out",
    ("bench", "out", ".json"): "bench genet_tiny --device cpu --out",
    ("bench", "out", ""): "bench genet_tiny --device cpu --suite papers --quick --out",
    ("data bench", "out", ".json"): "data bench digits --model genet_tiny --out",
    ("fit", "out", ""): "fit digits --budget-ms 9 --target rtx4090 --weights none --dry-run --out",
    ("measure calibrate", "out", ".json"): "measure calibrate --device cpu --out",
    ("measure calibrate", "times_out", ".json"): "measure calibrate --device cpu --times-out",
    ("choose", "out", ".png"): "choose --target rtx3090 --budget-ms 1 --out",
    ("study rank", "out", ".png"): "study rank genet_tiny --out",
    ("study blocks", "out", ""): "study blocks --device cpu --out",
    ("study figures", "out", ""): "study figures --out",
    ("export", "out", ".onnx"): "export RUN --out",
    ("export", "out", ".pt2"): "export RUN --force --format auto --precision bf16 --out",
    ("export", "out", ""): "export RUN --force --out",
    ("study search", "out", ""): "study search digits --master genet_tiny --budget-ms 9 "
    "--target t4 --out",
    ("study scale", "out", ""): "study scale digits --models genet_tiny --target t4 "
    "--device cpu --out",
    ("study analyse", "out", ""): "study analyse resnet_rs --out",
    ("report", "out", ".html"): "report RUN --out",
    ("report", "picture", ".png"): "report RUN --picture",
}
INPUTS = {(name, "bench") for name in ("report", "study figures", "export")}
INPUTS |= {(name, "class_names") for name in ("validate", "predict", "export", "data label")}
INPUTS |= {("choose", "measured"), ("measure estimate", "measured"), ("predict", "nearest")}
# folders of any pictures, each of which is checked: tests/deploy/test_dense_files.py
PICTURES = {("predict", "draw"), ("predict", "maps")}
FOLDERS = [key for key in WORDS if not key[2]]
# The same with an argument that is refused, for which no check of the output has a reason.
WRONG = {
    "data pack": "data pack gone",
    "train": "train digits --model gone --out",
    "validate": "validate gone --out",
    "predict": "predict gone digits --out",
    "data label": "data label TEACHER gone --out",
    "bench": "bench gone --device cpu --out",
    "data bench": "data bench digits --model gone --out",
    "measure calibrate": "measure calibrate --device cpu --batches 0 --out",
    "fit": "fit digits --budget-ms 9 --target gone --out",
    "study search": "study search digits --master gone --budget-ms 9 --out",
    "study scale": "study scale digits --models gone --out",
    "study analyse": "study analyse gone --out",
    "choose": "choose --target gone --budget-ms 1 --out",
    "study rank": "study rank gone --out",
    "study blocks": "study blocks --device cpu --resolution 0 --out",
    "study figures": "study figures --target gone --out",
    "export": "export RUN --out",
    "report": "report RUN --out",
}
FILES = [key for key in WORDS if key[2] and "--force" not in WORDS[key]]
# A name that the command writes in its folder -> content of others.
MEMBERS = {
    "train": {"run.json": '{"model": "theirs"}', "log.jsonl": "{}\n", "best/photo.txt": "mine"},
    "predict": {"_predictions.json": '{"author": "me"}', "part-000000.parquet": "PAR1"},
    "data label": {"_predictions.json": '{"author": "me"}'},
    "bench": {"results.md": "# Mine\n"},
    "fit": {"fit_config.json": '{"author": "me"}', "report.html": "<!DOCTYPE html>Mine"},
    "study search": {"search_config.json": '{"author": "me"}'},
    "study scale": {"scale_config.json": '{"author": "me"}'},
    "study analyse": {"scale.json": '{"author": "me"}', "report.html": "<!DOCTYPE html>Mine"},
    "study blocks": {"blocks.json": '{"rows": []}'},
    "study figures": {"figures.html": "<!DOCTYPE html><title>Mine</title>"},
    "export": {"model.xml": "<net><rt_info/></net>", "model.bin": "weights"},
    "data pack": {"index.json": "{}"},
}


def photo() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(out, "JPEG")
    return out.getvalue()


def content(folder: Path) -> dict[str, object]:
    """All files under `folder` with their bytes and times, links, and folders."""
    every: dict[str, object] = {}
    for each in sorted(folder.rglob("*")):
        mode = each.lstat()
        data = each.read_bytes() if each.is_file() and not each.is_symlink() else b""
        every[str(each.relative_to(folder))] = (data, mode.st_mode, mode.st_mtime_ns, mode.st_ino)
    return every


@pytest.fixture(scope="module", autouse=True)
def _teacher(tmp_path_factory):
    """A trained network for the words TEACHER, and a folder in which no run is for RUN."""
    folder = tmp_path_factory.mktemp("networks")
    spec = replace(SPECS["genet_tiny"], in_channels=1, classes=10)
    pixels = Preprocessing(resolution=16, mean=(0.5,), std=(0.5,))
    bundle = Bundle(
        Network(spec), name="teacher", classes=tuple(map(str, range(10))), preprocessing=pixels
    )
    bundle.save(folder / "teacher")
    (folder / "empty").mkdir()
    NAMES.update(TEACHER=str(folder / "teacher"), RUN=str(folder / "empty"))


NAMES: dict[str, str] = {}


def refused(words: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line of a command that is refused with `path` as its last word."""
    assert cli.run([*(NAMES.get(word, word) for word in words.split()), str(path)]) == 2
    assert not content(Path(NAMES["RUN"]))
    error = capsys.readouterr().err
    assert error.startswith("fullstride: ")
    assert len(error.splitlines()) == 1
    return error


def identity(key: tuple[str, str, str]) -> str:
    return "-".join(key)


def paths_of(command: Any) -> Iterator[str]:
    """The parameters of a command, and the fields of its dataclasses, that are paths."""
    for name, hint in get_type_hints(command).items():
        if is_dataclass(hint):
            yield from paths_of(hint)
        elif hint is Path or Path in get_args(hint):
            yield name


def test_every_flag_with_a_path_is_an_output_of_this_table_or_an_input():
    flags = {(name, flag) for name, command in COMMANDS.items() for flag in paths_of(command)}
    assert flags - INPUTS - PICTURES == {key[:2] for key in WORDS}
    assert {key[0] for key in FOLDERS if key[1] == "out"} == set(MEMBERS)


@pytest.mark.parametrize("key", FILES, ids=identity)
def test_a_file_of_others_is_refused_and_stays_as_it_is(key, tmp_path, capsys):
    path = tmp_path / f"mine{key[2]}"
    others = [photo(), b"mine\n", b'{"author": "me"}', b"[[]]", b"PNG fullstride <!DOCTYPE html>"]
    for data in others:
        path.write_bytes(data)
        before = content(tmp_path)
        assert str(path) in refused(WORDS[key], path, capsys)
        assert content(tmp_path) == before
    path.unlink()
    for other in ("photo.jpg", "report.txt", "no_suffix"):  # of another kind
        path = tmp_path / other
        if not (key[0] == "export" and other == "no_suffix"):
            assert str(path) in refused(WORDS[key], path, capsys)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("key", FILES, ids=identity)
def test_a_folder_a_fifo_or_a_loop_of_links_is_no_place_for_a_file(key, tmp_path, capsys):
    path = tmp_path / f"mine{key[2]}"
    path.mkdir()
    (path / "photo.jpg").write_bytes(photo())
    before = content(tmp_path)
    assert str(path) in refused(WORDS[key], path, capsys)
    assert content(tmp_path) == before
    os.mkfifo(tmp_path / f"fifo{key[2]}")
    (tmp_path / f"loop{key[2]}").symlink_to(tmp_path / f"loop{key[2]}")
    for name in ("fifo", "loop"):
        before = content(tmp_path)
        assert name in refused(WORDS[key], tmp_path / f"{name}{key[2]}", capsys)
        assert content(tmp_path) == before


@pytest.mark.parametrize("key", FOLDERS, ids=identity)
def test_a_folder_with_files_of_others_is_refused_and_stays_as_it_is(key, tmp_path, capsys):
    path = tmp_path / "mine"
    path.write_text("a file")
    before = content(tmp_path)
    assert str(path) in refused(WORDS[key], path, capsys)
    assert content(tmp_path) == before
    path.unlink()
    path.mkdir()
    (path / "photo.jpg").write_bytes(photo())
    beside = ("bench", "study blocks", "study figures", "study analyse")
    shared = key[0] in beside or key[1] == "teacher_cache"
    if not shared:  # these write beside what is there
        before = content(tmp_path)
        assert str(path) in refused(WORDS[key], path, capsys)
        assert content(tmp_path) == before
    if key[1] == "teacher_cache":
        return
    for name, text in MEMBERS[key[0]].items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
        before = content(tmp_path)
        assert str(path) in refused(WORDS[key], path, capsys)
        assert content(tmp_path) == before


def test_a_file_in_the_place_of_the_log_for_tensorboard_is_refused_before_training(
    tmp_path, capsys
):
    run_folder.create_or_resume(tmp_path / "run", run_config())
    (tmp_path / "run" / "tensorboard").write_text("mine")
    before = content(tmp_path)
    words = "train digits --model genet_tiny --tensorboard --out"
    assert "tensorboard is a file" in refused(words, tmp_path / "run", capsys)
    assert content(tmp_path) == before


@pytest.mark.parametrize("command", WRONG)
def test_a_refused_command_leaves_no_folder_behind(command, tmp_path, capsys):
    for key in WORDS:
        if key[0] == command and key[1] == "out" and "--force" not in WORDS[key]:
            refused(WRONG[command], tmp_path / "new" / "deeper" / f"mine{key[2]}", capsys)
            assert not any(tmp_path.iterdir())
    assert set(WRONG) == {key[0] for key in WORDS}


def test_training_that_fails_before_its_first_checkpoint_can_begin_again(tmp_path):
    folder = tmp_path / "run"
    config = run_config()
    run_folder.create_or_resume(folder, config)
    run_folder.create_or_resume(folder, replace(config, model="another"))
    assert run_folder.read_config(folder, "").model == "another"


@pytest.mark.parametrize("member", ["log.jsonl", "checkpoint.pt", "best/photo.txt", "bundle/a.txt"])
def test_what_others_put_into_a_run_is_not_replaced(member, tmp_path):
    folder = tmp_path / "run"
    run_folder.create_or_resume(folder, run_config())
    (folder / member).parent.mkdir(exist_ok=True)
    (folder / member).write_bytes(photo())
    before = content(tmp_path)
    with pytest.raises(ValueError, match=member.partition("/")[0]):
        run_folder.create_or_resume(folder, replace(run_config(), model="another"))
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model": "theirs"}', '{"name": "a", "version": "1.0.0"}']
)
def test_a_configuration_of_others_makes_a_folder_no_run_even_without_a_checkpoint(text, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(text)
    before = content(tmp_path)
    with pytest.raises(ValueError, match="run.json"):
        run_folder.create_or_resume(tmp_path / "run", run_config())
    assert content(tmp_path) == before


def run_config() -> run_folder.RunConfig:
    return run_folder.RunConfig(
        model="genet_tiny",
        weights="",
        data="digits",
        val=None,
        fingerprint="a",
        classes=("b", "c"),
        spec={},
        preprocessing=asdict(Preprocessing()),
        recipe=asdict(DIGITS),
        efficiency="plain",
        score_every_epochs=1,
        precision="fp32",
        channels_last=True,
        grad_accum_steps=1,
    )
