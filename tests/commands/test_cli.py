"""The command line as a user meets it: what works, and what goes wrong in one line."""

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch
from bundles import GRAY, make_bundle
from PIL import Image
from sklearn.datasets import load_sample_images

from fullstride import cli
from fullstride.nets.bundle import Bundle
from fullstride.train.recipes.named import FINETUNE, RECIPES

SHORT = [
    "--recipe.epochs",
    "2",
    "--recipe.warmup-epochs",
    "1",
    "--recipe.resolution",
    "32",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Tiles of scikit-learn's two sample photographs as JPEGs, a class for each."""
    root = tmp_path_factory.mktemp("photos")
    for name, pixels in zip(("temple", "flower"), load_sample_images().images, strict=True):
        (root / name).mkdir()
        for i in range(40):
            y, x = 48 * (i % 8), 64 * (i // 8)
            Image.fromarray(pixels[y : y + 80, x : x + 96]).save(
                root / name / f"{i:02}.jpg", quality=92
            )
    return root


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    """A trained run on the photographs."""
    out = tmp_path_factory.mktemp("runs") / "genet"
    assert (
        cli.run(
            [
                "train",
                str(photos),
                "--model",
                "genet_tiny",
                "--out",
                str(out),
                *SHORT,
                "--recipe.batch-size",
                "16",
            ]
        )
        == 0
    )
    return out


def refused(capsys, *words, code=2):
    """The one line of a command that must fail."""
    capsys.readouterr()
    try:
        found = cli.run(list(map(str, words)))
    except SystemExit as exit:  # the parser's own refusals
        found = exit.code
    error = capsys.readouterr().err
    assert found == code, error
    assert "Traceback" not in error
    return error.strip()


def test_help_starts_in_less_than_a_second_and_imports_nothing_heavy():
    def spent() -> float:
        usage = resource.getrusage(
            resource.RUSAGE_CHILDREN
        )  # CPU time: the wall's depends on what else is running
        return usage.ru_utime + usage.ru_stime

    before = spent()
    subprocess.run([sys.executable, "-m", "fullstride", "--help"], check=True, capture_output=True)
    assert spent() - before < 1
    for words in ([], ["fit", "--help"], ["study", "search", "--help-all"]):
        assert not imported(words, HEAVY | {"torch", "numpy", "PIL"})


HEAVY = {  # packages that take from a tenth of a second to seconds of CPU time to import
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "triton",
    "torchvision",
    "timm",
    "scipy",
    "matplotlib",
    "pandas",
    "onnx",
    "onnxruntime",
    "openvino",
}


def imported(words: list[str], modules: set[str]) -> list[str]:
    """Which of `modules` a new process imports for the command `words`; of none for the parser."""
    return imported_by([words] if words else [], modules)


def imported_by(commands: list[list[str]], modules: set[str], code: int = 0) -> list[str]:
    """Which of `modules` a new process imports for `commands`, which all end with `code`."""
    script = (
        f"import sys; from fullstride import cli; codes = [cli.run(each) for each in {commands}];"
        "print(*sys.modules, file=sys.stderr);"
        f"sys.exit(codes != [{code}] * {len(commands)})"
    )
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    return sorted(modules & set(done.stderr.splitlines()[-1].split()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["export", "run", "--format", "onx"],
            "invalid choice 'onx' for argument '--format': choose from aoti, auto, coreml, "
            "executorch, litert, ncnn, onnx, openvino, pt2, tensorrt, triton-server; see",
        ),
        (["fit", "digits", "--budget-ms", "2", "0"], "--budget-ms 0.0: use a finite number, above"),
        (["fit", "digits", "--budget-ms", "2", "--pick", "0"], "a budget of 0 ms an image: give a"),
    ],
)
def test_a_value_that_is_refused_is_shown_with_those_that_are_taken(words, message, capsys):
    assert message in refused(capsys, *words, "--out", "x")


WRONG_NAMES = [
    (["train", "digits", "--task", "detct"], "no task named 'detct': choose from classify"),
    (["train", "digits", "--task", "detct", "--task.jitter", "1"], "no task named 'detct'"),
    (["fit", "digits", "--budget-ms", "3", "--formats", "onx"], "no format named 'onx'"),
]


def with_needed(words: list[str]) -> list[str]:
    return [*words, "--out", "x", *(["--model", "genet_tiny"] if words[0] == "train" else [])]


@pytest.mark.parametrize(("words", "message"), WRONG_NAMES)
def test_a_wrong_name_of_a_task_or_format_is_refused(words, message, capsys):
    assert message in refused(capsys, *with_needed(words))


def test_wrong_names_are_refused_without_pytorch():
    commands = [with_needed(words) for words, _ in WRONG_NAMES]
    assert imported_by(commands, {"fullstride.cli", "torch", "numpy", "PIL"}, 2) == [
        "fullstride.cli"
    ]


MISSING_PATHS = [
    (
        ["fit", "pest", "--budget-ms", "3", "--out", "x"],
        "no folder 'pest': did you mean 'pets'?",
    ),
    (
        ["fit", "pest", "--task", "detect", "--out", "x"],
        "no folder or file 'pest': did you mean",
    ),
    (["fit", "pest", "--task", "depth", "--out", "x"], "'pest' is no folder: give one with"),
    (["train", "a.csv", "--model", "genet_tiny", "--out", "x"], "no table 'a.csv': check the"),
    (["train", "no/{0..3}.tar", "--model", "genet_tiny", "--out", "x"], "no folder 'no'"),
    (["study", "search", "pest?label=kind", "--out", "x"], "no folder 'pest': did you mean"),
    (["study", "scale", "pest", "--models", "genet_tiny", "--out", "x"], "no folder 'pest'"),
    (["data", "pack", "pest", "x"], "no folder 'pest'"),
    (["data", "bench", "pest", "--model", "genet_tiny"], "no folder 'pest'"),
    (["validate", "pets", "--data", "pest"], "no folder 'pest'"),
    (["export", "pets", "--out", "x", "--data", "pest"], "no folder 'pest'"),
    (["validate", "runs/mien"], "no such file or folder: runs/mien"),
    (["predict", "mine.onnx", "pets"], "no such file or folder: mine.onnx"),
    (["predict", "pets", "a.jpg", "b.jpg"], "no such file or folder: a.jpg"),
    (["bench", "runs/mien"], "no such file or folder: runs/mien"),
]


@pytest.mark.parametrize(("words", "message"), MISSING_PATHS)
def test_a_path_that_does_not_exist_is_refused(words, message, tmp_path, capsys):
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    with chdir(tmp_path):
        assert message in refused(capsys, *words)


@pytest.mark.parametrize("word", ["runs/model", "runs/model.pte"])
def test_a_missing_exported_file_is_refused_with_the_one_beside_it(word, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "model.txt").touch()
    (tmp_path / "runs" / "model.tflite").write_bytes(bytes(4) + b"TFL3")
    with chdir(tmp_path):
        for command in ("predict", "validate", "bench"):
            words = [command, word, *["runs"] * (command == "predict")]
            assert f"no file {word}: there is runs/model.tflite" in refused(capsys, *words)


@pytest.mark.parametrize(
    "words", ["export --out net", "measure cost", "measure estimate --target rtx4090"]
)
def test_an_exported_file_is_refused_where_a_run_is_needed(words, tmp_path, capsys):
    for suffix in (".onnx", ".pt2", ".tflite"):
        path = tmp_path / f"net{suffix}"
        path.write_bytes(b"PK\3\4")
        line = refused(capsys, *words.split(), path)
        assert f"{path} is an exported file: give the run or bundle that it was made from" in line


def test_paths_that_do_not_exist_are_refused_without_pytorch(tmp_path):
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    with chdir(tmp_path):
        commands = [words for words, _ in MISSING_PATHS]
        assert not imported_by(commands, {"torch", "torchvision", "timm"}, 2)


def test_the_zoo_is_listed_without_pytorch():
    assert not imported(["zoo"], HEAVY | {"torch", "numpy", "PIL"})


def test_a_network_is_run_without_importing_a_compiler_or_another_runtime(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_bundle("genet_tiny", GRAY).save(tmp_path / "bundle")
    Image.new("L", (40, 40), 100).save(tmp_path / "picture.png")
    commands = [["predict", "bundle", "picture.png"], ["validate", "bundle", "--data", "digits"]]
    assert not imported_by([[*words, "--device", "cpu"] for words in commands], HEAVY)


@pytest.mark.slow
def test_a_folder_of_jpegs_is_learned_validated_predicted_exported_and_reported(
    run, photos, tmp_path, capsys
):
    capsys.readouterr()
    assert cli.run(["validate", str(run), "--device", "cpu"]) == 0
    assert "test top-1" in capsys.readouterr().out
    pictures = [str(photos / "temple" / "03.jpg"), str(photos / "flower" / "07.jpg")]
    assert cli.run(["predict", str(run), *pictures, "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [a["path"] for a in answers] == pictures
    assert {g["label"] for g in answers[0]["guesses"]} == {"temple", "flower"}
    assert (
        cli.run(["export", str(run), "--format", "onnx", "--out", str(tmp_path / "net.onnx")]) == 0
    )
    assert (tmp_path / "net.onnx").stat().st_size > 1e6
    bench = [
        "bench",
        str(run),
        "timm/resnet10t",
        "--resolution",
        "32",
        "--call-batch",
        "2",
        "--rounds",
        "2",
    ]
    assert cli.run([*bench, "--out", str(tmp_path / "bench.json")]) == 0
    assert "resnet10t" in capsys.readouterr().out
    page = [
        "report",
        str(run),
        "--bench",
        str(tmp_path / "bench.json"),
        "--out",
        str(tmp_path / "page.html"),
    ]
    assert cli.run(page) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1] == str(
        (tmp_path / "page.html").resolve()
    )
    assert "timm/resnet10t" in (tmp_path / "page.html").read_text()


def test_cost_prints_the_published_counts(capsys):
    assert cli.run(["measure", "cost", "genet_light", "--layers"]) == 0
    out = capsys.readouterr().out
    assert "8,173,761 parameters" in out
    assert "head.fc" in out


def test_a_recipe_is_chosen_by_name_and_its_fields_by_flags(photos, tmp_path, capsys):
    words = [
        "train",
        str(photos),
        "--model",
        "genet_tiny",
        "--recipe",
        "digits",
        "--recipe.lr",
        "0.05",
        *SHORT,
    ]
    assert cli.run([*words, "--out", str(tmp_path / "run")]) == 0
    recipe = Bundle.load(tmp_path / "run" / "bundle").recipe
    assert RECIPES["digits"].rotation_degrees != FINETUNE.rotation_degrees
    assert (recipe["lr"], recipe["rotation_degrees"], recipe["epochs"]) == (
        0.05,
        RECIPES["digits"].rotation_degrees,
        2,
    )


@pytest.mark.slow
def test_images_that_cannot_be_read_are_skipped_and_named_at_the_end(photos, tmp_path, capsys):
    data = tmp_path / "data"
    for name in ("temple", "flower"):
        (data / name).mkdir(parents=True)
        for path in (photos / name).iterdir():
            (data / name / path.name).write_bytes(path.read_bytes())
    (data / "temple" / "zero.jpg").touch()
    (data / "temple" / "cut.jpg").write_bytes((photos / "temple" / "01.jpg").read_bytes()[:700])
    (data / "flower" / "text.png").write_text("no picture")
    deep = np.random.default_rng(0).integers(0, 65_536, (40, 40), dtype=np.uint16)
    Image.fromarray(deep).save(data / "flower" / "deep.png")
    Image.new("CMYK", (40, 40), (10, 200, 30, 0)).save(data / "flower" / "cmyk.jpg")
    words = ["train", str(data), "--model", "genet_tiny", "--out", str(tmp_path / "run"), *SHORT]
    assert cli.run([*words, "--recipe.batch-size", "16"]) == 0
    lines = capsys.readouterr().err.strip().splitlines()
    (error,) = (line for line in lines if "skipped" in line)
    seen = {
        name
        for name in ("zero.jpg", "cut.jpg", "text.png", "deep.png", "cmyk.jpg")
        if name in error
    }
    assert seen == {"zero.jpg", "cut.jpg", "text.png"}
    for name in ("flower", "temple"):  # also where the validation split and the test have some
        for path in list((data / name).iterdir())[:8]:
            path.write_bytes(b"")
    shutil.rmtree(tmp_path / "run")
    assert cli.run([*words, "--recipe.batch-size", "16"]) == 0
    assert cli.run(["export", str(tmp_path / "run"), "--out", str(tmp_path / "net.onnx")]) == 0
    assert cli.run(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0


def temple_in(answer):
    return next(each["probability"] for each in answer["guesses"] if each["label"] == "temple")


@pytest.mark.slow
def test_a_run_becomes_files_that_predict_and_bench_take_where_a_run_may_stand(
    run, photos, tmp_path, capsys
):
    file, folder = tmp_path / "net.onnx", tmp_path / "net"
    assert cli.run(["export", str(run), "--out", str(file), "--with-preprocessing"]) == 0
    assert "pixels in, run by ONNX Runtime" in capsys.readouterr().out
    loose = ["--max-drop", "100"]  # the validation split has a handful of images
    assert cli.run(["export", str(run), "--out", str(folder), "--precision", "int8", *loose]) == 0
    assert "openvino, int8, normalised in" in capsys.readouterr().out
    rows = []
    for what in (run, file, folder):
        assert cli.run(["predict", str(what), str(photos / "temple"), "--json", "--top", "2"]) == 0
        rows.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert [each["path"] for each in rows[0]] == sorted(
        str(path) for path in (photos / "temple").iterdir()
    )
    for other, most in zip(rows[1:], (1e-4, 0.1), strict=True):  # fp32, int8
        pairs = zip(rows[0], other, strict=True)
        changes = [abs(temple_in(ours) - temple_in(theirs)) for ours, theirs in pairs]
        assert max(changes) <= most
    assert (
        cli.run(["bench", str(run), str(file), str(folder), "--rounds", "1", "--call-batch", "2"])
        == 0
    )
    shown = capsys.readouterr().out
    assert f"{file}: ONNX Runtime" in shown
    assert "int8" in shown


def test_paths_to_predict_come_on_standard_input_too(run, photos, capsys, monkeypatch):
    paths = [str(photos / "flower" / "03.jpg"), str(photos / "temple" / "05.jpg")]
    monkeypatch.setattr(
        sys, "stdin", paths_by_line := io.StringIO("".join(f"{path}\n" for path in paths))
    )
    assert cli.run(["predict", str(run), "-"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == paths
    assert not paths_by_line.read()


@pytest.mark.slow
def test_auto_exports_the_fastest_of_what_runs_here(run, tmp_path, capsys, monkeypatch):
    from fullstride.deploy import choose_form

    monkeypatch.setattr(
        choose_form, "available", lambda precision: [("onnx", "fp32"), ("openvino", "fp32")]
    )
    assert (
        cli.run(
            [
                "export",
                str(run),
                "--out",
                str(tmp_path / "net"),
                "--format",
                "auto",
                "--budget-ms",
                "1e6",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert sum("ms an image, 0.00 points lost" in line for line in lines) == 2
    (made,) = tmp_path.iterdir()
    assert lines[-1].startswith(f"{made}: ")


@pytest.mark.slow
def test_bad_input_gets_one_line_and_exit_code_2(run, photos, tmp_path, capsys):
    out = ["--out", tmp_path / "new"]
    file = ["--out", tmp_path / "new.onnx"]
    train = ["train", photos, "--model"]
    one = tmp_path / "one"
    (one / "only").mkdir(parents=True)
    (one / "only" / "a.jpg").write_bytes((photos / "temple" / "01.jpg").read_bytes())
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.onnx").write_bytes(b"\x08\x0a cut")
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(run / "run.json", begun)
    (tmp_path / "half.pth").write_bytes(b"PK\x03\x04 half")
    lines = [
        refused(capsys, *train, "tresnet_s", *out),
        refused(capsys, *train, "timm/resnet51", *out),
        refused(capsys, "train", tmp_path / "empty", "--model", "genet_tiny", *out),
        refused(capsys, "train", one, "--model", "genet_tiny", *out),
        refused(capsys, "train", tmp_path / "nowhere", "--model", "genet_tiny", *out),
        refused(capsys, *train, "genet_tiny", "--recipe", "nonsense", *out),
        refused(capsys, *train, "genet_tiny", "--recipe.epochs", "0", *out),
        refused(capsys, *train, "genet_tiny", "--recipe.scale", "0.9", "0.1", *out),
        refused(capsys, *train, "genet_tiny", "--device", "cuda:99", *out),
        refused(capsys, *train, "genet_tiny", "--weights", tmp_path / "half.pth", *out),
        refused(capsys, *train, "genet_tiny", "--recipe.batch-size", "8", "--out", run),
        refused(capsys, *train, "genet_tiny", "--out", photos),
        refused(capsys, "validate", tmp_path / "empty"),
        refused(capsys, "validate", run, "--data", "digits"),
        refused(capsys, "predict", run, tmp_path / "none.jpg").splitlines()[-1],
        refused(capsys, "predict", run),
        refused(capsys, "predict", run, photos / "temple" / "01.jpg", "--top", "0"),
        refused(capsys, "bench", "genet_tiny", "--call-batch", "0"),
        refused(capsys, "bench", "genet_tiny", "--device", "tpu"),
        refused(capsys, "bench"),
        refused(capsys, "export", run, "--budget-ms", "0.000001", *file),
        refused(capsys, "export", "resnet_rs_400", *file),
        refused(capsys, "export", run, "--format", "onxx", *file),
        refused(capsys, "export", run, "--precision", "bf16", *file),
        refused(capsys, "export", run, "--precision", "int8", "--calibration", "digits", *file),
        refused(capsys, "export", run, "--precision", "int8", "--finetune-epochs", "-1", *file),
        refused(capsys, "export", run, "--out", photos),
        refused(capsys, "export", run, "--out", tmp_path / "net.pt2"),
        refused(capsys, "export", begun, *file),
        refused(capsys, "predict", tmp_path / "cut.onnx", photos),
        refused(capsys, "bench", tmp_path / "cut.onnx"),
        refused(capsys, "measure", "cost", "genet_tinny"),
        refused(capsys, "measure", "cost", "genet_tiny", "--resolution", "-3"),
        refused(capsys, "measure", "cost", "genet_tiny", "--resolution", "0"),
        refused(capsys, "bench", "genet_tiny", "--resolution", "0"),
        refused(capsys, "report", tmp_path / "empty"),
        refused(capsys, "report", run, "--bench", run / "run.json"),
    ]
    for line in lines:
        assert line.startswith("fullstride: "), line
        assert len(line.splitlines()) == 1, line
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "new.onnx").exists()


def test_an_unknown_flag_is_refused_by_name(capsys):
    assert "--modle" in refused(capsys, "train", "digits", "--modle", "genet_tiny", "--out", "x")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=["python", "cpu", "cuda"],
)
def test_a_batch_that_does_not_fit_is_one_line(error, photos, tmp_path, capsys, monkeypatch):
    from fullstride.train import loop

    def full(*_):
        raise error

    monkeypatch.setattr(loop, "build_optimizer", full)
    line = refused(
        capsys, "train", photos, "--model", "genet_tiny", "--out", tmp_path / "run", *SHORT
    )
    assert line == "fullstride: out of memory: use a smaller batch or resolution"


def test_a_step_of_one_image_which_has_one_value_a_channel_says_what_to_change(
    photos, tmp_path, capsys
):
    words = ["--model", "genet_tiny", "--resolution", "32", "--batch-size", "1"]
    line = refused(capsys, "train", photos, *words, "--out", tmp_path / "run")
    assert line.startswith("fullstride: a pass of one image leaves one value of each channel")
    assert line.endswith("recipe.batch_size (1) or recipe.resolution, or use more images")


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (
            "RuntimeError('operator halfloaded::nms does not exist')",
            "halfloaded could not be imported (RuntimeError: operator halfloaded::nms does not "
            "exist): free some memory, or install it again",
        ),
        ("MemoryError()", "out of memory while halfloaded was imported: free some memory"),
    ],
    ids=["words", "memory"],
)
def test_a_library_that_cannot_be_imported_is_named_in_one_line(
    raised, line, tmp_path, capsys, monkeypatch
):
    """Without memory for its compiled part, torchvision fails as the first of them does."""
    (tmp_path / "halfloaded").mkdir()
    (tmp_path / "halfloaded" / "__init__.py").write_text("from halfloaded import operators\n")
    (tmp_path / "halfloaded" / "operators.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "zoo", lambda: __import__("halfloaded"))
    assert refused(capsys, "zoo", code=1) == f"fullstride: {line}"


def test_a_full_disk_is_one_line_and_the_files_written_before_stay(
    photos, tmp_path, capsys, monkeypatch
):
    from fullstride.train import run_folder

    out = tmp_path / "run"
    words = [
        "train",
        photos,
        "--model",
        "genet_tiny",
        "--out",
        out,
        *SHORT,
        "--recipe.batch-size",
        "16",
    ]
    keep, kept = run_folder.save_epoch, []

    def full(folder, rows, state):
        if kept:
            raise OSError(28, "No space left on device", str(folder / run_folder.CHECKPOINT))
        kept.append(keep(folder, rows, state))

    monkeypatch.setattr(run_folder, "save_epoch", full)
    line = refused(capsys, *words, code=1)
    assert line.startswith(f"fullstride: No space left on device: {out / run_folder.CHECKPOINT}; ")
    monkeypatch.setattr(run_folder, "save_epoch", keep)
    assert cli.run(list(map(str, words))) == 0
    assert "epoch   2/2" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_leaves_a_folder_that_goes_on(tmp_path, capsys):
    out = tmp_path / "run"
    words = [
        sys.executable,
        "-m",
        "fullstride",
        "train",
        "digits",
        "--model",
        "genet_tiny",
        "--out",
        str(out),
    ]
    words += ["--recipe.epochs", "3", "--recipe.warmup-epochs", "0", "--recipe.resolution", "16"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    started = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert started.stdout
    assert any("epoch   1/3" in line for line in started.stdout)
    started.send_signal(signal.SIGINT)
    _, error = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "interrupted; the same command goes on" in error
    assert "Traceback" not in error
    assert not list(out.glob(".*"))
    assert cli.run(words[3:]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("epoch")] == [
        "1/3",
        "2/3",
        "3/3",
    ]
    assert Path(out / "bundle").is_dir()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the worker in /proc")
def test_a_killed_worker_is_reported_in_one_line(tmp_path):
    words = [
        sys.executable,
        "-m",
        "fullstride",
        "train",
        "digits",
        "--model",
        "genet_tiny",
        "--workers",
        "1",
    ]
    words += [
        "--out",
        str(tmp_path / "run"),
        "--recipe.resolution",
        "16",
        "--recipe.warmup-epochs",
        "0",
    ]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    started = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert started.stdout
    assert any("epoch   1/120" in line for line in started.stdout)
    for child in Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split():
        if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)
    _, error = started.communicate(timeout=60)
    assert started.returncode == 1
    assert error.startswith(
        "fullstride: a process that decodes images was killed, often for lack of memory"
    )
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_a_reader_that_stops_early_ends_a_listing_without_a_word_and_with_its_code():
    listing = subprocess.Popen(
        [sys.executable, "-m", "fullstride", "zoo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert listing.stdout
    assert listing.stderr
    listing.stdout.close()  # before the first line, as a pipe takes all lines at once
    assert listing.stderr.read() == b""
    listing.stderr.close()
    assert listing.wait(timeout=60) == 141
