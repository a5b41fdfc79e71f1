"""Reads and writes JSON strictly as frozen dataclasses, whose annotations say what it may hold.

`from_json` and `to_json` convert between JSON and dataclasses, a `Record` describes a file of
them, and `Bounds` limits numbers.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from reprlib import repr as shortened
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from fullstride.io.writing import Output, atomic_write, json_output, read_regular

T = TypeVar("T")
MAX_JSON_BYTES = 64 * 2**20  # 20,000 class names take less than 1 MiB
MAX_INT = 2**63 - 1  # int64, as torch and NumPy have it


@dataclass(frozen=True)
class Bounds:
    """Limits of a number, in a field's type: `Annotated[float, Bounds(ge=0, lt=1)]`."""

    ge: float | None = None  # greater than or equal to
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (abs(value) <= MAX_INT if isinstance(value, int) else math.isfinite(value))
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        limits = (("at least", self.ge), ("above", self.gt), ("at most", self.le))
        limits += (("below", self.lt),)
        return " and ".join(f"{word} {limit:,g}" for word, limit in limits if limit is not None)


UNBOUNDED = Bounds()  # any finite number, or an integer of 64 bits
Count = Annotated[int, Bounds(ge=0)]
PositiveInt = Annotated[int, Bounds(ge=1)]
NonNegative = Annotated[float, Bounds(ge=0)]
Positive = Annotated[float, Bounds(gt=0)]
Probability = Annotated[float, Bounds(ge=0, le=1)]
BelowOne = Annotated[float, Bounds(ge=0, lt=1)]


def check_range(name: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} {value!r}: use a whole number from 1 to {most}")


def refuse_flags(values: Mapping[str, Any], reason: str) -> None:
    """Raise ValueError, with `reason`, for flags with a value."""
    names = [f"--{name.replace('_', '-')}" for name, value in values.items() if value]
    if names:
        raise ValueError(f"{', '.join(names)} {reason}")


def check_bounds(instance: Any, prefix: str = "") -> None:
    """Compare fields with the `Bounds` and the `Literal` in their types. For `__post_init__`.

    Raises ValueError for the first field that does not fit. None fits an optional field, and in a
    tuple each item is compared. With the prefix "--" a field is named as its flag.
    """
    for name, hint in _hints(type(instance)).items():
        value, shown = getattr(instance, name), name.replace("_", "-") if prefix == "--" else name
        parts, choices = _parts(hint), _choices(hint)
        for number in value if isinstance(value, tuple) else (value,):
            if choices and number not in choices:
                fits = " or ".join(map(str, choices))
                raise ValueError(f"{prefix}{shown} {shortened(number)}: use {fits}")
            for kind, bounds in parts.items():
                if bounds and isinstance(number, int | float) and number not in bounds:
                    is_huge = isinstance(number, int) and abs(number) > MAX_INT
                    fits = f"{_NOUNS[kind]}{' of 64 bits' * is_huge}, {bounds}"
                    raise ValueError(f"{prefix}{shown} {shortened(number)}: use {fits}")


@cache
def _parts(hint: Any) -> dict[Any, Bounds | None]:
    """The types in a tuple, in a union, or alone, each with its bounds, if any."""
    kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(kind) in (tuple, Union, UnionType):
        return {own: bounds for part in get_args(kind) for own, bounds in _parts(part).items()}
    return {kind: next((each for each in metadata if isinstance(each, Bounds)), None)}


@cache
def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, also in a tuple or with None; () for other types."""
    parts = _parts(hint)
    choices = [each for kind in parts if get_origin(kind) is Literal for each in get_args(kind)]
    return (*choices, None) if choices and NoneType in parts else tuple(choices)


# ---- JSON


def read_json(path: Path, hint: str = "check the path", most: int = MAX_JSON_BYTES) -> Any:
    """The parsed content of a JSON file. Raises ValueError in one line."""
    try:
        return parse_json(read_regular(path, most), str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"no {path.name} in {path.parent}: {hint}") from None


def parse_json(text: str | bytes, where: str) -> Any:
    """Parsed JSON. Raises ValueError in one line that begins with `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not whole JSON: {str(error)[:200]}") from None


def to_json(value: Any, names: Mapping[Any, str] | None = None) -> str:
    """Dataclasses and containers of them as JSON; `names` names classes and functions in a file."""

    def in_json(part: Any) -> Any:
        if is_dataclass(part) and not isinstance(part, type):
            return {each.name: getattr(part, each.name) for each in fields(part)}
        if names is None or part not in names:
            raise TypeError(f"{part!r} has no form in JSON")
        return names[part]

    return json.dumps(value, indent=1, default=in_json)


def write_json(path: Path, output: Output, value: Any) -> None:
    """Write `to_json` of `value` whole or not at all, and only over an earlier `output`."""
    with atomic_write(path, output) as temporary:
        temporary.write_text(to_json(value))


def from_json(kind: type[T], data: Any, where: str, registry: Mapping[str, Any] | None = None) -> T:
    """Build the dataclass `kind` from JSON: text, or a result of `read_json`.

    The types of the fields decide: bool, int, float, str, Literal, None, tuples, mappings from
    str, dataclasses, Any, `Annotated` with `Bounds`, and the classes and functions that `registry`
    lists by name. Numbers are finite, integers have 64 bits, and true is no number. A missing
    field takes its default. Raises ValueError in one line: `where`, the path of the field, its
    value and what fits.
    """
    if isinstance(data, str | bytes):
        data = parse_json(data, where)
    try:
        return _reader(kind)(data, registry or {})
    except _MisfitError as error:
        path = "".join(reversed(error.path)).removeprefix(".")
        raise ValueError(f"{where}: {path}{error}" if path else f"{where}{error}") from None


@dataclass(frozen=True)
class Record(Generic[T]):
    """A JSON file of a dataclass or a tuple of them: how it is read, written and recognised."""

    kind: type[T]
    noun: str  # for errors: "the times of a fit"
    keys: tuple[str, ...]  # an existing file is replaced only if it has these
    hint: str = "check the path"  # for the error about a missing file

    @property
    def output(self) -> Output:
        return json_output(self.noun, *self.keys)

    def load(self, path: Path) -> T:
        """Raises ValueError in one line."""
        return from_json(self.kind, read_json(path, self.hint), str(path))

    def find(self, path: Path) -> T | None:
        """As `load`, but None for a missing file, which the caller then makes."""
        with deletable():
            return self.load(path) if path.exists() else None

    def save(self, path: Path, value: T) -> T:
        """Write the file whole or not at all. Returns what a later `load` returns."""
        write_json(path, self.output, value)
        return self.load(path)


@contextmanager
def deletable() -> Iterator[None]:
    """Add to a ValueError about a file that it can be deleted and made again."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; delete it, and the same command makes it again") from None


def differences(old: Any, new: Any, name: str = "") -> dict[str, str]:
    """The values that differ in two contents of a file: `recipe.lr` -> a line with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines: dict[str, str] = {}
        for key in {**old, **new}:
            path = f"{name}.{key}" if name else key
            lines |= differences(old.get(key), new.get(key), path)
        return lines
    if old == new:
        return {}
    there, now = (
        ", ".join(map(repr, value)) or "none" if isinstance(value, list) else repr(value)
        for value in (old, new)
    )
    return {name: f"{name} is {there} there and {now} now"}


class _MisfitError(Exception):
    """What is wrong with a value. The reader of each container appends its part of the path."""

    def __init__(self, message: str):
        super().__init__(message)
        self.path: list[str] = []


_Reader = Callable[[Any, Mapping[str, Any]], Any]
_NOUNS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string"}


def _misfit(value: Any, fits: str) -> _MisfitError:
    return _MisfitError(f" is {shortened(value)}: use {fits}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


@cache
def _reader(hint: Any) -> _Reader:
    """A function that reads values of the type `hint`; built once for each type."""
    origin, kinds = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value, registry: value
    if origin is Annotated:
        bounds = [each for each in kinds[1:] if isinstance(each, Bounds)]
        return _number(kinds[0], bounds[0]) if bounds else _reader(kinds[0])
    if origin is Literal:
        return _checked(
            lambda value: any(type(value) is type(each) and value == each for each in kinds),
            " or ".join(map(repr, kinds)),
        )
    if origin in (Union, UnionType):
        return _optional(kinds)
    if origin is tuple:
        return _tuple(kinds)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*kinds)
    if origin in (type, Callable):
        return _named(kinds[0] if origin is type else None)
    if is_dataclass(hint):
        return _dataclass(hint)
    assert isinstance(hint, type), f"{hint} has no form in JSON"
    if hint in (int, float):
        return _number(hint)
    # true, false, a string, or an object of a class that JSON lacks, as a tensor in a checkpoint
    fits = _NOUNS.get(hint, f"a {hint.__name__}")
    return _checked(lambda value: isinstance(value, hint), fits)


def _number(kind: type, bounds: Bounds = UNBOUNDED) -> _Reader:
    fits = ", ".join(filter(None, (_NOUNS[kind], str(bounds))))

    def read(value: Any, registry: Mapping[str, Any]) -> Any:
        if kind is float and type(value) is int and value in UNBOUNDED:
            value = float(value)
        if type(value) is not kind or value not in bounds:
            raise _misfit(value, fits)
        return value

    return read


def _checked(is_fit: Callable[[Any], bool], fits: str) -> _Reader:
    """Reads values as they are if `is_fit`; `fits` describes these for an error."""

    def read(value: Any, registry: Mapping[str, Any]) -> Any:
        if not is_fit(value):
            raise _misfit(value, fits)
        return value

    return read


def _optional(kinds: tuple[Any, ...]) -> _Reader:
    """Reads one type or None: JSON does not say which class of another union it holds."""
    (kind,) = set(kinds) - {NoneType}
    inner = _reader(kind)
    return lambda value, registry: None if value is None else inner(value, registry)


def _tuple(kinds: tuple[Any, ...]) -> _Reader:
    same = len(kinds) == 2 and kinds[1] is Ellipsis
    readers = [_reader(kind) for kind in kinds[: 1 if same else None]]

    def read(value: Any, registry: Mapping[str, Any]) -> tuple[Any, ...]:
        if type(value) not in (list, tuple):
            raise _misfit(value, "a list")
        if not same and len(value) != len(readers):
            raise _misfit(value, f"a list of {len(readers)}")
        values: list[Any] = []
        try:
            for item, reader in zip(value, readers * len(value) if same else readers, strict=True):
                values.append(reader(item, registry))
        except _MisfitError as error:
            error.path.append(f"[{len(values)}]")
            raise
        return tuple(values)

    return read


def _mapping(key_kind: Any, kind: Any) -> _Reader:
    read_key, inner = _reader(key_kind), _reader(kind)

    def read(value: Any, registry: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _misfit(value, "an object of names and values")
        values, key = {}, ""
        try:
            for key, item in value.items():
                values[read_key(key, registry)] = inner(item, registry)
        except _MisfitError as error:
            error.path.append(f"[{shortened(key)}]")
            raise
        return values

    return read


def _named(kind: type | None) -> _Reader:
    """Reads a subclass of `kind`, or a function if `kind` is None, by its name."""

    def fits(part: Any) -> bool:
        is_class = isinstance(part, type)
        return not is_class if kind is None else is_class and issubclass(part, kind)

    def read(value: Any, registry: Mapping[str, Any]) -> Any:
        part = registry.get(value) if isinstance(value, str) else None
        if part is None or not fits(part):
            raise _misfit(value, " or ".join(name for name, part in registry.items() if fits(part)))
        return part

    return read


def _dataclass(kind: Any) -> _Reader:
    readers = {name: _reader(hint) for name, hint in _hints(kind).items()}
    required = [
        field.name
        for field in fields(kind)
        if field.init and field.default is MISSING and field.default_factory is MISSING
    ]

    def read(value: Any, registry: Mapping[str, Any]) -> Any:
        if not isinstance(value, Mapping):
            raise _misfit(value, f"an object with {', '.join(required or readers)}")
        for name in value:
            if name not in readers:
                close = get_close_matches(str(name), readers, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "another kind of file or version"
                raise _MisfitError(f" has an unknown field {shortened(name)}: {hint}")
        if missing := [name for name in required if name not in value]:
            raise _MisfitError(f" lacks {', '.join(missing)}")
        values, name = {}, ""
        try:
            for name, item in value.items():
                values[name] = readers[name](item, registry)
        except _MisfitError as error:
            error.path.append(f".{name}")
            raise
        try:
            return kind(**values)
        except (ValueError, ArithmeticError) as error:  # from __post_init__
            raise _MisfitError(f": {' '.join(str(error).split())}") from None

    return read


# Tables of users: each row becomes an object, and an error names file and line.


def read_rows(
    path: Path, row_of: Callable[[Mapping[str, str]], T], columns: str, most: int
) -> list[T]:
    """Apply `row_of` to each row of a CSV file with a header and at most `most` bytes.

    `columns` names the required columns in errors. Raises ValueError, in one line, for a file that
    is not a table, has no rows, or lacks a column that `row_of` looks up, and with the number of
    the line where `row_of` raises ValueError.
    """
    try:
        lines = read_regular(path, most).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8: give columns {columns}") from None
    reader = csv.DictReader(lines, restval="", skipinitialspace=True)
    rows: list[T] = []
    try:
        for row in reader:
            rows.append(row_of(row))
    except KeyError as error:
        own = ", ".join(map(shortened, reader.fieldnames or ()))
        raise ValueError(
            f"{path} has the columns {own} and lacks {error}: give columns {columns}, separated "
            "by commas"
        ) from None
    except (ValueError, csv.Error) as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: {error}: give columns {columns}"
        ) from None
    if not rows:
        raise ValueError(f"{path} has no line below its header: give columns {columns}")
    return rows
