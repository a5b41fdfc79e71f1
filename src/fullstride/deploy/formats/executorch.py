"""Writes and opens .pte files for ExecuTorch with XNNPACK, in fp32 or int8."""

# pyright: reportMissingImports=false

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from fullstride.deploy.exported import ExportedModel, Metadata
from fullstride.deploy.formats import mobile
from fullstride.deploy.formats.base import Format, absent, has_magic, quiet, reading
from fullstride.deploy.job import ExportJob
from fullstride.io.console import count_of, without_native_lines
from fullstride.targets import sessions

METADATA = "metadata"  # the method of a file that returns its metadata as bytes of JSON
MAGIC = slice(4, 8), b"ET12"  # place and bytes in a file


def write(job: ExportJob, path: Path) -> None:
    text = json.dumps(job.metadata.to_strings()).encode()
    constants = {METADATA: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    with quiet("torch"), quiet(""):
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
        from executorch.exir.dialects.edge._ops import EdgeOpOverload

        program = mobile.program(job)
        if job.metadata.precision == "int8":
            program = quantize(program, job)
        lowered = to_edge_transform_and_lower(
            program, partitioner=[XnnpackPartitioner()], constant_methods=constants
        )
        targets = [node.target for node in lowered.exported_program().graph.nodes]
        data = lowered.to_executorch().buffer  # modifies the graph
    calls = [each._schema.name for each in targets if isinstance(each, EdgeOpOverload)]
    if left := Counter(name.removeprefix("aten::") for name in calls):
        counts = ", ".join(f"{count} {name}" for name, count in left.most_common())
        job.progress(f"operators that XNNPACK does not compute: {counts}")
    path.write_bytes(data)


def quantize(program: torch.export.ExportedProgram, job: ExportJob) -> torch.export.ExportedProgram:
    """Convert the network to int8, except `job.metadata.float_layers`.

    Weights have a scale per output channel, activations the range over the calibration images.
    Preprocessing and activation stay in float.
    """
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.observer import MinMaxObserver
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    def in_int8(node: torch.fx.Node) -> bool:
        if node.op == "get_attr":  # weights of a convolution, which have no path
            return True
        stack = [*(node.meta.get("nn_module_stack") or {}).values()]
        path = str(stack[-1][0]) if stack else ""
        return path.startswith("net") and path.removeprefix("net.") not in job.metadata.float_layers

    quantizer = XNNPACKQuantizer().set_filter_function(in_int8)
    config = get_symmetric_quantization_config(is_per_channel=True)
    # By default rare values would be clipped, which doubles the mean error of genet_light.
    observer = MinMaxObserver.with_args(eps=2**-12)  # the smallest scale is theirs
    ranges = replace(config.input_activation, observer_or_fake_quant_ctr=observer)
    quantizer.set_global(replace(config, input_activation=ranges, output_activation=ranges))
    # Only the weights of linear layers: their outputs would be clipped, and have few steps.
    quantizer.set_operator_type(
        torch.ops.aten.linear.default,
        get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True),
    )
    module = prepare_pt2e(program.module(), quantizer)
    for images in job.calibration:
        for image in torch.from_numpy(images).split(1):
            module(image)
    assert program.example_inputs is not None
    images, _ = program.example_inputs
    return torch.export.export(convert_pt2e(module), images)


def open_file(path: Path, threads: int) -> ExportedModel:
    if reason := missing():
        raise ValueError(reason)
    with quiet("torch"), quiet(""), without_native_lines():
        with reading(path):
            module = sessions.executorch_session(str(path))
            strings = json.loads(module.run_method(METADATA, [])[0].numpy().tobytes())
        infer = sessions.executorch_outputs(module, threads)
    metadata = Metadata.from_strings(strings, path)
    runtime = f"ExecuTorch {version('executorch')}, {count_of(threads, 'thread')}"
    return ExportedModel(path, metadata, infer, runtime)


missing = partial(absent, "executorch", "executorch", "executorch")
detect = partial(has_magic, suffix=".pte", magic=MAGIC)
EXECUTORCH = Format(
    "executorch", ".pte", ("fp32", "int8"), write, open_file, detect, missing, one_size=True
)
