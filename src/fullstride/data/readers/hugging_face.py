"""Which images does a Hugging Face dataset hold? Folders that `save_to_disk` wrote, or of parquet files as on the hub.

Both are opened by their library `datasets`, offline and without code of the data's own. Saved folders are mapped into
memory as they are. Parquet is converted once, only the two columns in use, into arrow files in the library's cache:
~/.cache/huggingface/datasets, or where HF_HOME or HF_DATASETS_CACHE say. Pictures stay bytes until `decode` reads them.

Needs the extra `hf`.
"""

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from fullstride.data.readers.arrow import Rows, open_arrow, reason, sizes_and_paths
from fullstride.data.readers.csv_table import SPLITS
from fullstride.data.readers.folder import SUFFIXES
from fullstride.data.readers.splits import Parts, Sample, divide, in_order, listed

IMAGES, LABELS = ("image", "img"), ("label", "labels", "fine_label", "target", "class")
STATE, INFO, SPLITS_FILE = "state.json", "dataset_info.json", "dataset_dict.json"


class Columns(NamedTuple):
    image: str
    label: str
    names: tuple[str, ...] | None  # of the classes, where the column knows them


def choice_in(where: str) -> tuple[str, dict[str, str]]:
    """The folder and the columns in FOLDER?image=NAME&label=NAME; a path that is there means itself."""
    folder, _, query = where.rpartition("?")
    if not folder or "=" not in query or Path(where).exists():
        return where, {}
    try:
        choice = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True))
    except ValueError:
        choice = {}
    if not choice.keys() <= {"image", "label"} or not all(choice.values()) or not choice:
        raise ValueError(
            f"{where!r} does not choose columns: write {folder}?image=NAME&label=NAME, or one of the two"
        )
    return folder, choice


def holds_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote it, or it has parquet files and not two folders or more of images as well."""
    if (folder / SPLITS_FILE).is_file() or (
        (folder / STATE).is_file() and (folder / INFO).is_file()
    ):
        return True
    parquet, pictured = False, 0
    for _, files in _below(folder):
        parquet = parquet or any(name.lower().endswith(".parquet") for name in files)
        pictured += any(name.lower().endswith(SUFFIXES) for name in files)
        if pictured > 1:
            return False
    return parquet


def read_dataset(
    folder: Path, choice: Mapping[str, str], minival: float | None
) -> tuple[tuple[str, ...], Parts, Rows]:
    """Class names, the samples of each part, and their bytes.

    Splits are told by their names: of saved splits the subfolder's, of parquet files what stands before their number
    (`train-00000-of-00002.parquet`), a word of the file's name or the folder's. A split that is alone is for training,
    others than train, val and test are left out. What is missing is cut from the training rows, as `open_data` says.

    The image is the column of that feature, else one named image or img; the label is the `ClassLabel`, else a column
    named as in LABELS. `choice` names "image" or "label" where several fit. An image's name is the path in its cell
    if all images have one of their own, else train/00000123.
    """
    try:
        from datasets import Dataset as _  # noqa: F401  a folder named "datasets" imports too, but has none
    except ImportError:
        raise ValueError(
            f"{str(folder)!r} needs the package datasets: pip install 'fullstride[hf]'"
        ) from None
    saved = _saved_splits(folder)
    columns, files = _open_saved(folder, saved, choice) if saved else _open_parquet(folder, choice)
    values: dict[str, list[Any]] = {}
    cells: dict[str, list[tuple[int, str | None]]] = {}
    for split, group in files.items():
        with _through_library(folder):
            table = open_arrow(tuple(group), columns.image, columns.label).data
            values[split] = table.column(columns.label).to_pylist()
            cells[split] = sizes_and_paths(table.column(columns.image))
        if not cells[split]:
            raise _no_rows(folder, split)
    classes, labels = _labels(folder, columns, values)
    paths = [path for each in cells.values() for _, path in each]
    named = all(paths) and len(set(paths)) == len(paths)
    samples = {
        split: [
            Sample(path if named and path else f"{split}/{row:08}", label, size)
            for row, ((size, path), label) in enumerate(zip(each, labels[split], strict=True))
        ]
        for split, each in cells.items()
    }
    rows = {
        sample.name: row for row, sample in enumerate(s for part in samples.values() for s in part)
    }
    reader = Rows(
        folder, tuple(file for group in files.values() for file in group), columns.image, rows
    )
    return classes, divide(samples.pop("train"), samples, minival), reader


def _labels(
    folder: Path, columns: Columns, values: Mapping[str, list[Any]]
) -> tuple[tuple[str, ...], dict[str, list[int]]]:
    """Class names, and the number of each row's class."""

    def row(split: str, number: int) -> str:
        return f"row {number} (from 0) of the split {split!r} in {str(folder)!r}"

    for split, each in values.items():
        for number, value in enumerate(each):
            if value in (None, "") or (
                columns.names and value == -1
            ):  # -1 is their word for unlabelled
                raise ValueError(
                    f"{row(split, number)} has no {columns.label!r}: fill it in, or remove the row or the split"
                )
    if columns.names:
        classes, numbers = columns.names, {number: number for number in range(len(columns.names))}
    else:
        classes = in_order(map(str, values["train"]))
        numbers = {name: number for number, name in enumerate(classes)}
        values = {split: list(map(str, each)) for split, each in values.items()}
    for split, each in values.items():
        for number, value in enumerate(each):
            if value not in numbers:
                raise ValueError(
                    f"{row(split, number)} has the {columns.label!r} {value!r}, but the training rows' classes are "
                    f"{listed(list(classes))}: change or remove it"
                )
    if len(seen := set(values["train"])) == 1:
        name = classes[numbers[seen.pop()]]
        raise ValueError(
            f"{str(folder)!r} has one class only, {name!r}: add images of a second one to train on"
        )
    return classes, {split: [numbers[value] for value in each] for split, each in values.items()}


# ---- which columns


def _columns(folder: Path, features: Any, choice: Mapping[str, str]) -> Columns:
    """`features`: what the library says of each column."""
    import datasets
    import pyarrow as pa

    kinds = {name: features.arrow_schema.field(name).type for name in features}
    pictures = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    classed = [
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
        fitting = [name for name, kind in kinds.items() if fits(kind)]
        found = typed or [name for name in words if name in fitting]
        if (wanted := choice.get(purpose)) is not None:
            found = [name for name in fitting if name == wanted]
        if len(found) == 1:
            return found[0]
        one = (found or fitting or [""])[0]
        how = (
            f"choose one, as {folder}?{urlencode({purpose: one})}"
            if one
            else f"give a dataset with {words[0]}s"
        )
        if found:
            raise ValueError(
                f"{str(folder)!r} has several {purpose} columns, {listed(found)}: {how}"
            )
        sought = "no" if wanted is None else f"no {wanted!r} as"
        raise ValueError(
            f"{str(folder)!r} has {sought} {purpose} column among {listed(list(kinds))}: {how}"
        )

    label = pick("label", classed, LABELS, names_class)
    names = tuple(features[label].names) if label in classed else None
    return Columns(pick("image", pictures, IMAGES, holds_bytes), label, names)


# ---- which splits


def _saved_splits(folder: Path) -> dict[str, list[Path]]:
    if (folder / STATE).is_file():
        return {"train": [folder]}
    return {path.name: [path] for path in sorted(folder.iterdir()) if (path / STATE).is_file()}


def _by_purpose(folder: Path, splits: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    """Those that are "train", "val" and "test", in that order."""
    if len(splits) == 1:  # its name says nothing where there is no other
        return {"train": next(iter(splits.values()))}
    names: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for name in splits:
        if purpose := SPLITS.get(name.lower()):
            names[purpose].append(name)
    for known in names.values():
        if len(known) > 1:
            raise ValueError(
                f"{str(folder)!r} has the splits {listed(known)} for one purpose: keep one of them"
            )
    if not names["train"]:
        raise ValueError(
            f"{str(folder)!r} has the splits {listed(list(splits))}, none to train on: rename one to train"
        )
    return {purpose: splits[known[0]] for purpose, known in names.items() if known}


def _parquet_splits(folder: Path) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    homes: set[Path] = set()
    for parent, names in _below(folder):
        for path in (parent / name for name in names if name.lower().endswith(".parquet")):
            sharded = re.fullmatch(r"(.+)-\d{5}-of-\d{5}(-.*)?", path.stem)
            words = (
                [sharded[1]]
                if sharded
                else [w for w in re.split(r"[-_.]", path.stem) if w.lower() in SPLITS]
            )
            inside = not words and parent != folder and parent.name.lower() in SPLITS
            splits.setdefault(parent.name if inside else (*words, "")[0], []).append(path)
            homes.add(parent.parent if inside else parent)
    if len(homes) > 1:
        both = listed(sorted(str(home.relative_to(folder)) for home in homes))
        raise ValueError(
            f"{str(folder)!r} has parquet files in several folders, {both}: give one of these"
        )
    if not splits:
        raise ValueError(
            f"{str(folder)!r} is no folder of a Hugging Face dataset: it has neither {STATE} nor parquet files"
        )
    if "" in splits and len(splits) > 1:
        raise ValueError(
            f"{str(splits[''][0])!r} does not say train, val or test as other files do: rename it"
        )
    return splits


def _below(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder and the names of its files, sorted; nothing hidden."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(parent), sorted(name for name in files if not name.startswith("."))


# ---- through their library


def _open_saved(
    folder: Path, splits: Mapping[str, list[Path]], choice: Mapping[str, str]
) -> tuple[Columns, dict[str, list[str]]]:
    """The columns, and the arrow files of each split."""
    from datasets import Dataset

    columns, train, files = None, {}, {}
    for split, (path,) in _by_purpose(folder, splits).items():
        with _through_library(path):
            names = [
                file["filename"] for file in json.loads((path / STATE).read_bytes())["_data_files"]
            ]
        if not names:
            raise _no_rows(folder, split)
        if any(Path(name).name != name for name in names):
            raise ValueError(
                f"{str(path / STATE)!r} names files outside of its folder: save the dataset again"
            )
        with _through_library(path):
            features = Dataset.load_from_disk(_plain(path), keep_in_memory=False).features
        if columns is None:
            columns, train = _columns(folder, features, choice), features
        elif any(features.get(name) != train[name] for name in (columns.image, columns.label)):
            raise ValueError(
                f"the split {split!r} in {str(folder)!r} has other columns or classes than train: save both alike"
            )
        files[split] = [str(path / name) for name in names]
    assert columns
    return columns, files


def _open_parquet(folder: Path, choice: Mapping[str, str]) -> tuple[Columns, dict[str, list[str]]]:
    """The columns, and the arrow files that the library made of each split."""
    from datasets import DatasetDict, Features
    from datasets.data_files import DataFilesDict, DataFilesList
    from pyarrow import parquet

    splits = _by_purpose(folder, _parquet_splits(folder))
    for split, paths in splits.items():
        rows = 0
        for path in paths:
            with _through_library(path):
                rows += parquet.read_metadata(path).num_rows
        if not rows:
            raise _no_rows(folder, split)
    with _through_library(folder):
        features = Features.from_arrow_schema(parquet.read_schema(splits["train"][0]))
    columns = _columns(folder, features, choice)  # before the conversion, which may take long
    with _through_library(folder):
        lists = {}
        for (
            split,
            paths,
        ) in splits.items():  # lists of the library's own, because others would be read as patterns
            marks: list[Any] = [
                (str(path.stat().st_mtime_ns), str(path.stat().st_size)) for path in paths
            ]
            lists[split] = DataFilesList([_plain(path) for path in paths], marks)
        files: Any = DataFilesDict(lists)
        converted = DatasetDict.from_parquet(files, columns=[columns.image, columns.label])
        return columns, {
            split: [file["filename"] for file in converted[split].cache_files] for split in splits
        }


def _plain(path: Path) -> str:
    if "::" in str(path):
        raise ValueError("two colons in a path mean a chain of file systems: rename it")
    return str(path)


@contextmanager
def _through_library(path: Path) -> Iterator[None]:
    """Without the library's bars and lines, and without the network; what goes wrong becomes one line."""
    try:
        with _quiet_and_offline():
            yield
    except (
        Exception
    ) as error:  # they raise a dozen kinds on a broken file, some of which wrap the first
        first: BaseException = error
        while first.__cause__:
            first = first.__cause__
        raise ValueError(
            f"cannot read {str(path)!r} ({reason(first)}): copy or save it again"
        ) from error


@contextmanager
def _quiet_and_offline() -> Iterator[None]:
    import datasets
    from datasets import config
    from datasets.utils import logging as log

    bars, level = not datasets.are_progress_bars_disabled(), log.get_verbosity()
    offline = config.HF_HUB_OFFLINE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets.disable_progress_bars()
        log.set_verbosity(logging.CRITICAL)  # an error is told once, by us
        config.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            config.HF_HUB_OFFLINE = offline
            log.set_verbosity(level)
            if bars:
                datasets.enable_progress_bars()


def _no_rows(folder: Path, split: str) -> ValueError:
    return ValueError(f"the split {split!r} in {str(folder)!r} has no rows: fill or remove it")
