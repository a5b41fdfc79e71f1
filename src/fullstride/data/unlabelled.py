"""Opens images whose labels are not needed: a folder, a list, shards, IDX files or the digits."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from fullstride.data.dataset import DIGITS, Decoded, Images, SplitRule, open_data
from fullstride.data.readers.csv_table import (
    COLUMNS,
    check_columns,
    find_header,
    read_rows,
    table_text,
)
from fullstride.data.readers.csv_table import SUFFIXES as TABLES
from fullstride.data.readers.decode import SUFFIXES
from fullstride.data.readers.folder import count_unused, find_files, find_folder, first_reason
from fullstride.data.readers.hugging_face import choice_in, holds_dataset
from fullstride.data.readers.idx import IdxReader, idx_files
from fullstride.data.readers.listing import SPLITS, Below, Sample, read_text
from fullstride.data.readers.shards import holds_shards, list_shards

LISTS = (".txt", *TABLES)
UNKNOWN = -1  # bytes of an image


@dataclass(frozen=True)
class Unlabelled:
    """Images whose labels are not needed, in a fixed order."""

    where: str  # opens the same images from any working directory; "" for several places
    images: Images  # targets are the names of classes, "" where the data have none
    fingerprint: str  # of the names and the sizes of files
    ignored: Mapping[str, int] = field(default_factory=dict)  # unused files, by reason

    @property
    def has_labels(self) -> bool:
        return all(self.images.targets)


def open_unlabelled(where: str) -> Unlabelled:
    """The images at `where`, of all splits, with or without labels.

    `where` is a folder with images at any depth; a text file with a path in each line; a .csv or
    .tsv file with the column path and perhaps label; a folder or a pattern of tar shards; a folder
    of IDX files; a dataset of Hugging Face; an image; or "digits".

    Paths in a list are relative to its folder. The class names of a folder are its subfolders, or
    the subfolders of train/, val/ and test/ in it, if all images are in one. An unreadable image is
    listed like the others. Raises ValueError, in one line, if there are no images.
    """
    path = Path(where)
    if where == DIGITS or choice_in(where)[1]:
        return _of_data(where)
    is_folder = os.path.isdir(path)  # noqa: PTH112  a pattern may be too long for `Path.is_dir`
    if path.suffix.lower() == ".tar" and not is_folder:
        return _of_shards(find_folder(str(path.parent)), path.name)
    if path.suffix.lower() in LISTS and not is_folder:
        return _of_list(path)
    if path.suffix.lower() in SUFFIXES and os.path.isfile(path):  # noqa: PTH113
        return of_files([path])
    root = find_folder(where)
    if files := idx_files(root, "images"):
        return _of_idx(root, IdxReader(files))
    if holds_shards(root):
        return _of_shards(root, "")
    return _of_data(where) if holds_dataset(root) else _of_folder(root)


def of_files(paths: Sequence[Path], ignored: Mapping[str, int] | None = None) -> Unlabelled:
    """The images in these files, named by their absolute paths."""
    names = dict.fromkeys(path.absolute().as_posix() for path in paths)
    where = next(iter(names)) if len(names) == 1 else ""
    entries = [Sample(name, "", UNKNOWN) for name in names]
    return _unlabelled(where, entries, Below(Path("/")), ignored=ignored)


def _of_folder(root: Path) -> Unlabelled:
    files = [Sample(name, _folder_class(name), size) for name, size in find_files(root)]
    ignored = count_unused(root, {file.name for file in files})
    if not files:
        raise ValueError(
            f"no images below {str(root)!r}{first_reason(ignored)}: give a folder of "
            f"{' '.join(SUFFIXES)}"
        )
    return _unlabelled(str(root), files, Below(root), ignored=ignored)


def _folder_class(name: str) -> str:
    """The first folder in a name that is not a split; "" if there is none."""
    folders = name.split("/")[:-1]
    if folders and folders[0].lower() in SPLITS:
        del folders[0]
    return folders[0] if folders else ""


def _of_shards(folder: Path, pattern: str) -> Unlabelled:
    reader = list_shards(folder, pattern)
    labels = ((name, member.label) for name, (_, member) in reader.members.items())
    entries = (
        Sample(name, label if isinstance(label, str) else ";".join(label), UNKNOWN)
        for name, label in labels
    )
    return _unlabelled(str(folder / pattern), entries, reader)


def _of_idx(folder: Path, reader: IdxReader) -> Unlabelled:
    entries = [
        Sample(f"{split}/{number:05}", "", UNKNOWN)
        for split in sorted(reader.files, reverse=True)  # train, test
        for number in range(len(reader.of_split(split)))
    ]
    return _unlabelled(str(folder), entries, read=reader.picture)


def _of_data(where: str) -> Unlabelled:
    """All images of data that have labels."""
    if where == DIGITS:
        data = open_data(where)
        parts = (data.train, data.val, data.test)
    else:
        data = open_data(where, SplitRule(val=0, test=0, keep_duplicates=True))
        parts = (data.train,)
    entries = (
        Sample(name, data.classes[target], UNKNOWN)
        for part in parts
        for name, target in zip(part.names, part.targets, strict=True)
    )
    return _unlabelled(data.where, entries, data.train.file, data.train.read)


def _of_list(path: Path) -> Unlabelled:
    if not os.path.isfile(path):  # noqa: PTH113
        raise ValueError(f"no list of images {str(path)!r}: check the path")
    if path.suffix.lower() in TABLES:
        rows = _table_rows(path)
    else:
        rows = [(line.strip(), "") for line in read_text(path).splitlines() if line.strip()]
    if not rows:
        raise ValueError(f"{str(path)!r} lists no images: give a path in each line")
    entries = [Sample(name, label, UNKNOWN) for name, label in dict(rows).items()]
    return _unlabelled(str(path.resolve()), entries, Below(path.resolve().parent))


def _table_rows(table: Path) -> list[tuple[str, str]]:
    """The path and the label, "" if missing, of each row that has a path."""
    text = table_text(table)
    header = find_header(table, text, {name: COLUMNS[name] for name in ("path", "label")})
    check_columns(table, header, ("path",))
    indices = header.columns["path"], header.columns.get("label", -1)
    rows = (
        tuple(fields[index] if 0 <= index < len(fields) else "" for index in indices)
        for _, fields in read_rows(table, text, header.delimiter)
    )
    return [(name, label) for name, label in rows if name]


def _unlabelled(
    where: str,
    entries: Iterable[Sample],  # targets are names of classes; "": unknown
    file: Callable[[str], Path | bytes] | None = None,
    read: Callable[[str], Image.Image] | None = None,
    ignored: Mapping[str, int] | None = None,
) -> Unlabelled:
    if not (entries := [*entries]):
        raise ValueError(f"{where!r} has no images: add some")
    names, labels, sizes = zip(*entries, strict=True)
    if read is None:
        assert file
        read = Decoded(file, 3)
    digest = hashlib.sha256()
    for name, size in zip(names, sizes, strict=True):
        digest.update(os.fsencode(name) + f"\0{size}\0".encode())
    images = Images(names, labels if all(labels) else ("",) * len(names), read, file)
    return Unlabelled(where, images, digest.hexdigest()[:16], ignored or {})
