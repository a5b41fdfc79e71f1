"""Which variables does the TensorFlow 1 code of ResNet-RS have? By name, in PyTorch's layout."""

from torch import Tensor

from fullstride.nets.weights.text import first_ten, one_line

AVERAGE = "ExponentialMovingAverage"
VARIABLES = ("kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance")
NORM_VARIABLES = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
# (height, width, in, out) and (in, out) -> PyTorch's order
AXES = {4: (3, 2, 0, 1), 2: (1, 0)}


def variable_name(parameter: str) -> str:
    """`layer/variable` of a PyTorch parameter `path.leaf`."""
    path, _, leaf = parameter.rpartition(".")
    if path.endswith(".norm"):
        return NORM_VARIABLES.get(leaf, leaf)
    return leaf.replace("weight", "kernel")


def select_variables(state: dict[str, Tensor], ema: bool | None) -> dict[str, Tensor]:
    """Network variables by `layer/variable`, in PyTorch's layout, without optimizer state.

    `ema`: True selects the averaged copies, False the plain variables, None both, for their names.
    Raises ValueError where two variables have one name, and where averages are missing.
    """
    plain: dict[str, Tensor] = {}
    averages: dict[str, Tensor] = {}
    for name, value in state.items():
        scopes = name.removesuffix(":0").split("/")
        group = plain
        if scopes[-1] == AVERAGE:
            scopes, group = scopes[:-1], averages
        if len(scopes) < 2 or scopes[-1] not in VARIABLES:
            continue  # the global step and the optimizer's slots
        variable = "/".join(scopes[-2:])
        if variable in group:
            raise ValueError(
                f"two variables are called {one_line(variable)}: keep those of one network"
            )
        axes = AXES.get(value.dim())
        group[variable] = value.permute(axes).contiguous() if axes else value
    if ema is None:
        return {**plain, **averages}
    if not ema:
        return plain
    if not averages:
        raise ValueError(
            f"the variables have no {AVERAGE} copies, and the plain batch-norm statistics of this "
            "code are those of one batch: export the averages too, or say ema=False if the plain "
            "variables hold them"
        )
    missing = [variable for variable in plain if variable not in averages]
    if missing:
        raise ValueError(
            f"{len(missing)} variables have no {AVERAGE} copy: {first_ten(missing)}: "
            "export all of them"
        )
    return averages
