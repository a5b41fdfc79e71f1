"""Converts a graph of torch.export to LiteRT, and to int8.

It runs as a program, in an environment with the converter and without this package.
"""

# pyright: reportMissingImports=false

import json
import re
import sys
from pathlib import Path

import numpy as np
import torch

# An output of the graph is named after its layers, such as a.Wrapper/b.Network_net/c.Linear_fc;1
NETWORK = "/[^/;]*_net"
SIGNATURE = "serving_default"  # of the graph
INPUT = "args_0"  # of the graph


def main(folder: Path) -> None:
    """Read graph.pt2, and for int8 float_layers.json and calibration.npy; write model.tflite."""
    import litert_torch

    program, path = torch.export.load(folder / "graph.pt2"), folder / "model.tflite"
    assert program.example_inputs is not None
    litert_torch.convert(program.module(), program.example_inputs[0]).export(str(path))
    layers = folder / "float_layers.json"
    if layers.exists():
        quantize(path, json.loads(layers.read_text()), np.load(folder / "calibration.npy"))


def quantize(path: Path, float_layers: list[str], images: np.ndarray) -> None:
    """Convert the network in the file to int8, except these layers.

    Linear layers have only weights in int8: their outputs would be probabilities in few steps.
    Ranges cover all images; the default, a running mean, would hardly follow later images.
    """
    from ai_edge_quantizer import algorithm_manager, calibrator, qtyping, quantizer, recipe_manager
    from ai_edge_quantizer.utils.qsv_utils import min_max_update

    kinds, plain = qtyping.TFLOperationName, algorithm_manager.AlgorithmName.NO_QUANTIZE
    recipe = recipe_manager.RecipeManager()
    recipe.add_static_config(f"{NETWORK}[/;]", kinds.ALL_SUPPORTED, 8, 8)
    recipe.add_dynamic_config(".*", kinds.FULLY_CONNECTED, 8)
    for layer in float_layers:
        recipe.add_quantization_config(scope(layer), kinds.ALL_SUPPORTED, algorithm_key=plain)
    ranges = calibrator.Calibrator(str(path), num_threads=1, qsv_update_func=min_max_update)
    data = [{INPUT: image} for image in np.split(images, len(images))]
    ranges.calibrate({SIGNATURE: data}, recipe)
    model = quantizer.Quantizer(str(path), recipe.get_quantization_recipe())
    model.quantize(ranges.get_model_qsvs()).export_model(str(path), overwrite=True)


def scope(layer: str) -> str:
    """A regular expression for the names of outputs of a layer, such as head.fc."""
    return NETWORK + "".join(rf"/[^/;]*_{re.escape(part)}" for part in layer.split(".")) + ";"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
