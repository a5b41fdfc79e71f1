"""How do the outputs of a batch become columns of a table in arrow's format?"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fullstride.data.prediction_store import pyarrow
from fullstride.deploy.exported import ExportedModel, as_utf8, one_input
from fullstride.deploy.predict import probabilities
from fullstride.nets.bundle import Bundle

if TYPE_CHECKING:
    import pyarrow as pa

Columns = Callable[[Tensor], Mapping[str, Any]]  # activated outputs (N, ...) -> columns of N rows


def schema(
    model: Bundle | ExportedModel, columns: Columns, device: torch.device | str
) -> "pa.Table":
    """The table of no rows, by the outputs for a black image: a part may have no readable one."""
    black: Any = np.zeros(one_input(model.preprocessing, "pixels"), np.uint8)
    if isinstance(model, ExportedModel) and model.metadata.input_kind == "pictures":
        black = Image.fromarray(black.squeeze())
    rows = probabilities(model, [black], device)
    return to_table(columns(torch.from_numpy(rows))).slice(0, 0)


def to_table(columns: Mapping[str, Any]) -> "pa.Table":
    return pyarrow().table({name: _array(values) for name, values in columns.items()})


def _array(values: Any) -> Any:
    """An arrow array of a list, or of a NumPy array, whose rows become lists of one size."""
    pa = pyarrow()
    if not isinstance(values, np.ndarray):
        return pa.array(_as_utf8(values))
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(np.ascontiguousarray(values).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _as_utf8(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_utf8(each) for each in value]
    return as_utf8(value) if isinstance(value, str) else value


def with_names(
    table: "pa.Table",
    names: list[str],
    errors: list[str | None],
    has_labels: bool,
    labels: Iterable[str] = (),
) -> "pa.Table":
    """The table with the columns path, error and, where the data have labels, true_label."""
    pa = pyarrow()
    first = {"path": names}
    if has_labels:
        first["true_label"] = list(labels)
    columns = {name: pa.array(_as_utf8(values), pa.string()) for name, values in first.items()}
    columns |= {name: table.column(name) for name in table.column_names}
    columns["error"] = pa.array(_as_utf8(errors), pa.string())
    return pa.table(columns)
