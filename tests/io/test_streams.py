"""Standard streams that fail, and names that would write to a terminal more than their letters."""

import io
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride import cli
from fullstride.data.readers.decode import UnreadableImage, decode
from fullstride.io import console
from fullstride.io.console import LostOutputError, printable
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.report.console_tables import table

TRAIN = "train digits --model genet_tiny --device cpu --recipe.epochs 2 --recipe.warmup-epochs 0"
TRAIN += " --recipe.resolution 8 --recipe.batch-size 512"


def without_reader() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full() -> io.TextIOWrapper:
    return open("/dev/full", "w")  # noqa: SIM115, PTH123


LOST = {"closed pipe": without_reader, "full disk": full, "closed stream": lambda: None}


@contextmanager
def lost(kind, name="stdout"):
    """A standard stream that cannot be written to. Closing it fails if it has buffered text."""
    stream, before = LOST[kind](), getattr(sys, name)
    setattr(sys, name, stream)
    try:
        yield
    finally:
        setattr(sys, name, before)
        if stream:
            stream.close()


def test_a_row_of_a_table_is_one_line_where_the_output_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    cells = ["many words " * 30, "no_space" * 50]
    console.print_parts([table(["name", "note"], 2 * [cells])])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(cell.strip() in line for line in lines[1:] for cell in cells)


@pytest.mark.parametrize("kind", LOST)
def test_training_goes_on_without_its_output_and_says_so_once(kind, tmp_path, capsys):
    with lost(kind):
        assert cli.run([*TRAIN.split(), "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "bundle" / "bundle.json").exists()
    error = capsys.readouterr().err
    assert error.count("standard output is lost") == 1
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(("kind", "code"), list(zip(LOST, (141, 1, 1), strict=True)))
def test_a_command_whose_answer_is_its_output_ends_with_a_code(kind, code, capsys):
    for words in (["--version"], ["train", "--recipe.help"], ["measure", "cost", "genet_tiny"]):
        with lost(kind):
            assert cli.run(words) == code
        assert len(capsys.readouterr().err.splitlines()) == (code != 141)


def test_rich_reports_a_lost_output_as_print_does():
    for kind in LOST:
        with lost(kind), pytest.raises(LostOutputError), console.standard_streams():
            console.console().print("table")


def test_an_error_that_cannot_be_written_is_still_an_exit_code():
    for kind in LOST:
        with lost(kind, "stderr"):
            assert cli.run(["measure", "cost", "no_such_network"]) == 2


@pytest.mark.slow
def test_a_closed_standard_input_has_no_lines():
    words = f"{sys.executable} -m fullstride predict timm/resnet18 - <&-"
    done = subprocess.run(words, shell=True, capture_output=True, text=True)
    assert done.returncode == 2
    assert "defect" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path):
    words = f"{sys.executable} -m fullstride {TRAIN} --out {tmp_path / 'run'} <&- >&- 2>&-"
    assert subprocess.run(words, shell=True).returncode == 0
    cli.run(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a b-ä-日本-\U0001f469\u200d\U0001f52c", None),
        ("line\nbreak", r"line\nbreak"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b31mred", r"\x9b31mred"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\u2066hidden\u2069", r"\u2066hidden\u2069"),
        (os.fsdecode(b"\xff.png"), r"\udcff.png"),
        ("\u2028", r"\u2028"),
        ("\r\t\0\x7f", r"\r\t\x00\x7f"),
    ],
)
def test_a_name_is_shown_by_its_letters_alone(name, shown):
    assert printable(name) == (shown or name)
    printable(name).encode()


HOSTILE = ["red\x1b[31m\nfullstride: all is well", "\u202egnp", os.fsdecode(b"latin\xe9"), "[bold]"]


def check_output(captured: str) -> None:
    lines = captured.split("\n")
    assert not [line for line in lines if line.startswith("fullstride: all is well")]
    assert all(printable(line.replace("\t", "")) == line.replace("\t", "") for line in lines)
    captured.encode()


def test_no_name_of_a_file_or_class_writes_more_than_its_letters_to_the_terminal(tmp_path, capsys):
    torch.manual_seed(0)
    data = tmp_path / "data"
    rng = np.random.default_rng(0)
    for split, images in (("train", 8), ("test", 4)):
        for name in HOSTILE:
            folder = data / split / name
            folder.mkdir(parents=True)
            for number in range(images):
                pixels = rng.integers(256, size=(8, 8, 3)).astype("uint8")
                Image.fromarray(pixels).save(folder / f"{name}{number}.png")
            (folder / f"{name}broken.png").write_bytes(b"no image")
    bundle = tmp_path / HOSTILE[0]
    net = zoo.create("genet_tiny", classes=len(HOSTILE), resolution=8)
    Bundle(
        net, name="mine", classes=tuple(sorted(HOSTILE)), preprocessing=Preprocessing(resolution=8)
    ).save(bundle)
    run = str(tmp_path / f"run{HOSTILE[2]}")
    recipe = TRAIN.split()[2:]
    pictures = str(data / "test" / HOSTILE[0])
    for words in (
        ["predict", str(bundle), pictures],
        ["predict", str(bundle), pictures, "--json"],
        ["validate", str(bundle), "--data", str(data)],
        ["train", str(data), *recipe, "--out", run],
        ["validate", run],
        ["predict", run, pictures],
        ["report", run, "--out", str(tmp_path / "page.html")],
        ["export", run, "--format", "onnx", "--out", str(tmp_path / "net.onnx"), "--max-drop=100"],
        ["predict", str(tmp_path / "net.onnx"), pictures],
        ["data", "pack", str(data), str(tmp_path / "shards")],
        ["bench", run, "--rounds", "1", "--protocol", "online", "--out", str(tmp_path / "b.json")],
    ):
        code = cli.run(words)
        captured = capsys.readouterr()
        assert code == 0, (words[0], captured.err)
        check_output(captured.out)
        check_output(captured.err)
    for words in (
        ["predict", HOSTILE[1], pictures],
        ["measure", "cost", HOSTILE[0]],
        ["train", HOSTILE[2], *recipe, "--out", run],
        ["report", HOSTILE[0]],
        ["nosuch" + HOSTILE[0]],
    ):
        assert cli.run(words) == 2
        captured = capsys.readouterr()
        check_output(captured.err)
        assert len(captured.err.splitlines()) == 1


def test_a_damaged_tiff_is_read_or_refused_without_lines_of_its_library(tmp_path, capfd):
    pixels = np.random.default_rng(0).integers(0, 255, (40, 40), np.uint8)
    Image.fromarray(pixels).convert("1").save(tmp_path / "fax.tif", compression="group4")
    data = (tmp_path / "fax.tif").read_bytes()
    for position in range(20, 120, 10):
        damaged = data[:position] + b"\xff\0\xff\0" + data[position + 4 :]
        with suppress(UnreadableImage):
            decode(damaged, 3)
        with Image.open(io.BytesIO(damaged)) as image, suppress(OSError):
            image.load()
    captured = capfd.readouterr().err  # what Pillow alone prints shows that this test can fail
    assert "Fax" in captured
    for position in range(20, 120, 10):
        with suppress(UnreadableImage):
            decode(data[:position] + b"\xff\0\xff\0" + data[position + 4 :], 3)
    assert capfd.readouterr().err == ""
    os.write(2, b"still open")
    assert capfd.readouterr().err == "still open"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("waited_s", "rank", "shown"), [(3, "0", True), (1, "0", False), (3, "1", False)]
)
def test_reading_has_a_bar_from_two_seconds_on(monkeypatch, waited_s, rank, shown):
    seconds = iter([0.0, *[waited_s] * 9])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TERM", "xterm")
    assert [*console.counted(range(600), "rows")] == [*range(600)]
    assert ("rows" in sys.stdout.getvalue()) == shown
    assert ("/600" in sys.stdout.getvalue()) == shown


@pytest.mark.parametrize(
    ("number", "noun", "verb", "words"),
    [
        (0, "image", "are", "0 images are"),
        (1, "image", "are", "1 image is"),
        (1, "class", "have", "1 class has"),
        (1200, "class", "have", "1,200 classes have"),
        (1, "box", "reach", "1 box reaches"),
        (2, "box", "reach", "2 boxes reach"),
        (1, "family", "go", "1 family goes"),
        (2, "family", "", "2 families"),
        (1, "copy", "were", "1 copy was"),
        (1, "pair", "show", "1 pair shows"),
        (14, "epoch", "", "14 epochs"),
    ],
)
def test_a_number_has_its_noun_and_its_verb_in_the_right_form(number, noun, verb, words):
    assert console.count_of(number, noun, verb) == words


def test_one_file_that_is_not_used_is_no_files(capsys):
    ignored = {"files without a suffix": 1, ".heic (convert them to JPEG)": 1, "hidden": 2}
    console.report_ignored(ignored)
    line = "not used: 1 file without a suffix; 1 .heic (convert them to JPEG); 2 hidden"
    assert line in capsys.readouterr().err
