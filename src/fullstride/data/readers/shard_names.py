"""Which shards does a pattern name? `photos-{000000..000007}.tar`, `photos-{a,b}.tar`, `*.tar`."""

import itertools
import math
import re
from fnmatch import fnmatchcase

MAX_NAMES = 100_000  # of shards that a pattern names


def names_by_pattern(pattern: str, existing: list[str]) -> list[str]:
    """The names of a pattern, sorted: all in its braces, and the existing ones by its wildcards."""
    return sorted({name for each in _expand(pattern) for name in _match(each, existing)})


def _match(pattern: str, names: list[str]) -> list[str]:
    wild = any(sign in pattern for sign in "*?[")
    return [name for name in names if fnmatchcase(name, pattern)] if wild else [pattern]


def _expand(pattern: str) -> list[str]:
    """The names of a pattern with {first..last} and {one,other}, at most MAX_NAMES."""
    pieces = re.split(r"\{([^{}]*)\}", pattern)  # what is in braces has an odd index
    choices = [_words(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if (count := math.prod(map(len, choices))) > MAX_NAMES:
        raise ValueError(f"{pattern!r} names {count:,} shards: use at most {MAX_NAMES:,}")
    return ["".join(words) for words in itertools.product(*choices)]


def _words(braces: str) -> list[str]:
    span = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", braces)
    if not span:
        return braces.split(",")
    first, last, digits = int(span[1]), int(span[2]), len(span[1])
    if not 0 <= last - first < MAX_NAMES:
        raise ValueError(f"{{{braces}}}: count up, to at most {MAX_NAMES:,} shards")
    return [f"{number:0{digits}}" for number in range(first, last + 1)]
