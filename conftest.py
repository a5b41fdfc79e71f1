"""For the examples in docstrings: each runs in a folder of its own."""

import pytest


@pytest.fixture(autouse=True)
def _examples_run_in_a_temporary_folder(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
