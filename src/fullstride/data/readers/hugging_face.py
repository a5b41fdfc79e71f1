"""Reads datasets of Hugging Face: a folder of `save_to_disk`, or a folder of parquet files.

The library `datasets` opens both, offline and without running code of the dataset. Saved folders
are mapped into memory. Two columns of parquet files are converted once, into arrow files in the
library's cache: ~/.cache/huggingface/datasets, or the folder in HF_HOME or HF_DATASETS_CACHE.
Images stay undecoded until `decode` reads them.

Needs the extra `hf`.
"""

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from fullstride.data.readers.decode import SUFFIXES, UnreadableImage
from fullstride.data.readers.listing import (
    SPLITS,
    Listing,
    Sample,
    check_classes,
    quote_names,
    sorted_classes,
)
from fullstride.io.console import count_of, reason
from fullstride.io.records import read_json
from fullstride.io.writing import open_regular

# ---- the files of each split


STATE = "state.json"  # of a split that `save_to_disk` wrote


def saved_splits(folder: Path) -> dict[str, list[Path]]:
    if (folder / STATE).is_file():
        return {"train": [folder]}
    return {path.name: [path] for path in sorted(folder.iterdir()) if (path / STATE).is_file()}


def by_purpose(folder: Path, splits: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    """The splits "train", "val" and "test", in that order."""
    if len(splits) == 1:  # whatever its name
        return {"train": next(iter(splits.values()))}
    names: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for name in splits:
        if purpose := SPLITS.get(name.lower()):
            names[purpose].append(name)
    for each in names.values():
        if len(each) > 1:
            raise ValueError(
                f"{str(folder)!r} has the splits {quote_names(each)} for one purpose: keep one"
            )
    if not names["train"]:
        raise ValueError(
            f"{str(folder)!r} has the splits {quote_names(list(splits))}, none to train on: rename "
            "one to train"
        )
    return {purpose: splits[each[0]] for purpose, each in names.items() if each}


def parquet_splits(folder: Path) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    homes: set[Path] = set()
    for parent, names in files_below(folder):
        for path in (parent / name for name in names if name.lower().endswith(".parquet")):
            sharded = re.fullmatch(r"(.+)-\d{5}-of-\d{5}(-.*)?", path.stem)
            words = [sharded[1]] if sharded else re.split(r"[-_.]", path.stem)
            words = [word for word in words if sharded or word.lower() in SPLITS]
            inside = not words and parent != folder and parent.name.lower() in SPLITS
            splits.setdefault(parent.name if inside else (*words, "")[0], []).append(path)
            homes.add(parent.parent if inside else parent)
    if len(homes) > 1:
        both = quote_names(sorted(str(home.relative_to(folder)) for home in homes))
        raise ValueError(
            f"{str(folder)!r} has parquet files in several folders, {both}: give one of these"
        )
    if not splits:
        raise ValueError(
            f"{str(folder)!r} is no folder of a Hugging Face dataset: it has neither {STATE} nor "
            "parquet files"
        )
    if "" in splits and len(splits) > 1:
        raise ValueError(
            f"{str(splits[''][0])!r} does not say train, val or test as other files do: rename it"
        )
    return splits


def files_below(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder and the sorted names of its files, without hidden files and folders."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(parent), sorted(name for name in files if not name.startswith("."))


# ---- images in arrow files, as undecoded rows of `datasets`


END = b"\xff\xff\xff\xff\0\0\0\0"  # of an arrow stream; `datasets` reads a shortened file silently


@dataclass(frozen=True)
class Rows:
    """Maps an image's name to its bytes, or to its file below `folder`.

    Each process maps the files into memory when it reads its first row.
    """

    folder: Path
    files: tuple[str, ...]
    column: str
    numbers: Mapping[str, int] = field(repr=False)  # name -> row, counted through all files
    _open: list[Any] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, name: str) -> bytes | Path:
        try:
            if not self._open:
                self._open.append(open_arrow(self.files, self.column))
            cell = self._open[0][self.numbers[name]][self.column]
            data, path = cell, None
            if isinstance(cell, dict):
                data, path = cell.get("bytes"), cell.get("path")
            if isinstance(data, bytes):
                return data
            if not path:
                raise ValueError("its cell is empty")
            file = (self.folder / path).resolve()
            if not file.is_relative_to(self.folder):
                raise ValueError("its cell is a path to a file outside of the dataset's folder")
            if not file.is_file():
                raise ValueError("its cell is a path to no file")
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a circular link
            raise UnreadableImage(name, reason(error)) from error
        return file

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.folder, self.files, self.column, self.numbers)


def open_arrow(files: tuple[str, ...], *columns: str) -> Any:
    """A `datasets.Dataset` of arrow files, mapped into memory; images stay undecoded."""
    from datasets import Dataset, Image, concatenate_datasets

    for file in files:
        with open_regular(Path(file)) as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - len(END)))
            if opened.read() != END:
                raise ValueError(f"{file} is cut short")
    dataset = concatenate_datasets([Dataset.from_file(file) for file in files])
    dataset = dataset.select_columns(list(columns))
    for name, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
    return dataset


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Run without progress bars, log lines or network; errors become ValueError in one line."""
    import datasets
    from datasets import config
    from datasets.utils import logging as log

    bars, level = not datasets.are_progress_bars_disabled(), log.get_verbosity()
    offline = config.HF_HUB_OFFLINE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            datasets.disable_progress_bars()
            log.set_verbosity(logging.CRITICAL)  # errors are reported once, as ValueError
            config.HF_HUB_OFFLINE = True
            yield
    except Exception as error:  # a dozen kinds on a broken file, some of which wrap the first
        first: BaseException = error
        while first.__cause__:
            first = first.__cause__
        raise ValueError(
            f"cannot read {str(path)!r} ({reason(first)}): copy or save it again"
        ) from error
    finally:
        config.HF_HUB_OFFLINE = offline
        log.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def sizes_and_paths(column: Any) -> list[tuple[int, str | None]]:
    """The number of bytes, -1 if missing, and the path of each cell of an arrow column."""
    import pyarrow as pa
    from pyarrow import compute as functions

    compute: Any = functions  # generated on import, which type checkers cannot see
    data, paths = column, [None] * len(column)
    if pa.types.is_struct(column.type):
        data = compute.struct_field(column, "bytes")
        if column.type.get_field_index("path") >= 0:
            paths = compute.struct_field(column, "path").to_pylist()
    sizes = compute.binary_length(data).to_pylist()
    return [(-1 if size is None else size, path) for size, path in zip(sizes, paths, strict=True)]


IMAGES, LABELS = ("image", "img"), ("label", "labels", "fine_label", "target", "class")
INFO, SPLITS_FILE = "dataset_info.json", "dataset_dict.json"


class Columns(NamedTuple):
    image: str
    label: str
    names: tuple[str, ...] | None  # of the classes, where the column has them
    all: tuple[str, ...]  # columns of the data
    group: str | None = None  # the column of groups, if there is one

    @property
    def to_read(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, (self.image, self.label, self.group))))


def choice_in(where: str) -> tuple[str, dict[str, str]]:
    """Split FOLDER?image=NAME&label=NAME into folder and columns, unless it is an existing path."""
    folder, _, query = where.rpartition("?")
    if not folder or "=" not in query or Path(where).exists():
        return where, {}
    try:
        choice = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True))
    except ValueError:
        choice = {}
    if not choice.keys() <= {"image", "label"} or not all(choice.values()) or not choice:
        raise ValueError(
            f"{where!r} does not choose columns: write {folder}?image=NAME&label=NAME, or one of "
            "the two"
        )
    return folder, choice


def holds_dataset(folder: Path) -> bool:
    """Whether a folder was saved by `save_to_disk`, or has parquet files.

    A folder with images in two or more of its folders is a folder of images.
    """
    if (folder / SPLITS_FILE).is_file() or (
        (folder / STATE).is_file() and (folder / INFO).is_file()
    ):
        return True
    parquet, pictured = False, 0
    for _, files in files_below(folder):
        parquet = parquet or any(name.lower().endswith(".parquet") for name in files)
        pictured += any(name.lower().endswith(SUFFIXES) for name in files)
        if pictured > 1:
            return False
    return parquet


def read_dataset(folder: Path, choice: Mapping[str, str], group: str = "") -> Listing:
    """The images of a dataset. The column `group`, if there is one, has the groups.

    The name of a split is the subfolder's name, or for parquet files the part before the number
    (`train-00000-of-00002.parquet`), a word of the file's name, or the folder's. A single split is
    for training; splits other than train, val and test are ignored.

    The image column has the feature `Image`, else the name image or img; the label column has the
    feature `ClassLabel`, else a name in LABELS. If several match, `choice` names the "image" or
    "label" column. An image's name is the path in its cell if all cells have different paths, else
    train/00000123.
    """
    try:
        # a folder named "datasets" can be imported too, but has no Dataset
        from datasets import Dataset as _  # noqa: F401
    except ImportError:
        raise ValueError(
            f"{str(folder)!r} needs the package datasets: pip install 'fullstride[hf]'"
        ) from None
    saved = saved_splits(folder)
    columns, files = (
        _open_saved(folder, saved, choice, group) if saved else _open_parquet(folder, choice, group)
    )
    values: dict[str, list[Any]] = {}
    groups: list[str] = []
    cells: dict[str, list[tuple[int, str | None]]] = {}
    for split, parts in files.items():
        with library_errors(folder):
            table = open_arrow(tuple(parts), *columns.to_read).data
            values[split] = table.column(columns.label).to_pylist()
            cells[split] = sizes_and_paths(table.column(columns.image))
            if columns.group:
                column = table.column(columns.group).to_pylist()
                groups += ["" if value is None else str(value) for value in column]
        if not cells[split]:
            raise _no_rows(folder, split)
    classes, labels = _labels(folder, columns, values)
    paths = [path for each in cells.values() for _, path in each]
    distinct = all(paths) and len(set(paths)) == len(paths)
    samples = {
        split: [
            Sample(path if distinct and path else f"{split}/{row:08}", label, size)
            for row, ((size, path), label) in enumerate(zip(each, labels[split], strict=True))
        ]
        for split, each in cells.items()
    }
    names = [sample.name for each in samples.values() for sample in each]
    rows = {name: row for row, name in enumerate(names)}
    arrow_files = tuple(file for parts in files.values() for file in parts)
    reader = Rows(folder, arrow_files, columns.image, rows)
    group_of = dict(zip(rows, groups, strict=True)) if columns.group else None
    listing = Listing(classes, samples, reader, columns=columns.all, groups=group_of)
    return listing.at(folder, f"?{urlencode(choice)}" if choice else "")


def _labels(
    folder: Path, columns: Columns, values: Mapping[str, list[Any]]
) -> tuple[tuple[str, ...], dict[str, list[int]]]:
    """Class names, and the class index of each row."""
    if columns.names:
        classes, keys = columns.names, {number: number for number in range(len(columns.names))}
    else:
        values = {s: ["" if v is None else str(v) for v in each] for s, each in values.items()}
        classes = sorted_classes(filter(None, values["train"]))
        keys = {name: number for number, name in enumerate(classes)}
    for split, each in values.items():
        for number, value in enumerate(each):
            if value in keys:
                continue
            row = f"row {number} (from 0) of the split {split!r} in {str(folder)!r}"
            if value in (None, "") or (columns.names and value == -1):  # as `datasets` has it
                raise ValueError(
                    f"{row} has no {columns.label!r}: fill it in, or remove the row or the split"
                )
            raise ValueError(
                f"{row} has the {columns.label!r} {value!r}, but the training rows' classes are "
                f"{quote_names(list(classes))}: change or remove it"
            )
    present = [classes[keys[label]] for label in {*values["train"]}]
    check_classes(repr(str(folder)), present, "add images of a second one to train on")
    return classes, {split: [keys[value] for value in each] for split, each in values.items()}


# ---- which columns


def _columns(folder: Path, features: Any, choice: Mapping[str, str], group: str) -> Columns:
    """The columns of images, labels and groups. `features` is `datasets.Features`."""
    import datasets
    import pyarrow as pa

    kinds = {name: features.arrow_schema.field(name).type for name in features}
    image_columns, label_columns = (
        [name for name, feature in features.items() if isinstance(feature, kind)]
        for kind in (datasets.Image, datasets.ClassLabel)
    )

    def holds_bytes(kind: Any) -> bool:
        if pa.types.is_struct(kind):
            index = kind.get_field_index("bytes")
            return index >= 0 and holds_bytes(kind.field(index).type)
        return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)

    def names_class(kind: Any) -> bool:
        types = pa.types
        tests = types.is_integer, types.is_string, types.is_large_string, types.is_boolean
        return any(fits(kind) for fits in tests)

    def pick(
        purpose: str, typed: list[str], words: tuple[str, ...], fits: Callable[[Any], bool]
    ) -> str:
        possible = [name for name, kind in kinds.items() if fits(kind)]
        matches = typed or [name for name in words if name in possible]
        if (choice_name := choice.get(purpose)) is not None:
            matches = [name for name in possible if name == choice_name]
        if len(matches) == 1:
            return matches[0]
        one = (matches or possible or [""])[0]
        hint = f"give a dataset with {words[0]}s"
        if one:
            hint = f"choose one, as {folder}?{urlencode({purpose: one})}"
        if matches:
            raise ValueError(
                f"{str(folder)!r} has several {purpose} columns, {quote_names(matches)}: {hint}"
            )
        none = "no" if choice_name is None else f"no {choice_name!r} as"
        raise ValueError(
            f"{str(folder)!r} has {none} {purpose} column among {quote_names(list(kinds))}: {hint}"
        )

    label = pick("label", label_columns, LABELS, names_class)
    names = tuple(features[label].names) if label in label_columns else None
    image = pick("image", image_columns, IMAGES, holds_bytes)
    has_groups = group in kinds and names_class(kinds[group])
    return Columns(image, label, names, tuple(kinds), group if has_groups else None)


# ---- through `datasets`


def _open_saved(
    folder: Path, splits: Mapping[str, list[Path]], choice: Mapping[str, str], group: str
) -> tuple[Columns, dict[str, list[str]]]:
    """The columns, and the arrow files of each split."""
    from datasets import Dataset

    columns, train, files = None, {}, {}
    for split, (path,) in by_purpose(folder, splits).items():
        with library_errors(path):
            names = [file["filename"] for file in read_json(path / STATE)["_data_files"]]
        if not names:
            raise _no_rows(folder, split)
        if any(Path(name).name != name for name in names):
            raise ValueError(
                f"{str(path / STATE)!r} names files outside of its folder: save the dataset again"
            )
        with library_errors(path):
            features = Dataset.load_from_disk(_checked_path(path), keep_in_memory=False).features
        if columns is None:
            columns, train = _columns(folder, features, choice, group), features
        elif any(features.get(name) != train[name] for name in columns.to_read):
            raise ValueError(
                f"the split {split!r} in {str(folder)!r} has other columns or classes than train: "
                "save both alike"
            )
        files[split] = [str(path / name) for name in names]
    assert columns
    return columns, files


def _open_parquet(
    folder: Path, choice: Mapping[str, str], group: str
) -> tuple[Columns, dict[str, list[str]]]:
    """The columns, and the arrow files of each split in the library's cache."""
    from datasets import DatasetDict, Features
    from datasets.data_files import DataFilesDict, DataFilesList
    from pyarrow import parquet

    splits = by_purpose(folder, parquet_splits(folder))
    for split, paths in splits.items():
        rows = 0
        for path in paths:
            with library_errors(path):
                count = parquet.read_metadata(path).num_rows
                if count > (size := path.stat().st_size):  # an image takes a byte or more
                    raise ValueError(
                        f"it has {count_of(size, 'byte')} for {count_of(count, 'row')}"
                    )
                rows += count
        if not rows:
            raise _no_rows(folder, split)
    with library_errors(folder):
        features = Features.from_arrow_schema(parquet.read_schema(splits["train"][0]))
    columns = _columns(folder, features, choice, group)  # before the conversion, which may be slow
    with library_errors(folder):
        lists = {}
        for split, paths in splits.items():
            versions: list[Any] = [
                (str(path.stat().st_mtime_ns), str(path.stat().st_size)) for path in paths
            ]
            # the library takes names in any other class of list for patterns
            lists[split] = DataFilesList([_checked_path(path) for path in paths], versions)
        files: Any = DataFilesDict(lists)
        converted = DatasetDict.from_parquet(files, columns=list(columns.to_read))
        return columns, {
            split: [file["filename"] for file in converted[split].cache_files] for split in splits
        }


def _checked_path(path: Path) -> str:
    if "::" in str(path):
        raise ValueError("two colons in a path mean a chain of file systems: rename it")
    return str(path)


def _no_rows(folder: Path, split: str) -> ValueError:
    return ValueError(f"the split {split!r} in {str(folder)!r} has no rows: fill or remove it")
