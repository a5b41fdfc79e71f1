"""Which images are copies of each other? Those whose files have the same bytes."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fullstride.data.readers.listing import Sample
from fullstride.storage import open_regular

MAX_COMPARED = 250_000  # images; of more, reading a part of each file would take minutes or hours
WHOLE_BYTES = 2**16  # files up to this size are read whole at once
PROBE_BYTES = 2**12  # of larger ones, as many at the start, in the middle and at the end come first


class TooManyImagesError(ValueError):
    """More images have equal sizes than are compared."""


def find_copies(
    samples: Sequence[Sample], file: Callable[[str], Path | bytes]
) -> list[tuple[str, list[Sample]]]:
    """The hash of each content that several images have, and these, in the order of `samples`.

    Only files of equal sizes are read. One that cannot be read has no copies.

    Raises TooManyImagesError.
    """
    alike = _several(samples, lambda sample: sample.size if sample.size > 0 else None)
    if (count := sum(len(same_size) for _, same_size in alike)) > MAX_COMPARED:
        raise TooManyImagesError(f"{count:,} images have the size of another one")
    whole, sets = partial(_digest, file, whole=True), []
    for size, same_size in alike:
        if size <= WHOLE_BYTES:
            sets += _several(same_size, whole)
            continue
        for _, same_probe in _several(same_size, partial(_digest, file, whole=False)):
            sets += _several(same_probe, whole)
    order = {sample.name: number for number, sample in enumerate(samples)}
    return sorted(sets, key=lambda each: order[each[1][0].name])


def _several(
    samples: Iterable[Sample], key: Callable[[Sample], Any]
) -> list[tuple[Any, list[Sample]]]:
    """Each key that two or more samples have, and these; None is no key."""
    by_key: dict[Any, list[Sample]] = {}
    for sample in samples:
        if (value := key(sample)) is not None:
            by_key.setdefault(value, []).append(sample)
    return [(value, each) for value, each in by_key.items() if len(each) > 1]


def _digest(file: Callable[[str], Path | bytes], sample: Sample, *, whole: bool) -> str | None:
    """A hash of the bytes of an image, or of three blocks of them; None if they cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        source = file(sample.name)
        if isinstance(source, bytes):
            digest.update(source)
            return digest.hexdigest()
        with open_regular(source) as opened:
            if whole:
                for block in iter(lambda: opened.read(2**20), b""):
                    digest.update(block)
            else:
                for offset in (0, sample.size // 2, sample.size - PROBE_BYTES):
                    digest.update(os.pread(opened.fileno(), PROBE_BYTES, offset))
    except (OSError, ValueError):  # also UnreadableImage, which is reported when it is decoded
        return None
    return digest.hexdigest()
