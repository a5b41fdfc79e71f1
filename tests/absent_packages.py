"""Tests that need a package of an extra are skipped where it is not installed."""

import re
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest

# fullstride's extra -> the packages that it brings, by the names under which they are imported
PACKAGES = {
    "cluster": ("ray",),
    "coreml": ("coremltools",),
    "detection": ("hotcoco",),
    "docs": ("griffe", "zensical"),
    "examples": ("skimage", "sklearn"),
    "export": ("openvino",),
    "fast": ("cv2", "simplejpeg"),
    "hf": ("datasets",),
    "log": ("tensorboard",),
    "ncnn": ("ncnn", "pnnx"),
    "parquet": ("pyarrow",),
    "slurm": ("submitit",),
    "test": (
        "IPython",
        "ipykernel",
        "nbclient",
        "nbformat",
        "pycocotools",
        "pytorch_metric_learning",
        "starlette",
        "uvicorn",
    ),
    "video": ("av",),
}
EXTRAS = {package: extra for extra, packages in PACKAGES.items() for package in packages}
TESTS = Path(__file__).parent


class _SkipsTheImporter(MetaPathFinder):
    """The last finder, which is asked for what no other one found.

    Only what a test imports is a reason to skip it: an import in the package is an error.
    """

    def find_spec(self, fullname: str, *_: object) -> None:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back
        name = fullname.partition(".")[0]
        if name in EXTRAS and TESTS in Path(frame.f_code.co_filename).parents:
            reason = f"{name} is not installed: pip install 'fullstride[{EXTRAS[name]}]'"
            pytest.skip(reason, allow_module_level=True)


def watch_imports() -> None:
    sys.meta_path.append(_SkipsTheImporter())


def skip_if_absent(error: Exception) -> None:
    """Skip the test if `error` asks for an extra, some package of which is not installed.

    A failed comparison with another message has it in its text.
    """
    extra = re.search(r"pip install 'fullstride\[(\w+)\]'", str(error))
    packages = PACKAGES.get(extra[1], ()) if extra else ()
    if any(find_spec(package) is None for package in packages):
        pytest.skip(str(error))
