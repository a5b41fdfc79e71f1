"""Reads tensors from files of weights, recognised by content, and runs no code in them."""

import pickle
import pickletools
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fullstride.io.writing import OutOfMemoryError, check_regular, lacks_memory, open_regular
from fullstride.nets.preprocessing import WeightsKind

# Limits of the cost of a file, checked before libraries read it.
#
# Small files can ask for endless work: a dictionary whose key is a tuple that holds a tuple twice,
# and so on, or a header with a million tensors of no elements.


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
        elif name == "DUP":
            self.stack.append(self.stack[-1])
        elif name == "MEMOIZE" or "PUT" in name:
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self.stack[-1]
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


# The content of files.


def one_line(text: str) -> str:
    """Text from a file, printable and short enough for an error."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= 120 else f"{line[:120]}..."


def first_ten(lines: list[str]) -> str:
    more = f" and {len(lines) - 10} more" if len(lines) > 10 else ""
    return ", ".join(one_line(line) for line in lines[:10]) + more


# ---- wrappers and prefixes of checkpoints

# Names that training programs give to the weights of the last step, and to averaged weights. The
# last name of each is fullstride's, in checkpoint.pt.
RAW = ("state_dict", "model_state_dict", "model", "net")
AVERAGED = (
    "state_dict_ema",
    "model_ema_state_dict",
    "model_ema",
    "ema_state_dict",
    "ema_model",
    "ema",
    "average",
)
MAX_DEPTH = 4  # of wrappers in wrappers

# Prefixes of DistributedDataParallel and AveragedModel, of Lightning, and of `TimmNetwork`.
PREFIXES = ("module.", "model.", "net.")
COMPILED = "_orig_mod."  # of torch.compile, at any module
COUNTER = "n_averaged"  # of torch.optim.swa_utils.AveragedModel


class Unwrapped(NamedTuple):
    """The named tensors of a file."""

    state: dict[str, Tensor]
    key: str  # the wrapper around the tensors; "" for none
    other: str  # the wrapper around unused weights of the other kind; "" for none


def unwrap(data: Any, kind: WeightsKind = "averaged") -> Unwrapped:
    """The named tensors in `data`, without dicts and prefixes around them.

    `kind` chooses between raw and averaged weights. Raises ValueError if there are no named
    tensors, or if `kind` is raw and there are only averaged weights.
    """
    key = other = ""
    for _ in range(MAX_DEPTH):
        raw, averaged = (present(data, keys) for keys in (RAW, AVERAGED))
        if not (raw or averaged):
            break
        if kind == "raw" and not raw:
            raise ValueError(f"holds averaged weights only, in {averaged}: leave out raw")
        key, unused = (averaged, raw) if averaged and kind == "averaged" else (raw, averaged)
        other = unused or other
        data = data[key]
    return Unwrapped(without_prefixes(named_tensors(data)), key, other)


def named_tensors(data: Any) -> dict[str, Tensor]:
    """The tensors of a mapping by their names. Raises ValueError if there are none."""
    if not isinstance(data, Mapping):
        raise ValueError(
            f"holds a {type(data).__name__} and not tensors by name: save a state_dict()"
        )
    state = {
        name: value.detach()
        for name, value in data.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    if not state:
        names = ", ".join(one_line(str(name)) for name in list(data)[:10])
        raise ValueError(f"holds no tensors by name, only: {names or 'nothing'}")
    return state


def present(data: Any, keys: tuple[str, ...]) -> str:
    """The first of `keys` under which `data` has tensors by name; "" if there is none."""
    if not isinstance(data, Mapping):
        return ""
    return next((key for key in keys if holds_tensors(data.get(key))), "")


def holds_tensors(data: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether `data` is a mapping with tensors, at up to `depth` levels."""
    return (
        isinstance(data, Mapping)
        and depth > 0
        and any(
            isinstance(value, Tensor) or holds_tensors(value, depth - 1) for value in data.values()
        )
    )


def without_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state without the prefixes that wrappers of modules add to every name."""
    names = {name: name.replace(COMPILED, "") for name in state}
    if COUNTER in names and all(name.startswith("module.") for name in names if name != COUNTER):
        del names[COUNTER]
    for prefix in common_prefixes(list(names.values())):
        names = {name: short.removeprefix(prefix) for name, short in names.items()}
    if len(set(names.values())) < len(names):  # two tensors would have one name
        return state
    return {short: state[name] for name, short in names.items()}


def common_prefixes(names: list[str]) -> Iterator[str]:
    """The `PREFIXES` that all names begin with, the outermost first."""
    while names:
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in names)), "")
        if not prefix:
            return
        yield prefix
        names = [name.removeprefix(prefix) for name in names]


T = TypeVar("T")
# Errors of a damaged archive; NotImplementedError: the compression does not exist.
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, EOFError)

# Files that are not weights, by their first bytes.
NOT_WEIGHTS = {
    b"<": "is a web page and not weights: download the file itself",
    b"version https://git-lfs": "is a pointer of Git LFS and not the weights: run `git lfs pull`",
    b"\x1f\x8b": "is a gzip archive: unpack it and give the file with the weights",
    b"\x89HDF": "is an HDF5 file, which is not read: use the weights that timm has of the network",
}


class Settings:
    """Stands in for the classes of settings in a checkpoint, so that they are read as data."""


# Classes of objects that training programs store beside the weights; only their fields are read.
SETTINGS = ("argparse.Namespace", "types.SimpleNamespace")


def read(path: str | Path, kind: WeightsKind = "averaged") -> dict[str, Tensor]:
    """`read_wrapped` without the names of the wrappers."""
    return read_wrapped(path, kind).state


def read_wrapped(path: str | Path, kind: WeightsKind = "averaged") -> Unwrapped:
    """Tensors by name from a file of safetensors, `torch.save`, or `.npz`.

    `kind`: which weights of a checkpoint that may have raw and averaged ones. Raises ValueError,
    in one line, for every other file; OutOfMemoryError if the file does not fit into memory.
    """
    return read_data(Path(path), lambda data: checked(unwrap(data, kind)))


def read_flat(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file with exact names, in a bundle or from the hub."""
    return read_data(Path(path), lambda data: checked(Unwrapped(named_tensors(data), "", ""))).state


def read_shapes(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file on the meta device, named as by `read`.

    For safetensors, and for `torch.save` since PyTorch 1.6, little more than the names is read.
    Raises ValueError as `read` does.
    """

    def shapes(data: Any) -> dict[str, Tensor]:
        state = unwrap(data).state
        return {name: torch.empty(value.shape, device="meta") for name, value in state.items()}

    return read_data(Path(path), shapes, values=False)


class _DamagedError(ValueError):
    """A file that is not whole."""


def read_data(
    path: Path, select: Callable[[Any], T], hint: str = "download it again", values: bool = True
) -> T:
    """Apply `select` to the content of a file of weights, with all errors in one line.

    Without `values`, tensors may be read only when they are used. Raises ValueError, which ends
    with `hint` for a damaged file, and OutOfMemoryError if the file does not fit into memory.
    """
    try:
        check_regular(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        load = reader(path)
        if not values:
            load = WITHOUT_VALUES.get(load, load)
        try:
            data = load(path)
        except Exception as error:  # on a damaged file the libraries raise almost anything
            if lacks_memory(error):
                raise MemoryError from None
            raise reason(error) from None
        return select(data)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except MemoryError:
        raise OutOfMemoryError(f"out of memory while {path} was read: free some memory") from None
    except _DamagedError as error:
        raise ValueError(f"{path} {error}: {hint}") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def reader(path: Path) -> Callable[[Path], Any]:
    """The function that reads the file. Raises ValueError for a file that is unsafe to read."""
    with open_regular(path) as file:
        head = file.read(64)
    if not head:
        raise _DamagedError("is empty")
    if head[8:9] == b"{":
        if (length := int.from_bytes(head[:8], "little")) > HEADER_LIMIT:
            raise TooCostlyError(
                f"says that its safetensors header has {length} bytes; {HEADER_LIMIT} are allowed"
            )
        return read_safetensors
    if head.startswith(b"PK"):
        return zip_reader(path)
    if head.startswith(b"\x80"):
        check_pickles(path)
        return read_torch
    for start, wrong in NOT_WEIGHTS.items():
        if head.lstrip().startswith(start):
            raise ValueError(wrong)
    raise ValueError(
        "is not a file of weights: safetensors, a file of torch.save and .npz are read"
    )


def zip_reader(path: Path) -> Callable[[Path], Any]:
    try:
        members = zip_members(path)
        check_pickles(path, members)
    except TooCostlyError:
        raise
    except ZIP_ERRORS:
        raise _DamagedError("is a damaged or incomplete zip archive") from None
    names = [member.filename for member in members]
    if any(name.endswith("constants.pkl") for name in names):
        raise ValueError(
            "is a TorchScript archive, which is a program: save its state_dict() as safetensors"
        )
    if any(name.endswith("data.pkl") for name in names):
        return read_torch
    if names and all(name.endswith(".npy") for name in names):
        return read_npz
    raise ValueError(
        "is a zip archive without weights: unpack it and give the file with the weights"
    )


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        str(path).encode()
    except UnicodeEncodeError:  # the library cannot open such a name
        return safetensors.torch.load(path.read_bytes())
    return safetensors.torch.load_file(path)


def safetensors_shapes(path: Path) -> dict[str, Tensor]:
    with safetensors.safe_open(path, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def read_torch(path: Path, mmap: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unusual files are checked by the caller
        with torch.serialization.safe_globals([(Settings, name) for name in SETTINGS]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


WITHOUT_VALUES = {
    read_safetensors: safetensors_shapes,
    read_torch: lambda path: read_torch(path, mmap=zipfile.is_zipfile(path)),
}


def read_npz(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as arrays:
        return from_arrays(arrays)


def from_arrays(arrays: Mapping[str, np.ndarray | Tensor]) -> dict[str, Tensor]:
    """The arrays of numbers, as tensors."""
    state = {}
    for name, array in arrays.items():
        if isinstance(array, Tensor):
            state[name] = array.detach()
        elif (copy := np.array(array)).dtype.kind in "fiub":  # PyTorch requires writable memory
            state[name] = torch.from_numpy(copy)
    return state


def reason(error: Exception) -> ValueError:
    """The error of a library as a ValueError for users."""
    text = str(error)
    if "GLOBAL " in text:
        function = one_line(text.split("GLOBAL ", 1)[1].split()[0])
        return ValueError(
            f"would run code on loading (it needs {function}): save its weights as safetensors"
        )
    if isinstance(error, pickle.UnpicklingError):
        content = text.partition("WeightsUnpickler error: ")[2] or "a pickle of another kind"
        return ValueError(
            f"is not only weights ({one_line(content)}) and could run code on loading: save its "
            "weights as safetensors"
        )
    return _DamagedError(f"is damaged or incomplete ({one_line(text or type(error).__name__)})")


def checked(weights: Unwrapped) -> Unwrapped:
    for name, value in weights.state.items():
        check_plain(name, value)
    return weights


def check_plain(name: str, value: Tensor) -> None:
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        raise ValueError(
            f"holds {one_line(name)}, which is not a plain tensor: save it dense and not quantized"
        )
    # With strides of zero, a copy of a tensor in a small file could take any amount of memory.
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise ValueError(
            f"holds {one_line(name)} {tuple(value.shape)} with fewer numbers than its shape needs"
        )
