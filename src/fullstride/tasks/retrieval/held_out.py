"""Which classes are never trained on? The splits of a data set for retrieval."""

import hashlib
from collections import Counter
from dataclasses import replace

from fullstride.data.dataset import DataSet, Images
from fullstride.data.readers.listing import fraction
from fullstride.data.readers.splits import TEST_SHARE

MINIVAL_SHARE = 0.1  # of the classes
LEAST = 2  # classes of a split: of one alone all images would be retrieved


def hold_out_classes(data: DataSet) -> DataSet:
    """`data` with whole classes in the minival and the test that it does not have itself.

    The classes with the lowest hashes of their names are for the test, a tenth of them or the share
    of the data's rule, and of the others as many for the minival; at least two each. A class of one
    image stays in training. With a group, images are held out by groups, as `open_data` does it.
    Splits that the data have stay as they are. A note says how many of their classes are trained
    on too.

    `classes` are those of the training images; other classes have larger targets.

    Raises ValueError for too few classes, and for a split in which nothing can be retrieved.
    """
    splits = [
        split
        for split in ("test", "minival")
        if split not in data.own_splits and len(getattr(data, split))
    ]
    if splits and not data.rule.group:
        data = _split_by_class(data, splits)
    data = _training_classes_first(data)
    return replace(data, notes=(*data.notes, *_notes(data)))


def _split_by_class(data: DataSet, splits: list[str]) -> DataSet:
    """`data` whose `splits` are taken from its training images by class."""
    pool = _joined(data.train, *(getattr(data, split) for split in splits))
    sizes = Counter(pool.targets)
    classes = sorted(
        (label for label, size in sizes.items() if size > 1),
        key=lambda label: fraction(data.classes[label]),
    )
    needed = LEAST * (len(splits) + 1)
    if len(classes) < needed:
        raise ValueError(
            f"{data.where} has {len(classes)} classes of two images or more: retrieval holds whole "
            f"classes out and needs {needed}; add some, name groups by --group, or give val/ and "
            "test/"
        )
    shares = {
        "test": data.rule.test or TEST_SHARE,
        "minival": data.rule.minival or MINIVAL_SHARE,
    }
    split_of: dict[int, str] = {}
    for number, split in enumerate(splits, 1):
        left = [label for label in classes if label not in split_of]
        count = max(LEAST, round(shares[split] * len(left)))
        count = min(count, len(left) - LEAST * (len(splits) + 1 - number))
        split_of |= dict.fromkeys(left[:count], split)
    return _taken(data, pool, splits, split_of)


def _taken(data: DataSet, pool: Images, splits: list[str], split_of: dict[int, str]) -> DataSet:
    """`data` with the classes of `pool` in their splits, and without copies of these elsewhere."""
    places: dict[str, list[int]] = {split: [] for split in ("train", *splits)}
    for index, label in enumerate(pool.targets):
        places[split_of.get(label, "train")].append(index)
    training = {pool.names[index] for index in places["train"]}
    copies = {
        name
        for names in (data.rule.copies or {}).values()
        if not training.issuperset(names)
        for name in training.intersection(names)
    }
    places["train"] = [index for index in places["train"] if pool.names[index] not in copies]
    numbers = Counter(split_of.values())
    notes = [
        f"{numbers[split]:,} of the {len(set(pool.targets)):,} classes are for the {split} alone"
        for split in splits
    ]
    if copies:
        notes.append(
            f"{len(copies):,} training images are copies of images of held-out classes and left out"
        )
    held_out = sorted((split, data.classes[label]) for label, split in split_of.items())
    text = f"{data.fingerprint} {held_out}".encode("utf-8", "surrogateescape")
    return replace(
        data,
        **{split: pool.subset(indices) for split, indices in places.items()},
        fingerprint=hashlib.sha256(text).hexdigest()[:16],
        notes=(*data.notes, *notes),
    )


def _joined(*parts: Images) -> Images:
    """The images of all parts, in the order of their classes and names."""
    pairs = [pair for part in parts for pair in zip(part.targets, part.names, strict=True)]
    pairs.sort()
    targets, names = zip(*pairs, strict=True)
    return replace(parts[0], names=names, targets=targets)


def _training_classes_first(data: DataSet) -> DataSet:
    present = sorted(set(data.train.targets))
    others = [label for label in range(len(data.classes)) if label not in {*present}]
    target = {label: index for index, label in enumerate([*present, *others])}
    return data.with_targets(tuple(data.classes[label] for label in present), target.__getitem__)


def _notes(data: DataSet) -> list[str]:
    notes = []
    for split in ("minival", "test"):
        sizes = Counter(getattr(data, split).targets)
        if sizes and max(sizes.values()) < 2:
            raise ValueError(
                f"the {split} of {data.where} has no two images of one class, so that nothing can "
                "be retrieved: add images"
            )
        if alone := sum(size == 1 for size in sizes.values()):
            notes.append(f"{alone:,} images of the {split} are alone in their class: no queries")
        if both := sum(label < len(data.classes) for label in sizes):
            notes.append(
                f"{both:,} of the {len(sizes):,} classes of the {split} are trained on too, so its "
                "scores are of known classes"
            )
    return notes
