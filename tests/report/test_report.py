import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from statistics import NormalDist

import matplotlib
import numpy as np
import pytest
from matplotlib.transforms import Bbox
from PIL import Image

from fullstride import cli
from fullstride.report import plots
from fullstride.report.console_tables import count, ms, percent, wilson
from fullstride.report.page import Content, Entry, Prediction, picture, render, write
from fullstride.report.plots import png
from fullstride.report.scatter import ScalingPanel, scaling_figure
from fullstride.tasks.classify import Classify
from fullstride.tasks.task import Calibration, ConfusionMatrix

HOSTILE = '<script>alert("x")</script> $\\frac{1}{0}$ & \'_'
TOP1 = Classify.metric
VOID = {"meta", "img", "br", "link", "input", "hr"}
LOG = [
    dict(epoch=n + 1, loss=2 / (n + 1), lr=0.1, images_per_s=3000.0, **{"val/top1": 90.0 + n})
    for n in range(5)
]
TRAINED = Entry(
    name="tresnet_tiny",
    data="digits",
    metric=TOP1,
    scores={"top1": 98.3, "images": 360},
    params=1_082_032,
    macs=3_929_216,
    resolution=32,
    ms_p50=1.07,
    ms_p99=1.5,
    images_per_s=3222.0,
    batch=64,
    log=LOG,
)
UNTRAINED = Entry(
    name="timm/resnet18",
    data="",
    metric=TOP1,
    params=11_689_512,
    macs=37_000_000,
    resolution=32,
    ms_p50=3.21,
    ms_p99=4.4,
    images_per_s=900.0,
    batch=64,
    note="not trained here",
)
HERE = {"device": "AMD EPYC", "threads": 1, "cuda": None}


def gray(side: int = 8) -> np.ndarray:
    return np.arange(side * side, dtype=np.uint8).reshape(side, side)


PREDICTIONS = [Prediction(gray(), "3", "3", 0.97), Prediction(gray(), "3", HOSTILE, 0.51)]


class Reader(HTMLParser):
    """Notes the tags that are open, their attributes, and the text that is seen."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.seen if name == tag]


def page(**changes) -> str:
    given = dict(
        title="demo",
        entries=[TRAINED, UNTRAINED],
        predictions=PREDICTIONS,
        environment=HERE,
        notes=["float32"],
    )
    return render(Content(**{**given, **changes}))


def test_every_tag_of_the_page_is_closed_where_it_should_be():
    assert Reader(page()).open == []


def test_the_page_needs_nothing_from_elsewhere():
    html = page()
    links = set(re.findall(r"https?://[^\"'\s<]+", html))
    assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    reader = Reader(html)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in reader.seen}
    addresses = [
        v
        for _, attrs in reader.seen
        for k, v in attrs.items()
        if k in ("src", "href", "xlink:href") and v
    ]
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in addresses)
    assert not re.search(r"url\((?!#)|@import", html)


def test_no_two_elements_of_the_page_share_an_id():
    ids = [attributes["id"] for _, attributes in Reader(page()).seen if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_same_numbers_make_the_same_page():
    assert page() == page()


def test_every_network_class_and_note_is_told():
    text = Reader(page(notes=["timed on one thread"])).text
    for expected in (
        "tresnet_tiny",
        "timm/resnet18",
        HOSTILE,
        "timed on one thread",
        "AMD EPYC",
        "1.08 M",
        "3.93 M",
    ):
        assert expected in text


def test_one_image_is_not_in_the_plural():
    alone = replace(TRAINED, scores={"top1": 100.0, "images": 1})
    assert "on 1 test image of digits" in Reader(page(entries=[alone, UNTRAINED])).text
    assert "on 360 test images of digits" in Reader(page()).text


def test_the_page_says_how_its_intervals_were_computed():
    assert "Intervals are Wilson's, at 95 %." in Reader(page()).text
    assert "Intervals" not in Reader(page(entries=[UNTRAINED], predictions=[])).text


def test_hostile_names_are_text_and_not_code():
    entry = Entry(**{**vars(TRAINED), "name": HOSTILE, "data": HOSTILE, "note": HOSTILE})
    html = page(
        title=HOSTILE, entries=[entry, UNTRAINED], environment={HOSTILE: HOSTILE}, notes=[HOSTILE]
    )
    reader = Reader(html)
    assert "script" not in {tag for tag, _ in reader.seen}
    assert (
        reader.text.count(HOSTILE) >= 8
    )  # title twice, plot, table, legend, environment, notes, pictures


def test_a_network_that_was_not_trained_shows_no_accuracy():
    text = Reader(page(entries=[UNTRAINED], predictions=[])).text
    assert "not trained here" in text
    assert "No network was trained" in text
    assert not re.search(r"\d %", text.replace("95 %", ""))


def test_speeds_are_relative_to_the_first_network_that_was_not_trained():
    text = Reader(page()).text
    assert f"{3.21 / 1.07:.2f} × as fast" in text
    assert f"{3222 / 900:.2f} × as fast" in text


@pytest.mark.parametrize(
    "entry",
    [
        TRAINED,
        UNTRAINED,
        Entry(
            name="a",
            data="digits",
            metric=TOP1,
            scores={"top1": 100.0, "images": 1},
            params=10,
            macs=20,
            resolution=8,
        ),
        Entry(
            name="_a",
            data="d",
            metric=TOP1,
            scores={"top1": 0.0, "images": 9},
            params=1,
            macs=1,
            resolution=8,
            ms_p50=1.0,
            log=LOG[:1],
        ),
        Entry(
            name="数字 $",
            data="",
            metric=TOP1,
            scores={"top1": 50.0, "images": 0},
            params=1,
            macs=1,
            resolution=8,
            ms_p50=1e-4,
            log=LOG,
        ),
    ],
    ids=[
        "trained",
        "untrained",
        "no times, all right",
        "one epoch, none right",
        "no number of test images",
    ],
)
def test_one_network_is_enough_and_log_times_and_pictures_may_be_absent(entry):
    reader = Reader(page(entries=[entry], predictions=[], environment={}, notes=[]))
    assert reader.open == []
    assert entry.name in reader.text


def test_runs_with_the_same_name_are_told_apart():
    text = Reader(page(entries=[TRAINED, TRAINED])).text
    assert "tresnet_tiny (2)" in text


def test_right_and_wrong_are_words_and_not_only_colours():
    text = Reader(page()).text
    assert "1 correct and 1 wrong predictions are shown" in text
    assert "✓ correct" in text
    assert "✗ wrong" in text


def test_every_picture_and_plot_says_what_it_shows():
    reader = Reader(page())
    assert [attributes["alt"] for attributes in reader.all("img")] == ["test image of class 3"] * 2
    assert all(
        attributes["role"] == "img" and attributes["aria-label"] for attributes in reader.all("svg")
    )
    assert all(attributes.get("scope") in ("col", "row") for attributes in reader.all("th"))


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 1), (8, 8, 3), (300, 500, 3)])
def test_pictures_of_every_shape_are_embedded_and_only_tiny_ones_are_enlarged_sharply(shape):
    html = page(predictions=[Prediction(np.zeros(shape, np.uint8), "a", "a", 1.0)])
    assert ('class="pixels"' in html) == (shape[0] < 96)


def test_the_plot_for_a_readme_is_a_png():
    assert png(picture([TRAINED, UNTRAINED])).startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no network to plot"):
        picture([Entry(**{**vars(TRAINED), "ms_p50": None})])


def test_a_plot_without_times_is_refused_before_anything_is_scored(tmp_path, capsys):
    out = tmp_path / "page.html"
    words = ["report", str(tmp_path), "--picture", str(tmp_path / "p.png"), "--out", str(out)]
    assert cli.run(words) == 2
    assert "--picture is a plot of measured times: give them by --bench" in capsys.readouterr().err
    assert not out.exists()


def test_names_in_the_plot_cover_neither_each_other_nor_a_mark():
    near = [plots.Point(f"network_{n}", 1 + 0.05 * n, 95 + 0.3 * n) for n in range(5)]
    figure = plots.score_latency_figure([*near, plots.Point("timm/resnet18", 3.0, None)], TOP1)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    overlaps = [
        (i, j) for i, a in enumerate(boxes) for j, b in enumerate(boxes) if i < j and a.overlaps(b)
    ]
    assert overlaps == []


def test_names_in_the_plot_cover_no_interval_and_are_nearest_to_their_own_mark():
    near = [
        plots.Point(f"network_{n}", 1 + 0.1 * n, 90 + n, (89.5 + n, 90.5 + n), (0.5, 2.5))
        for n in range(5)
    ]
    figure = plots.score_latency_figure(near, TOP1)
    figure.canvas.draw()
    (axes,) = figure.axes
    corners = [axes.transData.transform((p.ms_per_image, p.score or 0)) for p in near]
    for text in axes.texts:
        box, own = text.get_window_extent(), near[int(text.get_text()[-1])]
        for point in near:
            ends = [(end, point.score) for end in point.span or ()]
            assert not box.overlaps(Bbox(axes.transData.transform(ends)))
        gaps = [
            math.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1))
            for x, y in corners
        ]
        assert gaps.index(min(gaps)) == near.index(own)


def test_backticks_of_a_note_become_code_and_its_other_characters_stay_text():
    html = page(notes=["measure <b> again by `fullstride bench --out a&b`, or with one ` more"])
    assert "measure &lt;b&gt; again by <code>fullstride bench --out a&amp;b</code>, or" in html
    assert "with one ` more" in html


def test_drawing_leaves_the_settings_of_matplotlib_alone():
    before = dict(matplotlib.rcParams)
    page()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("right", "images"), [(354, 360), (1, 2), (50, 50), (0, 7), (40_321, 50_000)]
)
def test_the_interval_holds_the_accuracies_that_the_score_test_does_not_reject(right, images):
    p = np.linspace(0, 1, 1_000_001)
    z95 = NormalDist().inv_cdf(0.975)
    kept = p[np.abs(right / images - p) <= z95 * np.sqrt(p * (1 - p) / images)]
    assert wilson(100 * right / images, images) == pytest.approx(
        (100 * kept.min(), 100 * kept.max()), abs=2e-4
    )


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (count(1_082_032), "1.08 M"),
        (count(3_929_216), "3.93 M"),
        (count(5_736_545_792), "5.74 G"),
        (count(999_700), "1.00 M"),
        (count(612), "612"),
        (ms(0.4213), "0.421 ms"),
        (ms(17.06), "17.1 ms"),
        (percent(98.333), "98.3 %"),
        (percent(99.98), "99.98 %"),
    ],
)
def test_numbers_are_written_for_people(told, expected):
    assert told == expected


def test_the_page_is_written_whole_into_folders_that_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "report.html"
    page = '<!DOCTYPE html><meta name="generator" content="fullstride">'
    write(path, f"{page}first \udc80")
    write(path, f"{page}second")
    assert path.read_text() == f"{page}second"
    assert list(path.parent.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    for path in (tmp_path, file / "report.html"):
        with pytest.raises(ValueError, match="give a") as caught:
            write(path, "page")
        assert "\n" not in str(caught.value)
    assert file.read_text() == "kept"


def test_a_thumbnail_keeps_the_shape_of_its_picture(monkeypatch):
    sizes = []
    save = Image.Image.save
    monkeypatch.setattr(
        Image.Image,
        "save",
        lambda image, *a, **k: (sizes.append(image.size), save(image, *a, **k))[1],
    )
    page(predictions=[Prediction(np.zeros((300, 600, 3), np.uint8), "a", "a", 1.0)])
    assert sizes == [(256, 128)]


@pytest.mark.parametrize("epochs", [1, 3])
def test_ticks_of_epochs_are_whole(epochs):
    figure = plots.learning_curves_figure({"a": LOG[:epochs]}, TOP1)
    assert all(tick == round(tick) for axes in figure.axes for tick in axes.get_xticks())


def test_a_plot_of_few_classes_is_not_stretched_to_the_width_of_the_page():
    narrow, wide = (
        plots.heat_map_figure(ConfusionMatrix(k, (0,), (1,), (9,)), tuple(map(str, range(k))))
        for k in (4, 20)
    )
    assert narrow.get_figwidth() < 0.5 * wide.get_figwidth()
    assert "svg { max-width: max(100%, 38rem);" in page()


def test_plots_with_bars_say_in_their_legends_what_the_bars_are():
    points = [plots.Point("a", 1.0, 90.0, (85.0, 94.0))]
    shares = Calibration((0, 50, 100), (0, 30, 96), (0.0, 27.5, 95.0))
    point = plots.Point("a", 1.0, 9.0, (8.0, 10.0))
    panel = ScalingPanel("", [point], [point])
    for figure in (
        plots.score_latency_figure(points, TOP1),
        plots.reliability_figure(shares),
        scaling_figure([panel]),
    ):
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == ["95 % interval"]
    assert not plots.score_latency_figure([plots.Point("a", 1.0, 90.0)], TOP1).legends
