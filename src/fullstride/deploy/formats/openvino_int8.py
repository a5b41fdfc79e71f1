"""How does OpenVINO compute a network in int8? NNCF, its own tool, marks in the model what is rounded and how."""

import contextlib
import io
from typing import Any

from fullstride.deploy.formats.base import needs, quiet
from fullstride.deploy.job import Job


def quantised(model: Any, job: Job) -> Any:
    """The `openvino.Model` of `openvino_folder.converted` in int8, but for `job.about.kept_float`.

    Weights have a scale for each output channel, maps the range of the calibration images, from the least to the
    largest value. NNCF's own way is the mean of each image's range, and biases that make up for what rounding shifts.
    On three tiny networks trained on the digits, probabilities are then 20 to 50 times as far (Kullback-Leibler) off.
    """
    with quiet("nncf"), quiet("torch"), contextlib.redirect_stdout(io.StringIO()):  # it draws bars
        try:
            import nncf
            from nncf.quantization.range_estimator import RangeEstimatorParametersSet
        except ImportError as error:
            raise needs(str(error.name)) from None
        return nncf.quantize(
            model,
            nncf.Dataset(job.calibration),
            subset_size=len(job.calibration),
            ignored_scope=nncf.IgnoredScope(
                names=left_alone(model, job.about.kept_float), validate=False
            ),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
                disable_bias_correction=True,
            ),
        )


def left_alone(model: Any, kept_float: tuple[str, ...]) -> list[str]:
    """The operations of the layers `kept_float`, and those before the network, which make its input of pixels."""
    inside, names, found = set[str](), list[str](), set[str]()
    for operation in model.get_ordered_ops():
        name = operation.get_friendly_name()
        sources = (
            each.get_source_output().get_node().get_friendly_name() for each in operation.inputs()
        )
        if name.startswith("net.") or inside.intersection(sources):
            inside.add(name)
        path = name.split("/")[0].removeprefix("net.")
        if path in kept_float:
            found.add(path)
        if operation.get_type_name() not in ("Constant", "Parameter", "Result") and (
            path in kept_float or name not in inside
        ):
            names.append(name)
    if missing := set(kept_float) - found:
        raise ValueError(
            f"{min(missing)} cannot be kept in float, the graph has no such layer: name a layer with weights"
        )
    return names
