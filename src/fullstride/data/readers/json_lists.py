"""What is in the lists of a large JSON file? They are read an element at a time."""

import json
import re
from collections.abc import Collection, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from fullstride.storage import open_regular

CHARACTERS = 2**20  # that are read at once
MAX_CHARACTERS = 2**26  # of one element, or of another value
SPACE = re.compile(r"[ \t\n\r]*")


def read_lists(path: Path, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Each element of the lists `names` of the object in a file, with the name of its list.

    They come in the order of the file, and only one of them is in memory. Other members are read
    and dropped. Raises ValueError in one line for a file that is no whole JSON object.
    """
    with open_regular(path) as file, TextIOWrapper(file, "utf-8-sig") as text:
        reader = _Reader(path, text)
        reader.take("{")
        while True:
            name = reader.value("a name")
            reader.take(":")
            if name in names:
                reader.take("[")
                count = 0
                while reader.peek() != "]":
                    if count:
                        reader.take(",")
                    yield name, reader.value(f"{name}[{count}]")
                    count += 1
                reader.take("]")
            else:
                reader.value(f"{name!r}")
            if reader.peek() != ",":
                break
            reader.take(",")
        reader.take("}")
        if reader.peek():
            raise reader.error("more behind its end")


class _Reader:
    """The characters of a file from a position on, as far as they were needed."""

    def __init__(self, path: Path, file: TextIO):
        self.path, self.file, self.text, self.at = path, file, "", 0
        self.decoder = json.JSONDecoder()

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{str(self.path)!r} is not whole JSON, it has {problem}: copy it again")

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            space = SPACE.match(self.text, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self.text) or not self._read_more():
                return self.text[self.at : self.at + 1]

    def take(self, sign: str) -> None:
        if (present := self.peek()) != sign:
            what = repr(present) if present else "its end"
            raise self.error(f"{what} where {sign!r} should be")
        self.at += 1

    def value(self, what: str) -> Any:
        """The next value; `what` names it in an error."""
        self.peek()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                if len(self.text) - self.at > MAX_CHARACTERS or not self._read_more():
                    problem = str(getattr(error, "msg", error))[:100]
                    raise self.error(f"a damaged or very long {what} ({problem})") from None
                continue
            # a number may go on behind the characters that were read
            if end < len(self.text) or not self._read_more():
                self.at = end
                return value

    def _read_more(self) -> bool:
        try:
            more = self.file.read(max(CHARACTERS, len(self.text) - self.at))
        except UnicodeDecodeError:
            raise ValueError(f"{str(self.path)!r} is not UTF-8: save it as UTF-8") from None
        self.text, self.at = self.text[self.at :] + more, 0
        return bool(more)
