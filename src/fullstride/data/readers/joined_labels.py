"""Which images are in several class folders? Copies of one image, which has all their labels."""

from collections.abc import Mapping
from dataclasses import replace

from fullstride.data.readers.duplicates import TooManyImagesError, find_copies
from fullstride.data.readers.listing import Listing, Sample, labels_of

Copies = Mapping[str, tuple[str, ...]]


def join_copies(listing: Listing, copies: Copies | None = None) -> tuple[Listing, Copies | None]:
    """The images with tuples of all their labels, each once in a split, and the copies.

    Images with the same bytes in several classes of a split are one image, the first of them.
    `copies` are the names by the hash of the content, as an earlier call returned them; None: files
    of equal sizes are compared. The result has None, and a note, where there are too many to
    compare.
    """
    notes = listing.notes
    if copies is None:
        try:
            copies = {
                key: tuple(sample.name for sample in same)
                for key, same in find_copies(listing.samples, listing.file)
            }
        except TooManyImagesError as error:
            notes = (*notes, f"images in several class folders were not searched for: {error}")
    content = {name: key for key, names in (copies or {}).items() for name in names}
    splits: dict[str, list[Sample]] = {}
    joined = 0
    for split, samples in listing.splits.items():
        labels: dict[str, set[int]] = {}
        for sample in samples:
            key = content.get(sample.name)
            if key is not None:
                labels.setdefault(key, set()).update(_labels(sample))
        several = {key for key, each in labels.items() if len(each) > 1}
        written: set[str] = set()
        splits[split] = []
        for sample in samples:
            key = content.get(sample.name)
            if key in several:
                if key in written:
                    continue
                written.add(key)
                target = tuple(sorted(labels[key]))
            else:
                target = _labels(sample)
            splits[split].append(sample._replace(target=target))
        joined += len(written)
    if joined:
        notes = (*notes, f"{joined:,} images in several classes have all their labels")
    return replace(listing, splits=splits, notes=notes), copies


def _labels(sample: Sample) -> tuple[int, ...]:
    return sample.target if isinstance(sample.target, tuple) else labels_of(sample.target)
