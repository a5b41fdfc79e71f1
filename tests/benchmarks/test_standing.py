"""Tables of docs that commands print: where our families stand, and how long trainings take."""

from pathlib import Path

import paper_hours
import standing

from fullstride.latency.devices import load_profile
from fullstride.tables import pretrained_networks

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_networks_has_the_table_that_the_command_prints():
    table = "\n".join(standing.table(load_profile("rtx4090-compiled"), 64))
    assert table in (DOCS / "reference/networks.md").read_text()


def test_the_readme_has_the_rows_of_one_budget_and_of_every_family():
    rows = standing.table(load_profile("rtx4090-compiled"), 64, [0.25])
    assert len(rows) == 2 + len(standing.FAMILIES)
    assert "\n".join(rows) in (DOCS.parent / "README.md").read_text()


def test_the_page_of_the_papers_has_the_hours_that_the_command_prints():
    table = "\n".join(paper_hours.table(load_profile("rtx3090"), 64))
    assert table in (DOCS / "reproduce/index.md").read_text()


def test_no_released_network_of_a_family_is_more_accurate_within_a_budget_than_its_best():
    best = standing.best_within(load_profile("rtx4090-compiled"), 64)
    for family in ("HGNetV2", "RepViT"):
        top1 = max(row[3] for row, _ in best if row[0] == family)
        names = [each for each in pretrained_networks() if family.lower() in each.name]
        assert top1 == max(each.top1 for each in names)
    assert {row[0] for row, _ in best} == set(standing.FAMILIES.values())
