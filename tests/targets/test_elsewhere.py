"""`choose`, `bench` and others measure on another machine, for which a command stands."""

import json
import os
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest
from bundles import small_bundle

from fullstride import cli
from fullstride.data.dataset import open_data
from fullstride.deploy import choose_form, elsewhere
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.settings import ExportOptions
from fullstride.latency.devices import load_profile
from fullstride.latency.microbenchmarks import WHOLE, all_microbenchmarks
from fullstride.latency.roofline import Machine, prepare, times
from fullstride.measure import bench_by_name, protocols
from fullstride.measure.bench import DEFAULTS, Series, measurement
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import ONLINE, THROUGHPUT, read_measurements
from fullstride.measure.tracer import traced
from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.targets.target import MACHINE_FILE, Target, connect

QUICK = {"rounds": 2, "round_s": 0.005, "warmup_s": 0.0}
# On one core: threads that wait for each other are slow where other tests run.
WHERE = f"taskset -c {max(os.sched_getaffinity(0))} {sys.executable}"
NAME = Target(WHERE).name
NETWORKS = "model,img_size,top1\ngenet_tiny,32,70\nresnet_rs_tiny,32,72\ntresnet_tiny,64,74\n"


@pytest.fixture(autouse=True)
def there(tmp_path, monkeypatch):
    """Short measurements, ONNX alone, and an empty folder of times, which is returned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(elsewhere, "MEDIANS", replace(ONLINE, **QUICK))
    monkeypatch.setattr(choose_form, "CANDIDATES", ("onnx",))
    for each in (ONLINE, THROUGHPUT):
        quick = replace(each, **QUICK)
        monkeypatch.setitem(protocols.PROTOCOLS, each.name, (quick,))
    monkeypatch.setattr(choose_form, "ONLINE", replace(ONLINE, **QUICK))
    monkeypatch.setattr(choose_form, "TRIAL", replace(ONLINE, **QUICK))
    monkeypatch.setattr(bench_by_name, "BUSY", 100.0)
    yield tmp_path / "cache" / "fullstride" / "targets" / NAME
    connect(WHERE).close()
    connect.cache_clear()


@pytest.fixture
def measured(monkeypatch):
    """The names of the files of each measurement there."""
    names, measure = [], Target.measure

    def counting(self, files, protocol):
        names.append([file.name for file in files])
        return measure(self, files, protocol)

    monkeypatch.setattr(Target, "measure", counting)
    return names


def test_a_benchmark_measures_names_as_files_there_and_stores_their_latencies(
    there, tmp_path, measured, capsys
):
    out = tmp_path / "times.json"
    words = ["bench", "genet_tiny", "resnet_rs_tiny", "--resolution", "32", "--call-batch", "4"]
    assert cli.run([*words, "--target", WHERE, "--out", str(out)]) == 0
    assert measured == 2 * [["genet_tiny onnx fp32", "resnet_rs_tiny onnx fp32"]]
    rows = read_measurements(out)
    assert [row.protocol.batch for row in rows] == [1, 1, 4, 4]
    online, _, throughput, _ = rows
    assert online.environment.torch == ""  # it took no part in the times
    assert online.images_per_s == pytest.approx(1e3 / online.ms_p50)
    assert len(throughput.samples) == QUICK["rounds"]  # images/s of each
    (stored,) = read_measurements(there / "genet_tiny-32-1-onnx-fp32.json")
    assert stored == replace(online, name="genet_tiny")
    assert "torch" not in capsys.readouterr().out
    assert cli.run([*words, "--target", WHERE, "--rounds", "1"]) == 0
    assert read_measurements(there / "genet_tiny-32-1-onnx-fp32.json") == [stored]


def export_small(path, **options):
    digits = open_data("digits").test
    images = ComparisonImages([digits.picture(index) for index in range(4)])
    bundle = small_bundle(preprocessing=Preprocessing(resolution=64, crop=1.0))
    export(bundle, path, images, ExportOptions(**options))
    return str(path)


def test_a_file_has_its_own_precision_in_its_name_and_in_the_note(tmp_path, capsys):
    path, out = export_small(tmp_path / "a.onnx", precision="fp16"), tmp_path / "times.json"
    assert cli.run(["bench", path, "--target", WHERE, "--out", str(out)]) == 0
    assert {row.name for row in read_measurements(out)} == {f"{path} fp16"}
    name = re.escape(f"{path} fp16")
    assert re.search(rf"^{name}: onnx \S+, 1 thread, fp16$", capsys.readouterr().out, re.MULTILINE)


def test_files_are_measured_at_the_sides_that_are_given_or_refused(tmp_path, capsys):
    own, any_size = (
        export_small(tmp_path / name, any_size=name == "any.onnx")
        for name in ("own.onnx", "any.onnx")
    )
    out = tmp_path / "times.json"
    words = ["--target", WHERE, "--resolution", "96"]
    assert cli.run(["bench", any_size, "resnet_rs_tiny", *words, "--out", str(out)]) == 0
    assert {row.protocol.resolution for row in read_measurements(out)} == {96}
    assert cli.run(["bench", any_size, own, *words]) == 2
    assert f"{own} does not take inputs of (1, 3, 96, 96)" in capsys.readouterr().err


def test_a_precision_of_files_alone_is_refused(tmp_path, capsys):
    words = ["bench", export_small(tmp_path / "a.onnx"), "--precision", "int8"]
    assert cli.run([*words, "--target", WHERE]) == 2
    line = "--precision: a file computes as it was exported, leave it out"
    assert line in capsys.readouterr().err


def test_the_form_of_an_export_is_chosen_by_times_there(there, tmp_path, measured, monkeypatch):
    monkeypatch.setattr(choose_form, "CANDIDATES", ("onnx", "openvino", "ncnn"))
    ms = {"onnx fp32": 9.0, "openvino fp32": 4.0, "ncnn fp32": 6.0}
    measure = choose_form.measure_there

    def scaled(models, protocol, target):
        rows = measure(models, protocol, target)
        return [replace(row, samples=(ms[row.name],) * len(row.samples)) for row in rows]

    monkeypatch.setattr(choose_form, "measure_there", scaled)
    digits, options = open_data("digits").test, ExportOptions(precision="fp32", target=WHERE)
    images = ComparisonImages([digits.picture(index) for index in range(4)])
    result = choose_form.fastest(small_bundle(), tmp_path / "net", images, options)
    assert result.format == "openvino"
    assert (tmp_path / "net" / "model.xml").is_file()
    assert measured == [*([label] for label in ms), [*ms]]


def choose(tmp_path, *words, target=WHERE):
    source = tmp_path / "networks.csv"
    source.write_text(NETWORKS)
    return cli.run(["choose", "--from", str(source), "--target", target, "--json", *words])


def test_a_choice_measures_what_decides_once_and_says_so(there, tmp_path, measured, capsys):
    assert choose(tmp_path, "--budget-ms", "1000") == 0
    answer, log = capsys.readouterr()
    best = json.loads(answer)["best"]
    assert (best["name"], best["time"]) == ("tresnet_tiny", "measured")
    (row,) = read_measurements(there / "tresnet_tiny-64-1-onnx-fp32.json")
    assert best["measured_ms"] == pytest.approx(protocols.call_time(row).ms)
    assert "tresnet_tiny at 64 x 64: onnx fp32" in log
    count = len(measured)
    assert len({names[0] for names in measured}) == count  # each network once
    assert choose(tmp_path, "--budget-ms", "1000") == 0
    assert json.loads(capsys.readouterr().out)["best"] == best
    assert len(measured) == count


@pytest.fixture
def slow_board(monkeypatch):
    """A board on which the networks take known times, and on which the last one does not run."""
    ms, here = (
        {"genet_tiny": 20.0, "resnet_rs_tiny": 40.0, "tresnet_tiny": 80.0},
        Environment.here(),
    )

    def write(self, name, resolution, *task):
        if name == "tresnet_tiny" and not ms["tresnet_tiny"]:
            raise ValueError("there is no such operator")
        return {("onnx", "fp32"): name}

    def measure(models, protocol, target):
        series = Series(lambda: None, 1, environment=here)
        rows = []
        for label, name in models.items():
            series.samples = [ms[name]] * QUICK["rounds"]
            side = {"tresnet_tiny": 64}.get(name, 32)
            rows.append(measurement(label, series, replace(protocol, resolution=side), DEFAULTS))
        return rows

    monkeypatch.setattr(elsewhere.FilesThere, "write_named", write)
    monkeypatch.setattr(choose_form, "measure_files", measure)
    return ms


@pytest.mark.parametrize(("budget_ms", "name"), [(100, "tresnet_tiny"), (50, "resnet_rs_tiny")])
def test_a_choice_holds_where_rough_estimates_are_wrong(
    slow_board, tmp_path, capsys, budget_ms, name
):
    """They are a hundred times too short."""
    assert choose(tmp_path, "--budget-ms", str(budget_ms)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["best"]["name"], answer["best"]["measured_ms"]) == (name, slow_board[name])
    assert answer["profile"]["name"] == NAME


@pytest.mark.usefixtures("slow_board")
def test_a_choice_for_here_measures_on_this_machine(tmp_path, capsys):
    assert choose(tmp_path, "--budget-ms", "50", target="here") == 0
    connect("here").close()
    best = json.loads(capsys.readouterr().out)["best"]
    assert (best["name"], best["time"]) == ("resnet_rs_tiny", "measured")


def test_of_two_measurements_on_a_busy_board_the_quieter_one_is_stored(
    there, slow_board, tmp_path, monkeypatch, capsys
):
    measure, calls = choose_form.measure_files, Counter()

    def busy(models, protocol, target):
        calls.update(models.values())
        (row,), (name,) = measure(models, protocol, target), models.values()
        return [replace(row, samples=(10.0, 12.0) if calls[name] == 1 else (9.0, 30.0))]

    monkeypatch.setattr(bench_by_name, "BUSY", 0.1)
    monkeypatch.setattr(choose_form, "measure_files", busy)
    assert choose(tmp_path, "--budget-ms", "1000") == 0
    assert json.loads(capsys.readouterr().out)["best"]["measured_ms"] == 11
    assert set(calls.values()) == {2}
    (row,) = read_measurements(there / "tresnet_tiny-64-1-onnx-fp32.json")
    assert row.samples == (10, 12)


def test_a_choice_says_that_nothing_fits(slow_board, tmp_path, capsys):
    assert choose(tmp_path, "--budget-ms", "1") == 2
    assert "nothing fits 1 ms" in capsys.readouterr().err


def test_a_network_that_does_not_run_there_is_left_out(slow_board, tmp_path, capsys):
    slow_board["tresnet_tiny"] = 0.0
    assert choose(tmp_path, "--budget-ms", "1000") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"]["name"] == "resnet_rs_tiny"
    assert "no such operator" in answer["left_out"]["tresnet_tiny at 64 x 64"]


@pytest.mark.usefixtures("slow_board")
def test_times_of_another_machine_are_refused(there, tmp_path, capsys):
    assert choose(tmp_path, "--budget-ms", "1000") == 0
    path = there / MACHINE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor": "Cortex-A76"}))
    for command in (
        ["choose", "--budget-ms", "5", "--target", WHERE],
        ["bench", "genet_tiny", "--target", WHERE],
    ):
        capsys.readouterr()
        assert cli.run(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "Cortex-A76" in line
        assert f"{there} was measured: remove it" in line


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench genet_tiny --layout nhwc", "--layout"),
        ("bench genet_tiny --protocol tresnet", "online or throughput"),
        ("choose --budget-ms 5 --measured times.csv", "--measured"),
        ("export a b --out x --format auto", "one run"),
        ("export a --out x.onnx", "one run"),
        ("measure estimate genet_tiny", "measure calibrate"),
        ("measure calibrate --device cpu", "--device"),
        ("measure calibrate --runtimes eager", "no runtime 'eager'"),
        ("study search digits --out x --budget-ms 5", "measure calibrate"),
    ],
)
def test_what_a_target_has_no_meaning_for_is_one_line(command, message, capsys):
    assert cli.run([*command.split(), "--target", WHERE]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


TRUE = {
    **{"dense": 0.6, "1x1": 0.5, "depthwise": 0.1, "group_channels": 20.0},
    **{"convolution": 0.7, "elementwise": 0.9, "norm": 0.7, "statistics": 0.4, "gather": 0.6},
    **{"launch_us": 5.0, "start_us": 30.0},
}
BOARD = Machine(
    runtime="onnx", peak_tflops=0.1, bandwidth_gb_s=20, bytes_per_element=4, folded=True
)


def test_a_profile_of_a_board_has_its_numbers_and_needs_no_connection_later(
    there, tmp_path, monkeypatch, capsys
):
    """A board for which the model is right, whose files are not written."""
    networks = [each for each in all_microbenchmarks() if each.family != WHOLE][::2]
    monkeypatch.setattr(elsewhere, "all_microbenchmarks", lambda: networks)
    operators = {each.name: traced(each.build, 64) for each in networks}
    here, calls = Environment.here(), []

    def measure(models, protocol, target):
        calls.append(sorted(models.values()))
        series, rows = Series(lambda: None, protocol.batch, environment=here), []
        for label, name in models.items():
            took = times(prepare([operators[name]], [protocol.batch], BOARD), TRUE).total_s
            series.samples = [1e3 * float(took[0])] * protocol.rounds
            rows.append(measurement(label, series, protocol, DEFAULTS))
        return rows

    monkeypatch.setattr(
        elsewhere.FilesThere, "write", lambda self, net, name, *_: {("onnx", "fp32"): name}
    )
    monkeypatch.setattr(choose_form, "measure_files", measure)
    monkeypatch.chdir(tmp_path)
    words = ["measure", "calibrate", "--runtimes", "onnx", "--resolution", "64", "--target", WHERE]
    assert cli.run([*words, "--out", "board.json"]) == 0
    profile = load_profile("board.json")
    assert (profile.name, profile.machine.runtime) == (NAME, "onnx")
    assert profile.inference.software.startswith("onnx ")
    share = BOARD.peak_tflops / profile.machine.peak_tflops
    assert share > 1  # the peak is the highest rate that was seen
    for name in ("dense", "1x1", "depthwise"):
        number = profile.inference.numbers[name]
        assert number == pytest.approx(share * TRUE[name], rel=0.15), name
    count = len(calls)
    assert sorted(sum(calls, [])) == sorted(2 * [each.name for each in networks])
    assert cli.run([*words, "--out", "again.json"]) == 0
    assert len(calls) == count
    connect(WHERE).close()
    assert cli.run(["measure", "estimate", "genet_light", "--target", "board.json", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = json.loads(lines[-1])["estimates"]
    spec = traced(zoo.create("genet_light"), row["resolution"])
    took = times(prepare([spec], [1], BOARD), TRUE).total_s
    assert row["ms_per_image"] == pytest.approx(1e3 * float(took[0]), rel=0.1)
