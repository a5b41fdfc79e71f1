"""benchmarks/latency.py: where its tables and operators come from."""

import numpy as np
import pytest
from latency_tables import TABLES, Tracer, timm_file

from fullstride.latency.devices import find_operators

TABLE = next(table for table in TABLES if table.file)


@pytest.mark.parametrize("start", ["benchmark-", ""])
def test_tables_are_found_by_timms_own_names_and_by_short_ones(start, tmp_path):
    path = tmp_path / f"{start}{TABLE.file}"
    path.touch()
    assert timm_file(tmp_path, TABLE) == path


def test_a_missing_table_is_named_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=f"no benchmark-{TABLE.file}") as error:
        timm_file(tmp_path, TABLE)
    assert "\n" not in str(error.value)


def test_operators_of_the_package_are_read_and_none_of_them_is_built():
    def build():
        raise AssertionError("a network was built")

    rows, known = Tracer(None)("resnet50", 224, build), find_operators("timm/resnet50", 224)
    assert known is not None
    assert np.array_equal(rows.table(), known.table())
