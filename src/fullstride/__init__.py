"""The most accurate ConvNet that runs in your milliseconds: trained, measured, ready to ship.

    "tresnet_m" -> Network --- train ---> Bundle --- export ---> model.onnx
       |            ^  \\                   |  \\
    NetSpec -------/    \\-- cost          |   \\-- predict -> labels
                                          bench

The package is divided into rooms, one for each question, and imports only point down:
`cli > commands > autofit, papers > search > report > deploy > train > latency > tasks > measure >
data > nets`.
"""

import sys
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("fullstride")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0"

# Public names and their modules. They are imported on first use, so that `import fullstride` is
# quick.
PUBLIC = {
    "fit": "fullstride.autofit.fit",
    "search_network": "fullstride.search.llr.study",
    "scale": "fullstride.search.scale.study",
    "zoo": "fullstride.nets.zoo",
    "NetSpec": "fullstride.nets.spec",
    "Stage": "fullstride.nets.spec",
    "Network": "fullstride.nets.network",
    "Bundle": "fullstride.nets.bundle",
    "Preprocessing": "fullstride.nets.preprocessing",
    "cost": "fullstride.measure.tracer",
    "bench": "fullstride.measure.bench",
    "estimate": "fullstride.latency.estimator",
    "load_profile": "fullstride.latency.devices",
    "open_data": "fullstride.data.dataset",
    "Recipe": "fullstride.train.recipes.recipe",
    "train_network": "fullstride.train.run",
    "RunOptions": "fullstride.train.recipes.choice",
    "train_epochs": "fullstride.train.loop",
    "evaluate": "fullstride.train.scoring",
    "predict": "fullstride.deploy.predict",
    "export": "fullstride.deploy.export",
    "push_to_hub": "fullstride.report.model_card",
    "ComparisonImages": "fullstride.deploy.comparison",
    "open_file": "fullstride.deploy.formats",
    "Progress": "fullstride.report.notebook",
}
# What notebooks show as tables, which `report.notebook` writes, and its modules.
SHOWN = {
    "Bundle": "fullstride.nets.bundle",
    "Choice": "fullstride.latency.select",
    "Event": "fullstride.study.driver",
    "Measurement": "fullstride.measure.protocols",
}

__all__ = [*PUBLIC, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"fullstride has no {name!r}: it has {', '.join(PUBLIC)}")
    module = import_module(PUBLIC[name])
    return module if name == "zoo" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__


def show_in_notebooks() -> None:
    """Register the types in SHOWN, by their names alone, with the IPython that runs, if any."""
    ipython = sys.modules.get("IPython")
    if ipython and (shell := ipython.get_ipython()):
        for form, function in (("text/html", "html"), ("text/plain", "pretty")):
            formatter = shell.display_formatter.formatters[form]
            for name, module in SHOWN.items():
                formatter.for_type_by_name(module, name, partial(shown_by, function))


def shown_by(function: str, *arguments: Any) -> Any:
    """The result of a function of `report.notebook`, which is imported here."""
    return getattr(import_module("fullstride.report.notebook"), function)(*arguments)


show_in_notebooks()
