"""Tables of users: what a CSV file may look like, and the one line where it does not."""

import pytest

from fullstride.io.records import read_rows


def sides(path):
    return read_rows(path, lambda row: (row["name"], int(row["side"])), "name and side", 1000)


@pytest.mark.parametrize(
    "content",
    [
        b"name,side\na,3\nb,4\n",
        b"\xef\xbb\xbfname,side\r\na,3\r\nb,4",  # as Excel writes it
        b"name, side, note\n\na, 3\n\n\nb, 4, x, y\n",
        b'side,name\n"3","a"\n4,b\n',
    ],
)
def test_a_table_is_read_as_spreadsheets_write_it(tmp_path, content):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    assert sides(path) == [("a", 3), ("b", 4)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no line below its header"),
        (b"a,3\n", "no line below its header"),
        (b"name;side\na;3\n", "has the columns 'name;side' and lacks 'name'.*commas"),
        (b"name,side\na,3\n\n\nb,x\n", "line 5: .*'x'"),
        (b"name,side\na\n", "line 2: "),
        ("name,side\na,3\n".encode("utf-16"), "UTF-8"),
        (b"x" * 1001, "more than 1,000 bytes"),
    ],
)
def test_what_is_no_such_table_is_one_line_with_the_file_and_the_line(tmp_path, content, says):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"table.csv.*{says}") as caught:
        sides(path)
    assert "\n" not in str(caught.value)
