"""PyTorch's operators of ONNX, parsed at this import for all exports of a process and its forks."""

import functools

from torch.onnx._internal.exporter._registration import ONNXRegistry

from fullstride.deploy.formats.onnx import OPSET

parse = functools.cache(ONNXRegistry.from_torchlib)
parse(opset_version=OPSET)
ONNXRegistry.from_torchlib = staticmethod(parse)
