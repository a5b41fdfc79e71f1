"""The README and the page on design are true: tables and trees match the code."""

import re
from pathlib import Path

import pytest

from fullstride import cli
from fullstride.nets.families import SPECS
from fullstride.tables import published
from fullstride.train.recipes.named import RECIPES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
NETWORKS = (ROOT / "docs/reference/networks.md").read_text()
DESIGN = (ROOT / "docs/internals/design.md").read_text()


def test_the_zoo_and_the_page_of_networks_have_published_counts_and_accuracies(capsys):
    assert cli.run(["zoo"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    listed = {line.split()[0]: line for line in lines}
    assert set(SPECS) < set(listed)
    assert {"31.39", "5.737"} <= set(listed["tresnet_m"].split())
    assert "timm/tresnet_m.miil" in listed["tresnet_m"]
    rows = re.findall(
        r"^\| `(\w+)` \| ([\d.]+) \| ([\dx]+) \| ([\d.]+) \| (.*?) \|$", NETWORKS, re.MULTILINE
    )
    others = {f"masternet_{row}" for row in range(2, 21)}  # one of the twenty stands for all
    assert [row[0] for row in rows] == [
        name
        for name, spec in SPECS.items()
        if not spec.source.startswith("ours") and name not in others
    ]
    for name, params, side, macs, accuracies in rows:
        _, listed_params, listed_macs, listed_side, *_ = listed[name].split()
        assert (params, side) == (listed_params, listed_side)
        assert float(macs) == pytest.approx(float(listed_macs), abs=0.0051)
        scores = [f"{p.top1:g} at {p.resolution}" for p in published() if p.name == name]
        assert accuracies == ", ".join(scores)
        assert all(
            f"{p.top1:g} ({p.resolution})" in listed[name] for p in published() if p.name == name
        )


def test_the_tree_of_the_page_on_design_names_every_module_where_it_is():
    tree = re.search(r"^src/fullstride/\n(.*?)```", DESIGN, re.MULTILINE | re.DOTALL)[1]
    named, folders = set(), []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        words = line.split()
        if words[0].endswith("/"):
            folders = [*folders[: depth - 1], words[0]]
        else:
            inside = "".join(folders[: depth - 1])
            named |= {inside + word for word in words if word.endswith(".py")}
    source = ROOT / "src" / "fullstride"
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    assert named == {path for path in modules if not path.endswith("__init__.py")}


def test_every_target_the_readme_names_is_in_the_makefile():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"make ([\w-]+)", README):
        assert target in targets


def test_the_page_on_training_names_every_recipe():
    page = (ROOT / "docs/guides/training.md").read_text()
    table = page.partition("## Recipes")[2].partition("##")[0]
    rows = "\n".join(line for line in table.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`(\w+)`", rows))
    sizes = {name for name in RECIPES if re.fullmatch(r"resnet_rs_\d+_\d+", name)}
    assert len(sizes) == 11
    assert named - sizes == set(RECIPES) - sizes | {"digits"}


def test_the_index_of_the_log_has_every_section_once():
    log = (ROOT / "docs/log.md").read_text()
    titles = re.findall(r"^## (.*)$", log, re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    assert sorted(re.findall(r"\]\(#(.*?)\)", log)) == sorted(anchors)


def test_the_readme_and_each_version_of_the_changelog_are_short():
    assert len(README.splitlines()) <= 120
    for version in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        assert len(version.splitlines()) <= 60
