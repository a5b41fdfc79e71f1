"""Which tensors are in a file? The content decides how it is read, and no code in it is run."""

import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fullstride.nets.load_options import WeightsKind
from fullstride.nets.weights.limits import (
    TooCostlyError,
    check_header,
    check_pickles,
    zip_members,
)
from fullstride.nets.weights.text import one_line
from fullstride.nets.weights.unwrap import Unwrapped, named_tensors, unwrap
from fullstride.storage import OutOfMemoryError, check_regular, lacks_memory, open_regular

T = TypeVar("T")
# Of a damaged archive; NotImplementedError is of a compression that does not exist.
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


# Classes that training programs put beside the weights. Their fields are set, no code of them runs.
SETTINGS = ("argparse.Namespace", "types.SimpleNamespace")


def read(path: str | Path, kind: WeightsKind = "averaged") -> dict[str, Tensor]:
    """`read_wrapped` without the names of the wrappers."""
    return read_wrapped(path, kind).state


def read_wrapped(path: str | Path, kind: WeightsKind = "averaged") -> Unwrapped:
    """Tensors by name from a file of safetensors, `torch.save`, or `.npz`.

    `kind`: which weights of a training program's checkpoint, that may have their average too.
    Raises ValueError, in one line, for every other file; OutOfMemoryError where it does not fit.
    """
    return checked(Path(path), partial(unwrap, kind=kind))


def read_flat(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file whose names are exact: those of a bundle or of the hub."""
    return checked(Path(path), lambda data: Unwrapped(named_tensors(data), "", "")).state


def read_shapes(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file as `read` names them, with shapes and without values.

    Of safetensors and of files of `torch.save` since version 1.6 hardly more than the names is
    read. Raises ValueError as `read` does.
    """

    def shapes(data: Any) -> dict[str, Tensor]:
        state = unwrap(data).state
        return {name: torch.empty(value.shape, device="meta") for name, value in state.items()}

    return read_data(Path(path), shapes, "download it again", values=False)


def checked(path: Path, select: Callable[[Any], Unwrapped]) -> Unwrapped:
    def plain(data: Any) -> Unwrapped:
        selected = select(data)
        for name, value in selected.state.items():
            check_plain(name, value)
        return selected

    return read_data(path, plain, "download it again")


class _DamagedError(ValueError):
    """A file that is not whole."""


def read_data(path: Path, select: Callable[[Any], T], hint: str, values: bool = True) -> T:
    """`select` of what is in a file of weights, with the errors of both in one line.

    Without `values`, tensors may be read only when they are used.
    Raises ValueError, OutOfMemoryError where the file does not fit, and for a damaged file a
    ValueError that ends with `hint`.
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
        check_header(int.from_bytes(head[:8], "little"))
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


def torch_shapes(path: Path) -> Any:
    return read_torch(path, mmap=zipfile.is_zipfile(path))


def read_torch(path: Path, mmap: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unusual files are checked by the caller
        with torch.serialization.safe_globals([(Settings, name) for name in SETTINGS]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


WITHOUT_VALUES = {read_safetensors: safetensors_shapes, read_torch: torch_shapes}


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
    """The error of a library, as one of this package."""
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
