"""The package's table of operators: what tracing gives, and a choice that builds nothing."""

import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import write_operator_table
from write_operator_table import derive

from fullstride import tables
from fullstride.latency.devices import (
    TRAINING,
    decode,
    find_operators,
    key_of,
    operator_table,
    own_resolution,
)
from fullstride.nets import zoo

SAMPLE = [
    ("timm/mobilenetv3_small_050", 224),
    ("timm/vit_tiny_patch16_224", 224),
    ("timm/efficientnet_b4", 380),
    ("timm/repghostnet_050", 224),
]


def same(key: tuple[str, int], traced, *, training: bool = False) -> bool:
    known = find_operators(*key, training=training)
    return known is not None and all(
        np.array_equal(column, asdict(known)[name]) for name, column in asdict(traced).items()
    )


def table_keys() -> list[tuple[str, int]]:
    """Name and pixels a side of all networks in the table."""
    keys = (key.split() for key in operator_table().spans if not key.endswith(TRAINING))
    return [(name, int(side)) for name, side in keys]


def check(keys: list[tuple[str, int]]) -> None:
    found = dict(derive(keys))
    for key in keys:
        inference = found[key_of(*key)]
        assert same(key, inference), key
        assert same(key, found.get(f"{key_of(*key)}{TRAINING}", inference), training=True), key


def test_the_table_has_the_operators_of_all_of_the_zoos_networks():
    keys = [key for key in table_keys() if not key[0].startswith("timm/")]
    assert {(row.name, row.resolution) for row in tables.published()} <= set(keys)
    own = {(row.name, row.resolution) for row in tables.networks() if not row.frames}
    assert own <= set(keys)
    check(keys)


def test_the_table_has_the_operators_that_tracing_gives_for_networks_of_timm():
    check(SAMPLE)


@pytest.mark.slow
def test_the_table_has_the_operators_that_tracing_gives_for_a_hundredth_of_timm():
    check([key for key in table_keys() if key[0].startswith("timm/")][::100])


def test_a_tag_of_weights_does_not_change_operators_and_other_sizes_are_not_in_the_table():
    plain = find_operators("timm/resnet50", 224)
    tagged = find_operators("timm/resnet50.a1_in1k", 224)
    assert plain is not None
    assert tagged is not None
    assert np.array_equal(plain.table(), tagged.table())
    assert find_operators("timm/resnet50", 225) is None
    assert find_operators("timm/resnet51", 224) is None


def test_a_choice_among_all_networks_of_timm_builds_none_and_takes_seconds(tmp_path):
    keys = table_keys()
    assert len(keys) > 1500
    rows = [f"{name},{side},{50 + number % 40}" for number, (name, side) in enumerate(keys)]
    path = tmp_path / "all.csv"
    path.write_text("\n".join(["model,img_size,top1", *rows]))
    program = f"""
import resource, sys
from fullstride import cli
assert cli.run(["choose", "--target", "rtx4090", "--budget-ms", "5", "--from", {str(path)!r}]) == 0
used = resource.getrusage(resource.RUSAGE_SELF)
assert not {{"torch", "timm"}} & set(sys.modules)
assert used.ru_utime + used.ru_stime < 20
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr


def test_what_is_encoded_is_decoded():
    keys = [("resnet50", 224), ("genet_large", 256), ("timm/mixnet_l", 224)]
    networks = {key_of(*key): find_operators(*key) for key in keys}
    columns, spans, sides = decode(write_operator_table.encode(networks, {"a": 96}))
    assert list(spans) == list(networks)
    assert sides == {"a": 96}
    for key, (begin, end) in spans.items():
        assert np.array_equal(columns[:, begin:end], networks[key].table())


@pytest.mark.slow
def test_the_command_writes_the_table_of_the_package_again(tmp_path, monkeypatch):
    before = operator_table()
    monkeypatch.setattr(write_operator_table, "PATH", tmp_path / "operators.xz")
    monkeypatch.setattr(sys, "argv", ["write_operator_table"])
    write_operator_table.main()
    after = decode((tmp_path / "operators.xz").read_bytes())
    assert after.sides == before.sides
    assert after.spans.keys() == before.spans.keys()
    for key, (begin, end) in before.spans.items():
        there = slice(*after.spans[key])
        assert np.array_equal(after.rows[:, there], before.rows[:, begin:end]), key


def test_a_pattern_that_matches_no_network_is_one_line_and_writes_nothing(tmp_path, monkeypatch):
    operator_table()  # read before the path changes
    monkeypatch.setattr(write_operator_table, "PATH", tmp_path / "operators.xz")
    monkeypatch.setattr(sys, "argv", ["write_operator_table", "repvgg*"])
    with pytest.raises(SystemExit, match=r"repvgg\* matches no network"):
        write_operator_table.main()
    assert not [*tmp_path.iterdir()]


def test_own_resolutions_are_those_of_the_zoo_and_of_timms_tags():
    tagged = ["timm/convnext_base.fb_in22k_ft_in1k_384", "timm/efficientnet_b3.ra2_in1k"]
    for name in ("genet_large", "timm/resnet50", "timm/tf_efficientnet_b4", *tagged):
        assert own_resolution(name) == zoo.spec(name).resolution
    assert own_resolution("timm/resnet50.no_such_tag") is None
