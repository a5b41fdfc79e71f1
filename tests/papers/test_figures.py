"""Do the papers' figures show what the tables say, and does every dot tell how it was come by?"""

import csv
import json
import re
from dataclasses import asdict, replace
from importlib import resources

import pytest
from PIL import Image

from fullstride.cli import run
from fullstride.latency.devices import load_profile
from fullstride.latency.estimator import estimate
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import GENET, RESNET_RS, THROUGHPUT, Measurement
from fullstride.measure.tracer import traced
from fullstride.nets import zoo
from fullstride.papers import figures
from fullstride.papers.block_study import BlockTime
from fullstride.papers.figures import (
    KEYS,
    PLANS,
    Bench,
    blocks,
    dots,
    networks,
    page,
    scatter,
    where,
)
from fullstride.papers.suite import read_bench
from fullstride.report import plots

V100, RTX = load_profile("v100-fp16"), load_profile("rtx3090")


def csv_rows(name):
    text = resources.files("fullstride.tables").joinpath(name).read_text()
    return list(csv.DictReader(text.splitlines()))


HERE = Environment(
    device="Toy GPU",
    threads=1,
    os="",
    python="",
    torch="2",
    cuda=None,
    driver=None,
    fullstride=None,
    commit=None,
    date="",
)


def measurement(name="genet_light", resolution=192, protocol=THROUGHPUT, **changes):
    row = Measurement(
        name=name,
        protocol=replace(protocol, resolution=resolution),
        images_per_s=5000.0,
        spread=0.01,
        samples=(5000.0,),
        precision="float16",
        layout="nhwc",
        compiled=False,
        environment=HERE,
    )
    return replace(row, **changes)


def written(path, rows):
    path.write_text(json.dumps([json.loads(row.to_json()) for row in rows]))
    return path


def test_tresnets_figures_have_the_speeds_and_accuracies_of_its_tables():
    training = {dot.name: (dot.x, dot.y) for dot in dots(PLANS["tresnet-4"], [], Bench())}
    inference = {dot.name: (dot.x, dot.y) for dot in dots(PLANS["tresnet-5"], [], Bench())}
    assert len(training) == len(inference) == 9
    # read in the paper, arXiv:2003.13630, Tables 1 and 3
    assert training["TResNet-M"] == (730, 80.8)
    assert inference["TResNet-M"] == (2930, 80.8)
    assert training["TResNet-XL"] == (250, 82.0)
    assert training["EfficientNet-B1"] == (480, 79.2)
    assert inference["ResNet-50"] == (2830, 79.0)


def test_resnet_rs_figure_has_all_lines_of_its_table_7_by_depth_and_resolution():
    found = {dot.name: (dot.x, dot.y) for dot in dots(PLANS["resnet-rs-4"], [], Bench())}
    assert len(found) == sum(row["table"] == "ResNet-RS 7" for row in csv_rows("speed.csv")) == 19
    assert found["ResNet-RS-152-192"] == (0.99, 82.0)  # arXiv:2103.07579, Table 7
    assert found["ResNet-RS-152-256"] == (1.76, 83.0)
    assert found["EfficientNet-B7"] == (29.9, 84.7)


@pytest.mark.slow
def test_genets_figure_has_every_line_of_its_table_at_batch_64_and_estimates_of_what_can_be_built():
    found = list(dots(PLANS["genet-5"], [V100], Bench()))
    printed = {
        (row["model"], float(row["ms_b64"]), float(row["top1"]))
        for row in csv_rows("latency_v100_fp16.csv")
    }
    assert {(dot.name, dot.x, dot.y) for dot in found if dot.how == "published"} == printed
    assert len(printed) == 34
    estimated = {dot.name: dot for dot in found if dot.how == "estimated"}
    assert len(estimated) == 21
    assert not {"DNANet-a", "OFANet-9ms", "MobileNetV2-0.25"} & set(estimated)
    assert "V100" in estimated["GENet-light"].place


def test_an_estimated_dot_is_what_the_model_says_of_the_real_module_with_its_interval():
    (dot,) = (
        d
        for d in dots(PLANS["genet-5"], [V100], Bench())
        if (d.name, d.how) == ("GENet-light", "estimated")
    )
    one = estimate(zoo.create("genet_light"), V100, 64, 192)
    assert dot.x == pytest.approx(one.ms_per_image)
    assert dot.span == pytest.approx((one.low, one.high))
    (fast,) = (
        d
        for d in dots(PLANS["tresnet-5"], [V100], Bench())
        if (d.name, d.how) == ("TResNet-M", "estimated")
    )
    one = estimate(zoo.create("tresnet_m"), V100, 64, 224)
    assert fast.span == pytest.approx((1e3 / one.high, 1e3 / one.low))
    assert fast.span[0] < fast.x < fast.span[1]


def test_multiply_adds_are_those_of_the_network_at_its_resolution():
    found = {dot.name: dot for dot in dots(PLANS["genet-2"], [], Bench())}
    assert len(found) == 21
    assert found["ResNet-50"].y == pytest.approx(
        4.09, abs=0.01
    )  # G, at 224: known from many sources
    assert found["GENet-large"].y == pytest.approx(
        traced(zoo.create("genet_large"), 256).total_macs / 1e9
    )


def test_training_is_estimated_by_the_first_profile_that_knows_it_and_by_none_where_none_does():
    alone = list(dots(PLANS["tresnet-4"], [V100], Bench()))
    assert {dot.how for dot in alone} == {"published"}
    assert "Nothing is estimated" in scatter(PLANS["tresnet-4"], alone).caption
    both = [dot for dot in dots(PLANS["tresnet-4"], [V100, RTX], Bench()) if dot.how == "estimated"]
    assert len(both) == 9
    assert all("3090" in dot.place and "rtx3090" in dot.source for dot in both)


def test_what_was_measured_is_drawn_the_fastest_way_and_not_estimated(tmp_path):
    slow = measurement(images_per_s=2000.0, layout="nchw")
    theirs = measurement("timm/gernet_s")
    file = written(tmp_path / "bench.json", [slow, theirs, measurement("genet_tiny", 32)])
    found = [
        dot
        for dot in dots(PLANS["genet-5"], [V100], read_bench([file], networks()))
        if dot.name == "GENet-light"
    ]
    assert [dot.how for dot in found] == ["published", "measured"]
    assert found[1].x == pytest.approx(0.2)  # 1000 / 5000
    assert found[1].place == "Toy GPU, batch 64"
    assert "timm/gernet_s" in found[1].source
    assert "nhwc" in found[1].source


def test_a_measurement_stands_only_where_its_protocol_and_resolution_belong(tmp_path):
    rows = [
        measurement("resnet_rs_50 compiled", 160, RESNET_RS, images_per_s=640.0),
        measurement("genet_light", 192, replace(GENET, batch=128), ms_per_image=0.01),
        measurement("genet_light", 192, replace(GENET, batch=64), ms_per_image=0.1),
        measurement("genet_large", 224),
    ]
    bench = read_bench([written(tmp_path / "bench.json", rows)], networks())
    (rs,) = (dot for dot in dots(PLANS["resnet-rs-4"], [], bench) if dot.how == "measured")
    assert (rs.name, rs.x) == ("ResNet-RS-50-160", pytest.approx(0.2))  # 128 / 640
    (light,) = (dot for dot in dots(PLANS["genet-5"], [], bench) if dot.how == "measured")
    assert (light.name, light.x) == ("GENet-light", 0.1)
    assert {dot.how for dot in dots(PLANS["tresnet-5"], [], bench)} == {"published"}


@pytest.mark.parametrize(
    ("line", "network"),
    [("TResNet-M", "tresnet_m"), ("TResNet-M", "timm/tresnet_m"), ("tresnet_m", "tresnet_m")],
)
def test_the_numbers_of_the_suite_are_measured_dots(tmp_path, line, network):
    # a suite of models has their names in place of the papers' lines
    row = dict(
        table="TResNet 3",
        line=line,
        quantity="training images/s",
        network=network,
        batch=512,
    )
    row |= dict(
        measured=2000.0, resolution=224, layout="nhwc", made="compiled", precision="float16"
    )
    told = dict(environment=asdict(HERE), numbers=[row, {**row, "quantity": "largest batch"}])
    (tmp_path / "results.json").write_text(json.dumps(told))
    bench = read_bench([tmp_path / "results.json"], networks())
    (dot,) = (dot for dot in dots(PLANS["tresnet-4"], [RTX], bench) if dot.how == "measured")
    assert (dot.name, dot.x, dot.place) == ("TResNet-M", 2000.0, "Toy GPU, batch 512")
    assert "compiled" in dot.source


def block(**changes):
    size = dict(kind="XX", ratio=1.0, width=64, resolution=7, depth=4, kernel=3)
    return BlockTime(
        **{
            **size,
            **dict(ms_per_image=0.5, ms_low=0.4, ms_high=0.6, params=1000, macs=10**6),
            **changes,
        }
    )


def test_measured_blocks_take_the_place_of_estimates_and_estimated_ones_are_refused(tmp_path):
    told = dict(
        how="measured",
        precision="float16",
        layout="nhwc",
        protocol=asdict(replace(THROUGHPUT, batch=8)),
        environment=asdict(HERE),
    )
    told["rows"] = [asdict(block()), asdict(block(width=128))]
    path = tmp_path / "blocks.json"
    path.write_text(json.dumps(told))
    rows, how, place = blocks([V100], read_bench([path], ()))
    assert rows == [block(), block(width=128)]
    assert (how, place) == ("measured", "Toy GPU, fp16, batch 8")
    with pytest.raises(ValueError, match="give one of the two"):
        read_bench([path, path], ())
    path.write_text(json.dumps({**told, "how": "estimated"}))
    with pytest.raises(ValueError, match="are estimated"):
        read_bench([path], ())
    path.write_text(json.dumps({**told, "rows": [{**asdict(block()), "ms_per_image": 0}]}))
    with pytest.raises(ValueError, match="above 0"):
        read_bench([path], ())


@pytest.mark.slow
def test_without_a_measurement_blocks_are_estimated_by_the_profile():
    rows, how, place = blocks([V100], Bench())
    assert how == "estimated"
    assert "v100-fp16" in place
    assert len(rows) == 96  # 6 kinds and ratios, 4 widths, 4 maps
    assert all(row.ms_low < row.ms_per_image < row.ms_high for row in rows)


def test_the_legend_the_table_and_the_page_name_every_way_a_number_was_come_by(tmp_path):
    plan = PLANS["genet-5"]
    bench = read_bench([written(tmp_path / "bench.json", [measurement()])], networks())
    shown = list(dots(plan, [V100], bench))
    drawn = scatter(plan, shown)
    legend = [text.get_text() for text in drawn.figure.axes[0].get_legend().get_texts()]
    assert [line.partition(":")[0] for line in legend] == ["published", "measured", "estimated"]
    assert ["90 % interval" in line for line in legend] == [False, False, True]
    head, *rows = drawn.rows
    assert [name.partition(":")[0] for name in head[3:]] == ["published", "measured", "estimated"]
    assert len(rows) == 34
    light = next(row for row in rows if row[0] == "GENet-light")
    assert light[1:] == ["192", "75.7", "0.0900", "0.200", ""]
    html = page([drawn])
    for dot in shown:
        assert f"{dot.how}: " in html
    assert html.count('class="spot') == len(shown)
    assert "90 % interval" in html
    marks = drawn.figure.axes[0].get_legend().legend_handles
    assert len({(mark.get_marker(), mark.get_fillstyle()) for mark in marks}) == 3


def test_what_opens_on_the_page_lies_on_its_mark():
    plan = PLANS["genet-5"]
    drawn = scatter(plan, list(dots(plan, [], Bench())))
    plots.png(drawn.figure, 98)  # another size does not move it
    html = page([drawn])
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', html).groups())
    marks = [
        (float(x), float(y))
        for x, y in re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)"', html)
    ]
    for spot in drawn.spots:
        left, top = where(spot)
        x, y = left / 100 * width, top / 100 * height
        assert min(abs(x - a) + abs(y - b) for a, b in marks) < 0.01


def test_the_page_loads_nothing_and_a_hostile_device_stays_text(tmp_path):
    name = "<script>x</script> $\\frac$"
    row = measurement("tresnet_m", 224)
    row = replace(row, environment=replace(row.environment, device=name))
    bench = read_bench([written(tmp_path / "bench.json", [row])], networks())
    html = page([scatter(PLANS["tresnet-5"], list(dots(PLANS["tresnet-5"], [], bench)))])
    assert "<script" not in html
    assert "&lt;script&gt;x&lt;/script&gt; $\\frac$" in html
    assert "default-src 'none'" in html
    assert not re.search(r'(src|href)="(?!#)', html)


def test_a_picture_of_many_networks_names_families_in_its_legend_and_one_of_few_at_the_mark():
    many = list(dots(PLANS["resnet-rs-4"], [], Bench()))
    assert figures.labels(many)["ResNet-RS-152-192"] == "152-192"
    few = list(dots(PLANS["tresnet-4"], [], Bench()))
    assert figures.labels(few)["TResNet-M"] == "TResNet-M"


def test_the_command_writes_whole_pictures_and_a_page_and_nothing_else(tmp_path, capsys):
    out = tmp_path / "figures"
    assert (
        run(
            [
                "study",
                "figures",
                "--only",
                "tresnet-5",
                "genet-5",
                "--target",
                "v100-fp16",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert {path.name for path in out.iterdir()} == {"tresnet-5.png", "genet-5.png", "figures.html"}
    assert "9 published, 9 estimated" in capsys.readouterr().out
    for path in out.glob("*.png"):
        assert path.stat().st_size < 150_000
        with Image.open(path) as image:
            image.load()
            assert abs(image.width - figures.PIXELS) < 10


def test_a_figure_that_fails_leaves_what_stood_there(tmp_path, monkeypatch):
    (tmp_path / "tresnet-5.png").write_text("old")

    def broken(_):
        raise ValueError("no room")

    monkeypatch.setattr(plots, "png", broken)
    assert run(["study", "figures", "--only", "tresnet-5", "--out", str(tmp_path)]) == 2
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("tresnet-5.png", "old")
    ]


BLOCK = """{"kind": %s, "ratio": 1, "width": 16, "resolution": 7, "ms_per_image": 1,
 "ms_low": 1, "ms_high": 2,
"params": 1, "macs": 4}"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not whole JSON"),
        ("{}", "not what"),
        ("[1]", "not what"),
        ('{"numbers": [{}], "environment": {}}', "not what"),
        ("[]", "no measurement of a figure"),
        ('{"how": "measured", "rows": [3]}', "not what"),
        ('{"how": "measured", "rows": []}', "it has no rows"),
        (f'{{"how": "measured", "rows": [{BLOCK % 3}]}}', "not what"),
    ],
)
def test_a_file_that_holds_nothing_for_a_figure_is_one_line(tmp_path, capsys, text, says):
    path = tmp_path / "bench.json"
    path.write_text(text)
    assert run(["study", "figures", "--bench", str(path), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert says in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes", [dict(images_per_s=0.0), dict(images_per_s=-1.0), dict(images_per_s="fast")]
)
def test_a_time_that_is_none_is_one_line(tmp_path, changes):
    with pytest.raises(ValueError, match="not what"):
        read_bench([written(tmp_path / "bench.json", [measurement(**changes)])], networks())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--target", "v100"], "did you mean"),
        (["--bench", "nothing.json"], "no file nothing.json"),
        (["--only", "genet-4"], "genet-5"),
    ],
)
def test_a_wrong_word_is_one_line(capsys, words, says):
    assert run(["study", "figures", *words]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert says in told


def test_the_figures_are_those_of_the_issue():
    assert set(KEYS) == {*PLANS, figures.BLOCKS}
    assert set(KEYS) == {"tresnet-4", "tresnet-5", "resnet-rs-4", "genet-2", "genet-3", "genet-5"}
