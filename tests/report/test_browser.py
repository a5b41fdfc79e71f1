"""The pages that commands write, in a real browser, on a phone and on a screen."""

from pathlib import Path

import pytest
from browser import SIZES, looked_at, needs_browser

from fullstride import cli, train_network

DEMO = Path(__file__).parents[2] / "docs" / "demo.html"  # of `fit`, by `make demo-page`


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> list[Path]:
    """A page of each command that writes one."""
    folder = tmp_path_factory.mktemp("pages")
    run, times = str(folder / "run"), str(folder / "times.json")
    train_network("digits", "genet_tiny", run, steps=20, resolution=16)
    for words in (
        ["bench", run, "resnet_rs_tiny", "--rounds", "2", "--call-batch", "2", "--out", times],
        ["bench", run, "genet_tiny", "--rounds", "2", "--call-batch", "2"]
        + ["--out", str(folder / "bench.html")],
        ["choose", "--target", "rtx4090", "--budget-ms", "2", "--out", str(folder / "choose.html")],
        ["report", run, "--bench", times, "--out", str(folder / "report.html")],
        ["study", "analyse", "resnet_rs", "--budget-ms", "250", "--out", str(folder / "scale")],
        ["study", "figures", "--only", "genet-5", "tresnet-5", "--out", str(folder / "figures")],
    ):
        assert cli.run(words) == 0
    names = (
        "bench.html",
        "choose.html",
        "report.html",
        "scale/report.html",
        "figures/figures.html",
    )
    return [DEMO, *(folder / name for name in names)]


@pytest.mark.slow
@needs_browser
@SIZES
def test_a_page_fits_a_phone_and_a_screen_and_asks_for_nothing(pages, width, dark, tmp_path):
    looks, console = looked_at(pages, width, dark, tmp_path)
    assert console == []
    for page, look in looks.items():
        assert look.pop("pictures") > 0, page
        assert look == {"overflow": 0, "cut": 0, "asked": 0, "broken": 0, "dark": dark}, page


@pytest.mark.slow
@needs_browser
def test_what_is_wrong_with_a_page_is_seen_here(tmp_path):
    """The test above can fail."""
    broken = {
        "overflow": '<p style="white-space: nowrap">' + "much too long " * 40,
        "cut": '<div class="wide" style="overflow-x: auto"><pre>' + "a cell of a wide table " * 40,
        "broken": '<img src="not-here.png" alt="">',
        "asked": '<img src="http://127.0.0.1:9/not-here.png" alt="">',
    }
    pages = [tmp_path / f"{name}.html" for name in broken]
    for page, body in zip(pages, broken.values(), strict=True):
        page.write_text(f"<!DOCTYPE html><body>{body}<script>console.error('{page.stem}')</script>")
    looks, console = looked_at(pages, 390, 0, tmp_path)
    for page, look in looks.items():
        assert look[page.stem] > 0
        assert any(page.stem in line for line in console)
