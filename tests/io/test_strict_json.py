"""JSON is read into frozen dataclasses strictly: what does not fit is one line of ValueError."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from fullstride.io.records import (
    MAX_INT,
    Bounds,
    Record,
    check_bounds,
    from_json,
    read_json,
    to_json,
)


class Shape:
    pass


class Circle(Shape):
    pass


def paint() -> None:
    pass


REGISTRY = {"Circle": Circle, "str": str, "paint": paint}


@dataclass(frozen=True)
class Part:
    width: int
    share: Annotated[float, Bounds(ge=0, lt=1)] = 0.5

    def __post_init__(self) -> None:
        check_bounds(self, "part.")
        if self.width % 2:
            raise ValueError(f"width {self.width}:\nuse an even number")


@dataclass(frozen=True)
class Whole:
    name: str
    shape: type[Shape]
    parts: tuple[Part, ...]
    scale: tuple[float, float] = (0.0, 1.0)
    kind: Literal["a", "b", 3] = "a"
    quick: bool = False
    limit: Annotated[int, Bounds(gt=0, le=9)] | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    notes: Any = None
    draw: Callable[[], None] = paint


DATA = {
    "name": "one",
    "shape": "Circle",
    "parts": [{"width": 2}, {"width": 4, "share": 0}],
    "scale": [0, 2.5],
    "kind": 3,
    "quick": True,
    "limit": 9,
    "rates": {"fast": 1},
    "notes": {"any": [None]},
    "draw": "paint",
}
WHOLE = Whole(
    name="one",
    shape=Circle,
    parts=(Part(2), Part(4, 0.0)),
    scale=(0.0, 2.5),
    kind=3,
    quick=True,
    limit=9,
    rates={"fast": 1.0},
    notes={"any": [None]},
)


def test_a_dataclass_comes_back_from_its_json():
    text = to_json(WHOLE, {part: name for name, part in REGISTRY.items()})
    assert from_json(Whole, text, "a.json", REGISTRY) == WHOLE
    assert from_json(Whole, DATA, "a.json", REGISTRY) == WHOLE
    read = from_json(Whole, DATA, "a.json", REGISTRY)
    assert isinstance(read.scale[0], float), "an integer is a float where the field is one"


def test_a_missing_field_takes_its_default():
    few = {name: DATA[name] for name in ("name", "shape")} | {"parts": []}
    assert from_json(Whole, few, "a.json", REGISTRY) == Whole("one", Circle, ())


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"name": 3}, "name", "3"),
        ({"name": None}, "name", "None"),
        ({"shape": "Square"}, "shape", "Circle"),
        ({"shape": "str"}, "shape", "Circle"),
        ({"shape": "paint"}, "shape", "Circle"),
        ({"draw": "Circle"}, "draw", "paint"),
        ({"draw": ["paint"]}, "draw", "paint"),
        ({"parts": {}}, "parts", "list"),
        ({"parts": [{"width": 2}, 7]}, "parts[1]", "width"),
        ({"parts": [{"width": True}]}, "parts[0].width", "True"),
        ({"parts": [{"width": 2.0}]}, "parts[0].width", "2.0"),
        ({"parts": [{"width": MAX_INT + 1}]}, "parts[0].width", "whole number"),
        ({"parts": [{"width": 3}]}, "parts[0]", "even"),
        ({"parts": [{"share": 0}]}, "parts[0]", "lacks width"),
        ({"parts": [{"widht": 2}]}, "parts[0]", "did you mean 'width'"),
        ({"parts": [{"width": 2, "share": 1}]}, "parts[0].share", "below 1"),
        ({"parts": [{"width": 2, "share": -0.1}]}, "parts[0].share", "at least 0"),
        ({"scale": [1]}, "scale", "list of 2"),
        ({"scale": [1, "2"]}, "scale[1]", "'2'"),
        ({"scale": [1, True]}, "scale[1]", "True"),
        ({"scale": [1, math.nan]}, "scale[1]", "nan"),
        ({"scale": [-math.inf, 1]}, "scale[0]", "-inf"),
        ({"scale": [1, 10**400]}, "scale[1]", "number"),
        ({"kind": "c"}, "kind", "'a' or 'b' or 3"),
        ({"kind": 3.0}, "kind", "3.0"),
        ({"kind": ["a"]}, "kind", "'a'"),
        ({"quick": 1}, "quick", "true or false"),
        ({"limit": 0}, "limit", "above 0"),
        ({"limit": 10}, "limit", "at most 9"),
        ({"rates": [1]}, "rates", "object"),
        ({"rates": {"a\nb": None}}, "rates", "None"),
        ({"nmae": "one"}, "a.json", "'nmae'"),
    ],
)
def test_what_does_not_fit_is_one_line_with_file_path_and_value(change, path, says):
    with pytest.raises(ValueError, match=r"^a\.json") as raised:
        from_json(Whole, DATA | change, "a.json", REGISTRY)
    error = str(raised.value)
    assert len(error.splitlines()) == 1
    assert path in error
    assert says in error


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '"text"', "3", "null", "[1]", "1" * 5000])
def test_text_that_is_no_object_is_one_line(text):
    with pytest.raises(ValueError, match=r"^a\.json") as raised:
        from_json(Whole, text, "a.json")
    assert len(str(raised.value).splitlines()) == 1


def test_bounds_of_a_type_hold_for_python_too():
    with pytest.raises(ValueError, match=r"part\.share 1.5: .*below 1"):
        Part(2, 1.5)
    with pytest.raises(ValueError, match=r"part\.share nan"):
        Part(2, math.nan)


@pytest.mark.parametrize("value", [2**63, -(10**400)])
def test_a_whole_number_beyond_64_bits_is_refused_in_one_line(value):
    @dataclass(frozen=True)
    class Limited:
        count: Annotated[int, Bounds(ge=0)]

    with pytest.raises(ValueError, match="use a whole number of 64 bits, at ") as raised:
        check_bounds(Limited(value))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_missing_or_no_json_or_too_large_is_one_line(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(ValueError, match="no a.json in .*: give another"):
        read_json(path, "give another")
    path.write_bytes(b'"\xff"')
    with pytest.raises(ValueError, match="a.json is not whole JSON"):
        read_json(path)
    path.write_text(json.dumps([1] * 10))
    assert read_json(path) == [1] * 10
    with pytest.raises(ValueError, match="more than 5 bytes"):
        read_json(path, most=5)


def test_a_record_is_saved_over_one_of_its_kind_only(tmp_path):
    record, path = Record(Part, "a part", ("width", "share"), "cut one first"), tmp_path / "a.json"
    assert record.find(path) is None
    with pytest.raises(ValueError, match=r"no a\.json in .*: cut one first"):
        record.load(path)
    assert record.save(path, Part(2)) == Part(2)
    assert record.save(path, Part(2, 0.25)) == Part(2, 0.25)
    assert record.find(path) == Part(2, 0.25)
    path.write_text('{"height": 3}')
    with pytest.raises(ValueError, match="is not a part"):
        record.save(path, Part(4))
    with pytest.raises(ValueError, match="has an unknown field 'height'"):
        record.load(path)
