"""What notebooks show of objects: the words that the command line prints, as HTML."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import IPython
import pytest
from bundles import GRAY, make_bundle
from IPython.core.formatters import DisplayFormatter
from rich.console import Console

import fullstride
from fullstride.autofit.fit import FIT
from fullstride.autofit.settings import FitSettings
from fullstride.latency.devices import load_profile
from fullstride.latency.select import options_tie, select
from fullstride.measure.bench import BenchOptions, bench
from fullstride.measure.budget import Budget
from fullstride.measure.protocols import ONLINE
from fullstride.nets import zoo
from fullstride.report.console_lines import score_line
from fullstride.report.console_tables import protocol_table, selection_table, table
from fullstride.study.driver import Event, run_study
from fullstride.study.settings import StudyOptions
from fullstride.tasks.classify import Classify

FORMATTER = DisplayFormatter()  # of a notebook's shell


@pytest.fixture(autouse=True, scope="module")
def _in_a_notebook():
    with pytest.MonkeyPatch.context() as patch:
        shell = SimpleNamespace(display_formatter=FORMATTER)
        patch.setattr(IPython, "get_ipython", lambda: shell)
        fullstride.show_in_notebooks()
        yield


def html(thing) -> str:
    data, _ = FORMATTER.format(thing, include={"text/html"})
    return data["text/html"]


def text(thing) -> list[str]:
    """The words that a terminal of IPython shows."""
    data, _ = FORMATTER.format(thing, include={"text/plain"})
    return data["text/plain"].split()


def shown(thing) -> list[str]:
    return unescape(re.sub(r"<[^>]*>", " ", html(thing))).split()


def printed(*parts) -> list[str]:
    file = io.StringIO()
    for part in parts:
        Console(width=1000, file=file, force_jupyter=False).print(part)
    return file.getvalue().split()


def test_a_header_of_a_table_is_text_and_no_markup():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(["to m[v2]", "[/old]"], [["a[b]", "1"]]))
    header, row = console.export_text().splitlines()
    assert header.split() == ["to", "m[v2]", "[/old]"]
    assert row.split() == ["a[b]", "1"]


def test_a_measurement_is_its_row_of_the_table_and_how_it_was_measured():
    quick = replace(ONLINE, resolution=16, rounds=2, warmup_s=0, round_s=1e-3)
    options = BenchOptions(in_channels=1)
    (row,) = bench({"tiny": zoo.create("genet_tiny", in_channels=1)}, quick, options=options)
    words = printed(protocol_table([[row]]))
    assert shown(row)[: len(words)] == words
    assert "eager," in shown(row)
    assert text(row) == shown(row)


def test_a_choice_is_the_front_with_the_best_within_the_budget_first():
    budget = Budget(ms_per_image=0.34, batch=64)
    choice = select(load_profile("v100-fp16"), budget, sources=("genet_paper",)).choice
    words = printed(selection_table(choice, options_tie))
    assert shown(choice)[-len(words) :] == text(choice)[-len(words) :] == words
    assert choice.best.label in " ".join(shown(choice)[: -len(words)])


def test_a_bundle_says_what_it_is_how_good_and_where_from():
    scores = {
        split: {"top1": top1, "loss": 0.3, "images": 80}
        for split, top1 in (("test", 91.25), ("val", 93.5))
    }
    bundle = make_bundle("genet_tiny", GRAY, scores=scores, source="trained on digits")
    text = " ".join(shown(bundle))
    for split, values in scores.items():
        assert score_line(split, values, [Classify().metric]).partition(",")[0] in text
    assert repr(bundle.net) in text
    assert "trained on digits" in text


def test_classes_without_an_image_are_a_count_and_none_of_them_is_no_score():
    lines = [score_line("val", {"images": 40, "absent_classes": n}, []) for n in (0.0, 3.0)]
    assert lines == ["val , on 40 images", "val absent classes 3, on 40 images"]


@pytest.fixture(scope="module")
def events(few_digits, tmp_path_factory) -> list[Event]:
    few = ("genet_tiny", "resnet_rs_tiny")
    settings = FitSettings(budget_ms=(10.0,), weights="none", target="rtx4090", candidates=few)
    how = StudyOptions(device="cpu", workers=0, dry_run=True)
    folder = tmp_path_factory.mktemp("fits") / "dry"
    return list(run_study(FIT, few_digits, folder, settings, options=how))


def test_an_event_is_what_fit_prints_of_it(events):
    line, result = events[0], next(event for event in events if not event.line)
    assert shown(line) == text(line) == line.line.split()
    assert shown(result) == printed(*result.parts)
    assert len(shown(result)) > 10


def test_the_import_in_a_notebook_takes_no_module_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    code = (
        "import sys; from IPython.core.interactiveshell import InteractiveShell;"
        "InteractiveShell.instance(); import fullstride;"
        "print(*(name for name in sys.modules if name.startswith(('fullstride', 'torch'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["fullstride"]


def test_text_of_others_is_escaped():
    assert "<b>" not in html(Event("data", "<b>bold</b>"))
    assert text(Event("data", "a :car: \x1b[1m [bold]")) == ["a", ":car:", r"\x1b[1m", "[bold]"]
    bundle = make_bundle("genet_tiny", GRAY, source="<script>")
    assert "<script>" not in html(bundle)


class Screen:
    """What IPython's `display` shows, and how often it was called anew."""

    def __init__(self):
        self.calls, self.data = 0, {}

    def display(self, data, *, raw, display_id):
        self.calls += 1
        self.update(data, raw=raw)
        return self

    def update(self, data, *, raw):
        assert raw
        self.data = data


def test_progress_is_one_display_with_all_results_and_the_last_line(events, monkeypatch):
    screen, progress, shares = Screen(), fullstride.Progress(), []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("IPython.display.display", screen.display)
    results = []
    for event in events:
        progress(event)
        results += () if event.line else event.parts
        (share,) = re.findall(r'<progress value="([\d.]+)"', screen.data["text/html"])
        shares.append(float(share))
        expected = printed(*results, event.line)
        assert unescape(re.sub(r"<[^>]*>", " ", screen.data["text/html"])).split() == expected
        assert screen.data["text/plain"].split() == expected
    assert screen.calls == 1
    assert shares == sorted(shares)
    assert 0 == shares[0] < shares[-1] < 1  # the dry run has stages left


def test_progress_of_epochs_has_their_scores_and_ends_with_a_full_bar(monkeypatch):
    screen, progress = Screen(), fullstride.Progress()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("IPython.display.display", screen.display)
    for epoch in (1, 2):
        row = {"epoch": epoch, "epochs": 2, "loss": 0.5, "val/miou": 62.5 + epoch}
        progress({**row, "images_per_s": 99.6, "data_wait_fraction": 0.25})
        assert f'value="{epoch / 2:.3f}"' in screen.data["text/html"]
        assert f"{62.5 + epoch:.2f}" in screen.data["text/plain"]
    assert screen.calls == 1
    assert "64.50" in screen.data["text/html"]
    assert "63.50" not in screen.data["text/html"]


def test_elsewhere_progress_prints_what_the_command_prints(events, capsys):
    progress = fullstride.Progress()
    for event in events:
        progress(event)
    assert capsys.readouterr().out.split() == printed(*(x for e in events for x in e.parts))
