"""Files are written whole or not at all, and nothing that fullstride did not write is replaced."""

import ast
import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from fullstride.io import writing
from fullstride.io.writing import (
    Output,
    atomic_write,
    check_output,
    exchange,
    json_output,
    scratch_folder,
)
from fullstride.nets.bundle import OUTPUT as BUNDLE
from fullstride.nets.bundle import Bundle
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.report.page import write
from fullstride.report.plots import save_png

NOBODY = 2**22 + 1  # above the largest number of a process
RESULTS = json_output("results", "rows")
ANY = Output("a file", "", lambda path: True)
FOLDER = Output("a pair", "", lambda path: (path / "one").exists(), ("one", "two", "*/three"))


def write_folder(path: Path, text: str) -> None:
    with atomic_write(path, FOLDER) as beside:
        (beside / "sub").mkdir(parents=True)
        for name in ("one", "two", "sub/three"):
            (beside / name).write_text(text)


def content(path: Path) -> dict[str, bytes | str]:
    """Files under `path`, hidden ones too, with their bytes; where links lead; empty folders."""
    every = {}
    for each in sorted([path, *path.rglob("*")]):
        name = str(each.relative_to(path))
        if each.is_symlink():
            every[name] = str(each.readlink())
        elif each.is_file():
            every[name] = each.read_bytes()
        elif not any(each.iterdir()):
            every[name] = "an empty folder"
    return every


# ---- one file


def test_a_file_is_replaced_only_when_the_new_one_is_complete(tmp_path):
    path = tmp_path / "sub" / "file"
    with atomic_write(path, ANY) as beside:
        beside.write_text("one")

    def fail():
        with atomic_write(path, ANY) as beside:
            beside.write_text("half of t")
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert content(tmp_path) == {"sub/file": b"one"}


def test_what_fails_or_is_refused_leaves_no_folder_behind(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "a" / "b" / "c", ANY) as beside:
        beside.write_text(str(1 / 0))
    with pytest.raises(ValueError, match="ends in .json"):
        check_output(tmp_path / "a" / "b.txt", RESULTS)
    check_output(tmp_path / "a" / "b.json", RESULTS)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["mine", "{}", '{"row": 1}', "[]", "[3]", '"rows"', "[" * 100_000])
def test_json_of_others_is_refused_and_ours_is_replaced(text, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    for refuse in (lambda: check_output(path, RESULTS), atomic_write(path, RESULTS).__enter__):
        with pytest.raises(ValueError, match=r"a\.json .*results"):
            refuse()
    assert content(tmp_path) == {"a.json": text.encode()}
    for ours in ("", '{"rows": 1, "more": 2}', '[{"rows": []}]'):
        path.write_text(ours)
        with atomic_write(path, RESULTS) as beside:
            beside.write_text("new")
        assert path.read_text() == "new"


def test_what_comes_to_the_path_while_a_file_is_written_is_not_replaced(tmp_path):
    path = tmp_path / "a.json"

    def write_late():
        with atomic_write(path, RESULTS) as beside:
            beside.write_text("new")
            path.write_text("another program's")

    with pytest.raises(ValueError, match="results"):
        write_late()
    assert content(tmp_path) == {"a.json": b"another program's"}


def test_pages_and_plots_are_recognised_by_what_is_in_them(tmp_path):
    page, plot = tmp_path / "a.html", tmp_path / "a.png"
    for _ in range(2):
        write(page, '<!DOCTYPE html><meta name="generator" content="fullstride">')
        save_png(Figure((1, 1)), plot)
    with Image.open(plot) as image:
        assert image.info["Software"] == "fullstride"
    Figure((1, 1)).savefig(plot)
    page.write_text("<!DOCTYPE html><title>fullstride</title>")
    before = content(tmp_path)
    with pytest.raises(ValueError, match="plot"):
        save_png(Figure((1, 1)), plot)
    with pytest.raises(ValueError, match="page"):
        write(page, "new")
    assert content(tmp_path) == before


def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "file"
    link.symlink_to(tmp_path / "disk" / "file")
    for text in ("one", "two"):
        with atomic_write(link, ANY) as beside:
            beside.write_text(text)
        assert content(tmp_path) == {"disk/file": text.encode(), "file": str(link.readlink())}
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ValueError, match="loop of links"):
        check_output(loop, ANY)


def test_a_device_or_a_fifo_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (Path(os.devnull), tmp_path / "fifo"):
        for refuse in (lambda p=path: check_output(p, ANY), atomic_write(path, ANY).__enter__):
            with pytest.raises(ValueError, match="no regular file"):
                refuse()
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


def test_the_umask_decides_who_may_read_what_is_written(tmp_path):
    torch.manual_seed(0)
    spec = SPECS["genet_tiny"]
    bundle = Bundle(
        Network(spec),
        name="a",
        classes=tuple(map(str, range(spec.classes))),
        preprocessing=Preprocessing(),
    )
    for mask, usual in ((0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
        earlier = os.umask(mask)
        try:
            bundle.save(tmp_path / "b")
        finally:
            os.umask(earlier)
        files = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.glob("b/*")}
        assert files == dict.fromkeys(BUNDLE.files, usual)
        assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o777 & ~mask


def test_a_file_is_on_the_disk_before_it_is_renamed_and_its_name_after(tmp_path, monkeypatch):
    events = []
    sync, replace = os.fsync, os.replace

    def record(descriptor):
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def rename(source, target, *more, **options):
        events.append("rename")
        replace(source, target, *more, **options)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "replace", rename)
    monkeypatch.setattr(os, "rename", rename)
    with atomic_write(tmp_path / "file", ANY) as beside:
        beside.write_text("new")
    assert events == [beside.name, "rename", tmp_path.name]
    for _ in range(2):
        events.clear()
        write_folder(tmp_path / "folder", "new")
        first = events.index("rename")
        assert {"one", "two", "three", "sub"} < set(events[:first])
        assert events[-1] == tmp_path.name or tmp_path.name in events[first:]


# ---- a folder


def test_files_of_others_in_a_folder_of_ours_stay(tmp_path):
    folder = tmp_path / "b"
    write_folder(folder, "old")
    (folder / "notes").mkdir()
    (folder / "notes" / "one").write_text("mine")  # a name of ours, elsewhere
    (folder / "photo.jpg").write_bytes(b"photo")
    (folder / "link").symlink_to(tmp_path)
    write_folder(folder, "new")
    assert content(tmp_path) == {
        "b/one": b"new",
        "b/two": b"new",
        "b/sub/three": b"new",
        "b/notes/one": b"mine",
        "b/photo.jpg": b"photo",
        "b/link": str(tmp_path),
    }


@pytest.mark.parametrize("other", ["file", "folder"])
def test_a_folder_of_others_is_refused_by_its_first_file(other, tmp_path):
    path = tmp_path / "b"
    if other == "folder":
        path.mkdir()
        (path / "photo.jpg").write_bytes(b"photo")
        (path / "two").write_text("a name of ours")
    else:
        path.write_text("mine")
    before = content(tmp_path)
    with pytest.raises(ValueError, match="photo.jpg" if other == "folder" else "is a file"):
        write_folder(path, "new")
    with pytest.raises(ValueError, match="folder"), atomic_write(path.parent, ANY):
        pass
    assert content(tmp_path) == before


# Ends the process at the n-th event that Python's interpreter reports of the file system, for each
# n until none is left, and prints what is at the path then and after the next write.
KILLS = """
import os, shutil, sys
from pathlib import Path
from fullstride.io import writing
from fullstride.io.writing import Output

folder, kind, can_exchange = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "exchange"
if not can_exchange:
    writing._renameat2 = lambda: None
path = folder / "b"
FOLDER = Output("a pair", "", lambda path: (path / "one").exists(), ("one", "two"))
FILE = Output("a file", "", lambda path: True)
count = limit = None

def event(name, arguments):
    global count
    if limit is not None and name.partition(".")[0] in ("open", "os", "shutil", "ctypes"):
        count += 1
        if count == limit:
            os._exit(9)

def write(text):
    if kind == "file":
        with writing.atomic_write(path, FILE) as beside:
            beside.write_text(text)
    else:
        with writing.atomic_write(path, FOLDER) as beside:
            beside.mkdir()
            (beside / "one").write_text(text)
            (beside / "two").write_text(text)

def state():
    if not path.exists():
        return "nothing"
    if kind == "file":
        return path.read_text()
    texts = {(path / name).read_text() for name in ("one", "two")}
    return texts.pop() if len(texts) == 1 else "a mixture"

sys.addaudithook(event)
step, code = 0, 9
while code == 9:
    step += 1
    shutil.rmtree(folder)
    folder.mkdir()
    write("old")
    if kind == "folder":
        (path / "photo").write_text("mine")
    child = os.fork()
    if not child:
        count, limit = 0, step
        write("new")
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    after_kill = state()
    writing.check_output(path, FILE if kind == "file" else FOLDER)
    recovered = state()
    left = sorted(each.name for each in folder.iterdir())
    photo = kind == "file" or (path / "photo").read_text() == "mine"
    print(step, after_kill, recovered, left == ["b"], photo)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("way", ["exchange", "rename"])
def test_a_kill_at_any_point_leaves_the_earlier_or_the_new_content_whole(kind, way, tmp_path):
    words = [sys.executable, "-c", KILLS, str(tmp_path / "x"), kind, way]
    (tmp_path / "x").mkdir()
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) > 6
    at_once, recovered = ({line[column] for line in lines} for column in (1, 2))
    assert recovered == {"old", "new"}
    if way == "exchange" or kind == "file":
        assert at_once == {"old", "new"}
    assert {tuple(line[3:]) for line in lines} == {("True", "True")}


@pytest.mark.parametrize("where", [".", "..", "/", "a/.."])
def test_a_path_without_a_name_is_refused_in_one_line(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for refuse in (check_output, lambda *words: atomic_write(*words).__enter__()):
        with pytest.raises(ValueError, match=r"is no name of a folder: .* such as .*new$"):
            refuse(Path(where), FOLDER)
    assert content(tmp_path) == {".": "an empty folder"}


@pytest.mark.skipif(writing._renameat2() is None, reason="no exchange of names in this system")
def test_two_folders_exchange_their_names(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert content(tmp_path) == {"a/file": b"b", "b/file": b"a"}
    with pytest.raises(FileNotFoundError, match="gone"):
        exchange(tmp_path / "a", tmp_path / "gone")


def test_what_other_machines_and_running_processes_write_is_left_alone(tmp_path):
    host, theirs = writing._host(), [".file.1.new", ".file.77-00000000.new", ".file.x.new"]
    dead = [f".file.{os.getpid()}.new", f".file.{os.getpid()}-{host}.new", f".file.{NOBODY}.new"]
    for name in [*theirs, *dead, ".file.78-00000000.new"]:
        (tmp_path / name).write_text("half")
    os.utime(tmp_path / ".file.78-00000000.new", (0, 0))  # nobody has written it for years
    check_output(tmp_path / "file", ANY)
    assert sorted(content(tmp_path)) == sorted(theirs)


def test_what_another_container_with_the_same_host_name_writes_is_left_alone(tmp_path, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr(writing, "machine", lambda: "the same boot pid:[7]")
        theirs = tmp_path / f".file.{NOBODY}-{writing._host()}.new"
    theirs.write_text("half")
    check_output(tmp_path / "file", ANY)
    assert theirs.exists()


@pytest.mark.parametrize("name", [f"{NOBODY}", "1", "77-00000000"])
def test_what_a_kill_between_two_renames_took_away_comes_back_on_any_machine(name, tmp_path):
    write_folder(tmp_path / "b", "old")
    (tmp_path / "b").rename(tmp_path / f".b.{name}.old")
    check_output(tmp_path / "b", FOLDER)
    assert content(tmp_path) == {f"b/{file}": b"old" for file in ("one", "sub/three", "two")}


def test_a_scratch_folder_is_gone_at_the_end_and_after_a_kill_at_the_next_start(tmp_path):
    out = tmp_path / "new" / "out"
    with scratch_folder(out) as scratch:
        (scratch / "try").write_text("large")
        assert scratch.parent == out.parent
        scratch.rename(out.parent / scratch.name.replace(str(os.getpid()), str(NOBODY)))
    assert content(out.parent) == {f".out.scratch.{NOBODY}-{writing._host()}.new/try": b"large"}
    with scratch_folder(out):
        pass
    assert not any(out.parent.iterdir())


# ---- a full disk


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), errno.EDQUOT),
        (OSError(errno.ENOSPC, "Error writing bytes. Detail: [errno 28] No space"), errno.ENOSPC),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 28),
    ],
)
def test_a_disk_that_is_full_is_an_error_of_the_path_whatever_a_library_raises(
    error, code, tmp_path
):
    path = tmp_path / "a" / "b"
    with pytest.raises(OSError, match=str(path)) as caught, atomic_write(path, ANY):
        raise error
    assert (caught.value.errno, caught.value.filename) == (code, str(path))
    assert caught.value.strerror == os.strerror(code)

    def fail_in_library():
        with atomic_write(path, ANY):
            try:
                raise error
            except Exception:
                raise KeyError("of a library") from None

    with pytest.raises(OSError, match=str(path)) as caught:
        fail_in_library()
    assert caught.value.errno == code
    assert not any(tmp_path.iterdir())


# ---- the only way

SOURCE = Path(writing.__file__).parents[1]
# What changes the file system, and the modules that may call it besides within `atomic_write`.
CHANGES = {"write_text", "write_bytes", "mkdir", "rename", "unlink", "rmdir", "rmtree", "touch"}
CHANGES |= {"symlink_to", "truncate", "save_file", "savefig", "makedirs", "memmap", "copytree"}
EXCEPT = {
    "io/writing.py": "it is `atomic_write`, and removes temporary files",
    "data/pack.py": "writes into the temporary folder",
    "data/readers/shards.py": "writes into the temporary folder",
    "deploy/formats/torch_export.py": "writes to the temporary path",
    "deploy/formats/tensorrt.py": "writes to the temporary path",
    "deploy/formats/openvino.py": "writes to the temporary path",
    "deploy/formats/executorch.py": "writes to the temporary path",
    "deploy/formats/ncnn.py": "writes to the temporary path",
    "deploy/formats/coreml.py": "writes to the temporary path",
    "deploy/formats/litert.py": "writes to the temporary path, and an environment by its name",
    "deploy/formats/triton_server.py": "writes to the temporary path",
    "examples/files.py": "writes to the temporary path",
    "train/run_folder.py": "appends to a log of its own",
    "study/executors.py": "appends to the log of a trial",
    "io/locks.py": "a lock is made by a name that must not exist",
    "targets/runner.py": "writes to its temporary folder, on another machine",
    "study/driver.py": "deletes results of a study that other arguments change",
    "autofit/halving.py": "deletes checkpoints of trials that do not ship",
    "train/distill.py": "maps files in a folder that its key recognises",
    "report/plots.py": "draws into memory",
}


def changes(path: Path) -> set[str]:
    """Calls that change the file system, outside of a `with` of `atomic_write`."""
    calls = set()

    def visit(node: ast.AST, safe: bool) -> None:
        if isinstance(node, ast.With):
            safe = safe or any("atomic_write" in ast.unparse(item) for item in node.items)
        if isinstance(node, ast.Call) and not safe:
            name = ast.unparse(node.func).rpartition(".")[2]
            writes = name == "open" and re.search(r"['\"][rb]*[wax+]", ast.unparse(node))
            method = isinstance(node.func, ast.Attribute) or name == "save_file"
            if (method and name in CHANGES) or writes:
                calls.add(name)
        for child in ast.iter_child_nodes(node):
            visit(child, safe)

    visit(ast.parse(path.read_text()), False)
    return calls


def test_no_module_writes_files_but_by_atomic_write():
    modules = {
        str(path.relative_to(SOURCE)): calls
        for path in SOURCE.rglob("*.py")
        if (calls := changes(path))
    }
    assert modules.keys() == EXCEPT.keys(), modules
