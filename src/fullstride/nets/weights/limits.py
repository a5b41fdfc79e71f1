"""Bounds the cost of a file of weights before libraries read it.

Small files can ask for endless work: a dictionary whose key is a tuple that holds a tuple twice,
and so on, or a header with a million tensors of no elements.
"""

import pickletools
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fullstride.io.writing import open_regular

HEADER_LIMIT = 4 * 2**20  # bytes of a safetensors header; a tensor takes about 100
MEMBERS_LIMIT = 100_000  # files in a zip archive; PyTorch writes one for each tensor
DIRECTORY_LIMIT = 200 * MEMBERS_LIMIT  # bytes of an archive's table of contents
UNPACKED_LIMIT = 16 * 2**30  # bytes; the largest released network has less than one GiB
RATIO_LIMIT = 200  # unpacked bytes / bytes of the file; weights hardly compress
PICKLE_LIMIT = 64 * 2**20  # bytes of a pickle, which holds names and shapes
OPERATIONS_LIMIT = 2_000_000  # of a pickle; 100 for each tensor with its optimizer state
HASHING_LIMIT = 2_000_000  # items of keys, each counted as often as it would be visited
DEPTH_LIMIT = 64  # levels of nested tuples; hashing very deep tuples ends the process
PICKLES = 5  # in a file of PyTorch before version 1.6
OPERATIONS = {each.name: each for each in pickletools.opcodes}


class TooCostlyError(ValueError):
    """A file that would take far more time or memory than any file of weights."""


def check_header(length: int) -> None:
    """Raise TooCostlyError for the length of a safetensors header that no network has."""
    if length > HEADER_LIMIT:
        raise TooCostlyError(
            f"says that its safetensors header has {length} bytes; {HEADER_LIMIT} are allowed"
        )


def zip_members(path: Path) -> list[zipfile.ZipInfo]:
    """The members of a zip archive. Raises TooCostlyError, or BadZipFile and the like."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        if (directory := _directory_bytes(file, size)) > DIRECTORY_LIMIT:
            raise TooCostlyError(f"is a zip archive with a table of contents of {directory} bytes")
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    unpacked = sum(member.file_size for member in members)
    if unpacked > min(UNPACKED_LIMIT, RATIO_LIMIT * size) or len(members) > MEMBERS_LIMIT:
        raise TooCostlyError(
            f"would unpack from {size} bytes to {unpacked} in {len(members)} files; {RATIO_LIMIT} "
            f"times the size, {UNPACKED_LIMIT} bytes and {MEMBERS_LIMIT} files are allowed: save "
            "the weights as safetensors"
        )
    return members


def _directory_bytes(file: IO[bytes], size: int) -> int:
    """The size of a zip archive's table of contents, as stated at the archive's end."""
    file.seek(max(0, size - 2**16 - 100))
    tail = file.read()
    end = tail.rfind(b"PK\5\6")
    record = tail[end + 12 : end + 16]
    if tail[max(end - 20, 0) : end].startswith(b"PK\6\7"):  # the record of large archives
        record = tail[max(end - 76, 0) : end - 20][40:48]
    return int.from_bytes(record, "little") if end >= 0 else 0


def check_pickles(path: Path, members: Sequence[zipfile.ZipInfo] | None = None) -> None:
    """Raise TooCostlyError for a file of `torch.save` whose pickles would take endless work.

    `members`: the members of a zip archive; None for a file of PyTorch before version 1.6.
    """
    with open_regular(path) as file:
        if members is None:
            all(_check_pickle(file) for _ in range(PICKLES))
            return
        with zipfile.ZipFile(file) as archive:
            for member in members:
                if member.filename.endswith(".pkl"):
                    if member.file_size > PICKLE_LIMIT:
                        raise TooCostlyError(f"has {member.file_size} bytes of names and shapes")
                    with archive.open(member) as pickled:
                        _check_pickle(pickled)


def _check_pickle(file: IO[bytes]) -> bool:
    """Whether the file has a whole pickle; a damaged pickle is left to its reader.

    The part before the damage has been checked, and no reader comes further.
    """
    costs = _Costs()
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(file)):
            if count > OPERATIONS_LIMIT:
                raise TooCostlyError(f"has more than {OPERATIONS_LIMIT} operations of pickle")
            costs.run(operation.name, argument)
    except TooCostlyError:
        raise
    except Exception:  # a damaged pickle raises almost anything
        return False
    return True


@dataclass
class _Cost:
    """The cost of hashing an object of a pickle: the number of visited items, and the levels."""

    size: int = 1
    depth: int = 0

    def add(self, items: list["_Cost"]) -> None:
        self.size = min(self.size + sum(item.size for item in items), HASHING_LIMIT + 1)
        deepest = max([self.depth, *(item.depth + 1 for item in items)])
        self.depth = min(deepest, DEPTH_LIMIT + 1)


@dataclass
class _Costs:
    """The stack of a pickle machine with costs in place of objects; nothing is built or called."""

    stack: list[_Cost] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[Any, _Cost] = field(default_factory=dict)
    hashed: int = 0

    def run(self, name: str, argument: Any) -> None:
        if name == "MARK":
            self.marks.append(len(self.stack))
        elif name in ("DUP", "MEMOIZE") or "PUT" in name:
            top = self.stack[-1]
            if name == "DUP":
                self.stack.append(top)
            else:
                self.memo[len(self.memo) if name == "MEMOIZE" else argument] = top
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        else:
            self.replace(name)

    def replace(self, name: str) -> None:
        """Run an operation that replaces objects on the stack by objects that may hold them."""
        before, after = OPERATIONS[name].stack_before, OPERATIONS[name].stack_after
        items: list[_Cost] = []
        below = len(before)
        if pickletools.markobject in before:
            items = self.pop(len(self.stack) - self.marks.pop())
            below = before.index(pickletools.markobject)
        items = self.pop(below) + items
        if name in ("SETITEM", "SETITEMS"):
            self.hash(items[1::2])
        elif name in ("ADDITEMS", "FROZENSET", "DICT", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD"):
            self.hash(items)
        for _ in after:
            # A list that grows stays the same object, which may be in the memo.
            grows = name in ("SETITEM", "SETITEMS", "APPEND", "APPENDS", "ADDITEMS")
            cost = items.pop(0) if grows else _Cost()
            cost.add(items)
            self.stack.append(cost)

    def pop(self, count: int) -> list[_Cost]:
        place = len(self.stack) - count
        popped = self.stack[place:]
        del self.stack[place:]
        return popped

    def hash(self, items: list[_Cost]) -> None:
        self.hashed += sum(item.size for item in items)
        if self.hashed > HASHING_LIMIT or any(item.depth > DEPTH_LIMIT for item in items):
            raise TooCostlyError("holds nested keys or arguments that no weights have")
