"""The saved bytes of a training step, counted once for all networks that differ in values alone."""

import io
import pickle
from collections.abc import Callable
from typing import Any

from torch import Tensor


def once_for_equal_networks(count: Callable[..., Any]) -> Callable[..., Any]:
    """For `activation_bytes`, which each training calls and which takes longer than its steps."""
    counted: dict[tuple[Any, ...], Any] = {}

    def run(net: Any, *arguments: Any, **options: Any) -> Any:
        try:
            key = without_values(net), *arguments, *options.items()
        except (AttributeError, TypeError, pickle.PicklingError):  # a local function or class
            return count(net, *arguments, **options)
        if key not in counted:
            counted[key] = count(net, *arguments, **options)
        return counted[key]

    return run


class Shapes(pickle.Pickler):
    """Pickles a network with the forms of its tensors in place of their values."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.storages: dict[int, int] = {}  # tensors may share one

    def persistent_id(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return None
        storage = thing.untyped_storage()
        number = self.storages.setdefault(storage._cdata, len(self.storages))
        form = (*thing.shape, thing.stride(), thing.dtype, thing.device.type, thing.requires_grad)
        return type(thing), number, storage.nbytes(), form


def without_values(net: Any) -> bytes:
    file = io.BytesIO()
    Shapes(file).dump(net)
    return file.getvalue()
