"""Which files of a Hugging Face dataset are for training, validation and test?"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from fullstride.data.readers.csv_table import SPLITS
from fullstride.data.readers.listing import quote_names

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
            words = (
                [sharded[1]]
                if sharded
                else [w for w in re.split(r"[-_.]", path.stem) if w.lower() in SPLITS]
            )
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
    """Each folder and the sorted names of its files, without hidden ones."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(parent), sorted(name for name in files if not name.startswith("."))
