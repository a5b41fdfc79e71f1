"""README, Start, Guides, Tasks, Reproduce and Extend: their commands run, and print what is shown.

What needs hours, another machine or the network is marked on the page, and parsed. The blocks of
the pages in `OWN_TESTS` are run there.
"""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from local_hub import LocalHub
from networks import first_block
from pages import PAGES, ROOT, blocks
from PIL import Image

from fullstride import cli, train_network
from fullstride.commands import COMMANDS
from fullstride.examples import write_scenes
from fullstride.measure.environment import cpu_name
from fullstride.nets.families import SPECS

OWN_TESTS = {
    "docs/guides/your_data.md": "tests/data/test_your_data.py",
    "docs/guides/run_the_file.md": "tests/deploy/test_run_the_file.py",
    "docs/extend/add_a_family.md": "tests/nets/test_add_a_family.py",
    "docs/extend/add_a_task.md": "tests/tasks/test_add_a_task.py",
}
RUN = [page for page in PAGES if page not in OWN_TESTS]
MOST_NOT_RUN, MOST_OTHER_NUMBERS = 18, 4  # they may become fewer
CLASSES = ("animals", "food", "plants", "tools")
# What the commands of a page find, beside pictures and scenes.
NEEDS = {
    "README.md": ["classify.py"],
    "docs/guides/fit.md": ["BOXES", "SCENES"],
    "docs/guides/shipping.md": ["runs/mine"],
    "docs/guides/training.md": ["runs/a"],
    "docs/guides/unlabelled.md": ["runs/photos", "runs/teacher"],
    "docs/reproduce/studies.md": ["run"],
    "docs/tasks/video.md": ["holiday.mp4", "long.mp4", "videos", "frames_of_one"],
}
PICTURES = ("PHOTOS", "IMAGENET", "archive", "photo.jpg")
# Flags that make a command short: those of the first pattern that "PAGE: WORDS" has.
ONE = "--weights none --candidates genet_tiny --resolutions 32"
ONNX = f"{ONE} --formats onnx --precisions fp32"
SMALL = f"{ONNX} --budget-ms 500"  # which a busy machine keeps too
PLACES = f"{ONNX.replace('32 ', '64 ')} --budget-ms 2000 --epochs 1 --task.head-width 32"
SHORTER = {
    "start/index.md: fit .*--dry-run": SMALL,
    "study search digits .*--dry-run": "--measured 6 --count 20000",
    "--dry-run": "",
    "(README|index).md: fit": f"{SMALL} --epochs 1",
    "fit .*--images-per-s 2000": f"{ONNX} --images-per-s 2 --dry-run",
    "fit .*--target rtx4090": f"{ONE} --dry-run",
    "fit .*--pick 3.5": f"{ONNX} --budget-ms 500 1000 --epochs 1 --pick 1000",
    # the data say so too, but options of a task need its name
    "fit BOXES": f"{PLACES} --task detect --task.head-convs 1",
    "fit SCENES": PLACES,
    "fit .*--budget-ms 2 5 10": f"{ONNX} --budget-ms 500 1000 --dry-run",
    "fit PHOTOS --hours 3": f"{ONNX} --dry-run",
    ": fit ": f"{SMALL} --dry-run",
    "train PHOTOS .*hf:": "--model genet_tiny --epochs 1 --resolution 32",
    ": train PHOTOS": "--epochs 1 --resolution 32",
    ": train IMAGENET": "--model genet_tiny --epochs 1 --resolution 32 --batch-size 8",
    ": train digits": "--epochs 2",
    ": data bench ": "--resolution 32 --workers 1",
    ": study search": "--master genet_tiny --target v100-fp16 --count 20000 --dry-run",
    "--models genet_light --regimes": "--models genet_tiny --regimes 1 --widths 0.5 1 2 --depths 1 "
    "--resolutions 32 --seeds 1 --band 0",
    ": study scale": "--dry-run",
}
# What differs in an output with other numbers beside them.
SAME = {
    r"model\.onnx": "model",
    r"openvino|onnx": "FORMAT",
    "|".join(CLASSES): "CLASS",
    rf"{re.escape(cpu_name())}|AMD EPYC|Intel\(R\) Xeon\(R\) Processor": "CPU",
    r"\S*\d\S*|stem\.\S+|head\.\S+": "#",
}


def check(shown: str, printed: str, *, any_number: bool) -> None:
    """Each line of the page is printed, in its order; where numbers may differ, without them."""
    if not any_number:
        lines = [line.rstrip() for line in shown.splitlines()]
        assert [line for line in map(str.rstrip, printed.splitlines()) if line in lines] == lines
        return
    for pattern, word in SAME.items():
        shown, printed = (re.sub(pattern, word, text) for text in (shown, printed))
    lines = (re.escape(" ".join(line.split())) for line in shown.splitlines())
    assert re.search(".*".join(lines), " ".join(printed.split())), printed


def fullstride_words(words: list[str]) -> list[str]:
    """What follows `fullstride` in a command; nothing if it is of another program."""
    return words[words.index("fullstride") + 1 :] if "fullstride" in words else []


def test_what_is_not_run_says_why_and_does_not_become_more():
    marks = [block.mark for page in PAGES for block in blocks(page) if block.mark]
    reasons = [re.fullmatch(r"(not run|other numbers): \w.+", mark) for mark in marks]
    assert all(reasons), marks
    kinds = [reason[1] for reason in reasons if reason]
    assert kinds.count("not run") <= MOST_NOT_RUN
    assert kinds.count("other numbers") <= MOST_OTHER_NUMBERS
    for page, test in OWN_TESTS.items():
        assert Path(page).name in (ROOT / test).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_in_blocks_of_commands(page):
    assert (ROOT / page).read_text().count("\n```") == 2 * len(blocks(page))
    programs = r"^(fullstride|python|pip|torchrun|ray|ssh) "
    for block in blocks(page):
        assert block.language == "sh" or not re.match(programs, block.text), block.text


def test_pages_that_are_not_run_here_have_no_commands_in_blocks():
    """The examples of commands.md and python.md are in docstrings, where they run."""
    generated = [f"docs/reference/{name}.md" for name in ("commands", "python")]
    others = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")} - {*PAGES}
    for page in others - {*generated}:
        for block in blocks(page):
            assert not re.search(r"^(fullstride|python|pip|jupyter|import) ", block.text, re.M), (
                page
            )


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_not_run_are_parsed(page):
    for block in blocks(page):
        if not block.is_run:
            for words in filter(None, map(fullstride_words, block.commands)):
                cli.parse(words)


def flags_of(name: str) -> set[str]:
    text = (ROOT / "docs/reference/commands.md").read_text()
    section = text.partition(f"\n## fullstride {name}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"--[\w.-]+", section))


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_and_tables_have_flags_that_exist(page):
    for text in re.findall(r"`fullstride ([^`]*)`", (ROOT / page).read_text()):
        name, _ = cli.command_in(text.split())
        flags = set(re.findall(r"(?<!\S)--[\w.-]+", text))
        flags = {re.sub(r"^--(recipe|task)\..*", "", flag) for flag in flags} - {""}
        assert not name or name in COMMANDS, text
        assert flags <= flags_of(name) | {"--help", "--help-all"}, text


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    """What the commands of the pages need: pictures and scenes of `fullstride.examples`, a run."""
    pytest.importorskip("sklearn")
    pytest.importorskip("skimage")
    av = pytest.importorskip("videos")
    folder = tmp_path_factory.mktemp("stock")
    write_scenes(folder / "SCENES", {"train": 96, "val": 8, "test": 8}, 64)
    for number, picture in enumerate(sorted((folder / "SCENES/train").glob("*.png"))):
        place = folder / "PHOTOS" / CLASSES[number % 4] / f"{number // 4}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.open(picture).save(place)
    for data, name in (("digits", "run"), (folder / "PHOTOS", "trained")):
        train_network(data, "genet_tiny", folder / name, steps=2, resolution=32)
    for number, name in enumerate(("holiday.mp4", "long.mp4", "videos/a.mp4")):
        (folder / name).parent.mkdir(exist_ok=True)
        av.write_video(folder / name, 20, seed=number)
    for number, frame in enumerate(av.drawn(10)):
        (folder / "frames_of_one").mkdir(exist_ok=True)
        Image.fromarray(frame).save(folder / f"frames_of_one/{number}.png")
    (folder / "runs").mkdir()
    for name in ("mine", "a", "photos", "teacher"):
        (folder / "runs" / name).symlink_to(folder / "trained")
    for name, source in {"archive": "SCENES/test", "photo.jpg": "PHOTOS/food/0.jpg"}.items():
        (folder / name).symlink_to(folder / source)
    (folder / "IMAGENET").symlink_to(folder / "PHOTOS")
    (folder / "BOXES").mkdir()
    for name in ("annotations", "train", "val", "test"):  # scenes without their masks
        (folder / "BOXES" / name).symlink_to(folder / "SCENES" / name)
    (script,) = (block for block in blocks("docs/guides/run_the_file.md") if block.title)
    (folder / script.title).write_text(script.text)
    return folder


def run(words: list[str], page: str, patch: pytest.MonkeyPatch) -> None:
    """Run a command in this process, shortened by the table."""
    if words[0] == "fullstride":
        line = f"{page}: {' '.join(words[1:])}"
        more = next((flags for part, flags in SHORTER.items() if re.search(part, line)), "")
        with patch.context() as small:
            if ONE in more:
                small.setitem(SPECS, "genet_tiny", first_block("genet_tiny"))
            assert cli.run([*words[1:], *more.split()]) == 0, words
    else:
        assert words[0] == "python", words
        patch.setattr(sys, "argv", words[1:] if words[1] != "-m" else words[2:])
        if words[1] == "-m":
            patch.delitem(sys.modules, f"{words[2]}.__main__", raising=False)  # runpy warns of it
            runpy.run_module(words[2], run_name="__main__")
        else:
            runpy.run_path(words[1], run_name="__main__")


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run_as_they_stand(page, stock, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in (*PICTURES, *NEEDS.get(page, ())):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(stock / name)
    if "hf:USER/NAME" in (ROOT / page).read_text():
        hub = LocalHub(monkeypatch, tmp_path)
        shutil.copytree(stock / "trained/bundle", hub.root / "USER/NAME")
    printed, names = "", {}
    for block in blocks(page):
        if block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "text" and block.is_run and printed:
            check(block.text, printed, any_number=block.mark.startswith("other numbers: "))
            printed = ""
        elif block.language in ("sh", "python"):
            capsys.readouterr()
            for words in block.commands if block.is_run else ():
                run(words, page, monkeypatch)
            if block.language == "python":
                exec(compile(block.text, page, "exec"), names)
            printed = capsys.readouterr().out
