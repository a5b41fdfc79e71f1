"""The rooms stand on their own: plain layers need little, and nothing needs the fused form."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNT = """
import sys
import fullstride.nets.layers
ours = [m for name, m in sys.modules.items() if name.partition(".")[0] == "fullstride"]
print(sum(len(open(m.__file__).readlines()) for m in ours))
"""


def test_reading_a_plain_convolution_imports_at_most_350_lines():
    words = [sys.executable, "-c", COUNT]
    assert int(subprocess.run(words, check=True, capture_output=True).stdout) <= 350


@pytest.mark.slow
def test_without_the_fused_form_everything_else_works_and_asking_for_it_is_one_line(tmp_path):
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "runs") and not path.name.startswith(".coverage"):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, tmp_path / path.name)
    shutil.rmtree(tmp_path / "src" / "fullstride" / "nets" / "fused")
    shutil.rmtree(tmp_path / "tests" / "nets" / "fused")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": str(tmp_path / "src"), "PATH": "", "HOME": str(tmp_path)}
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    pytest_ = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu")
    collected = run(*pytest_, "--collect-only")
    assert collected.returncode == 0, collected.stdout
    rooms = {"nets": ["networks"], "train": ["efficiency"], "papers": ["suite"]}
    rooms["measure"] = ["efficiency_flag"]
    files = (f"tests/{room}/test_{name}.py" for room, names in rooms.items() for name in names)
    done = run(*pytest_, "-x", *files)
    assert done.returncode == 0, done.stdout
    create = "from fullstride import zoo; zoo.create('tresnet_tiny', efficiency='fused')"
    *_, last = run("-c", create).stderr.strip().splitlines()
    assert last == (
        "ValueError: the fused form is not part of this installation: use efficiency plain"
    )
