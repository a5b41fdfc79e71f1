"""Executes the notebooks of docs/notebooks, each in an empty folder, and writes them with outputs.

    python docs/write_notebooks.py [NAME ...] [--out docs/notebooks]

A test runs it and compares its notebooks with those in the repository.
"""

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent / "notebooks"
SECONDS = 900  # of a cell, on a machine that does other work too


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new kernel."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        how = {"timeout": SECONDS, "record_timing": False, "coalesce_streams": True}
        NotebookClient(notebook, resources={"metadata": {"path": folder}}, **how).execute()
    notebook.metadata.pop("language_info")  # has the version of Python
    return notebook


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    parser.add_argument("names", nargs="*", choices=[[], *names], default=names)
    parser.add_argument("--out", type=Path, default=NOTEBOOKS)
    words = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # of tqdm, without ipywidgets
    words.out.mkdir(parents=True, exist_ok=True)
    for name in words.names:
        notebook = executed(NOTEBOOKS / f"{name}.ipynb")
        nbformat.write(notebook, words.out / f"{name}.ipynb")
