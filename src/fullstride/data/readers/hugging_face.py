"""Which images are in a Hugging Face dataset? A folder of `save_to_disk`, or of parquet files.

Both are opened by the library `datasets`, offline and without running code of the dataset. Saved
folders are mapped into memory. Two columns of parquet files are converted once, into arrow files in
the library's cache: ~/.cache/huggingface/datasets, or the folder in HF_HOME or HF_DATASETS_CACHE.
Images stay undecoded until `decode` reads them.

Needs the extra `hf`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from fullstride.data.readers.arrow import Rows, library_errors, open_arrow, sizes_and_paths
from fullstride.data.readers.decode import SUFFIXES
from fullstride.data.readers.hugging_face_splits import (
    STATE,
    by_purpose,
    files_below,
    parquet_splits,
    saved_splits,
)
from fullstride.data.readers.listing import Listing, Sample, quote_names, sorted_classes
from fullstride.strict_json import read_json

IMAGES, LABELS = ("image", "img"), ("label", "labels", "fine_label", "target", "class")
INFO, SPLITS_FILE = "dataset_info.json", "dataset_dict.json"


class Columns(NamedTuple):
    image: str
    label: str
    names: tuple[str, ...] | None  # of the classes, where the column has them
    all: tuple[str, ...]  # that the data have
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

    With images in two or more of its folders it is a folder of images.
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
    """The images of a dataset. The values of the column `group` are the groups, if there is one.

    The name of a split is that of the subfolder, or for parquet files the part before the number
    (`train-00000-of-00002.parquet`), a word of the file's name, or the folder's. A single split is
    for training; splits other than train, val and test are ignored.

    The image column has the feature `Image`, else the name image or img; the label column has the
    feature `ClassLabel`, else a name in LABELS. Where several match, `choice` names the "image" or
    "label" column. An image's name is the path in its cell if all cells have different ones, else
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
    rows = {
        sample.name: row
        for row, sample in enumerate(s for split in samples.values() for s in split)
    }
    reader = Rows(
        folder, tuple(file for parts in files.values() for file in parts), columns.image, rows
    )
    group_of = dict(zip(rows, groups, strict=True)) if columns.group else None
    return Listing(classes, samples, reader, columns=columns.all, groups=group_of)


def _labels(
    folder: Path, columns: Columns, values: Mapping[str, list[Any]]
) -> tuple[tuple[str, ...], dict[str, list[int]]]:
    """Class names, and the class index of each row."""

    def row(split: str, number: int) -> str:
        return f"row {number} (from 0) of the split {split!r} in {str(folder)!r}"

    for split, each in values.items():
        for number, value in enumerate(each):
            unlabelled = columns.names and value == -1  # as `datasets` has it
            if value in (None, "") or unlabelled:
                raise ValueError(
                    f"{row(split, number)} has no {columns.label!r}: fill it in, or remove the "
                    "row or the split"
                )
    if columns.names:
        classes, numbers = columns.names, {number: number for number in range(len(columns.names))}
    else:
        classes = sorted_classes(map(str, values["train"]))
        numbers = {name: number for number, name in enumerate(classes)}
        values = {split: list(map(str, each)) for split, each in values.items()}
    for split, each in values.items():
        for number, value in enumerate(each):
            if value not in numbers:
                raise ValueError(
                    f"{row(split, number)} has the {columns.label!r} {value!r}, but the "
                    f"training rows' classes are {quote_names(list(classes))}: change or remove it"
                )
    if len(labels := set(values["train"])) == 1:
        name = classes[numbers[labels.pop()]]
        raise ValueError(
            f"{str(folder)!r} has one class only, {name!r}: add images of a second one to train on"
        )
    return classes, {split: [numbers[value] for value in each] for split, each in values.items()}


# ---- which columns


def _columns(folder: Path, features: Any, choice: Mapping[str, str], group: str) -> Columns:
    """The columns of images, labels and groups. `features` are those of `datasets`."""
    import datasets
    import pyarrow as pa

    kinds = {name: features.arrow_schema.field(name).type for name in features}
    image_columns = [
        name for name, feature in features.items() if isinstance(feature, datasets.Image)
    ]
    label_columns = [
        name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)
    ]

    def holds_bytes(kind: Any) -> bool:
        if pa.types.is_struct(kind):
            index = kind.get_field_index("bytes")
            return index >= 0 and holds_bytes(kind.field(index).type)
        return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)

    def names_class(kind: Any) -> bool:
        types = pa.types
        return any(
            fits(kind)
            for fits in (types.is_integer, types.is_string, types.is_large_string, types.is_boolean)
        )

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
        hint = (
            f"choose one, as {folder}?{urlencode({purpose: one})}"
            if one
            else f"give a dataset with {words[0]}s"
        )
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
    """The columns, and the arrow files in the library's cache of each split."""
    from datasets import DatasetDict, Features
    from datasets.data_files import DataFilesDict, DataFilesList
    from pyarrow import parquet

    splits = by_purpose(folder, parquet_splits(folder))
    for split, paths in splits.items():
        rows = 0
        for path in paths:
            with library_errors(path):
                rows += parquet.read_metadata(path).num_rows
        if not rows:
            raise _no_rows(folder, split)
    with library_errors(folder):
        features = Features.from_arrow_schema(parquet.read_schema(splits["train"][0]))
    columns = _columns(
        folder, features, choice, group
    )  # before the conversion, which may take long
    with library_errors(folder):
        lists = {}
        for split, paths in splits.items():
            versions: list[Any] = [
                (str(path.stat().st_mtime_ns), str(path.stat().st_size)) for path in paths
            ]
            # the library's own class of lists: the names in others are patterns
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
