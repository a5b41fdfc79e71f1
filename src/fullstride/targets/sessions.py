"""Opens exported files by their runtimes, each as a function from a batch to its outputs.

This file is sent to another machine, see `runner.py`; it needs NumPy and one runtime.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any

import numpy as np

# Format -> the package of its runtime. The module has the same name, with underscores.
PACKAGES = {
    **{"onnx": "onnxruntime", "openvino": "openvino", "ncnn": "ncnn"},
    **{"litert": "ai-edge-litert", "executorch": "executorch"},
}


def onnx_session(path: str, threads: int):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # fatal: errors are raised, not also printed
    gpu = {"CUDAExecutionProvider"} & {*onnxruntime.get_available_providers()}
    return onnxruntime.InferenceSession(path, options, [*gpu, "CPUExecutionProvider"])


def onnx_outputs(session: Any):
    (source,), (result,) = session.get_inputs(), session.get_outputs()
    return lambda images: session.run([result.name], {source.name: images})[0]


def open_openvino(path: str, threads: int, precision: str):
    import openvino

    return openvino_outputs(openvino.Core(), f"{path}/model.xml", threads, precision)


def openvino_outputs(core: Any, model: Any, threads: int, precision: str):
    """`model` is a graph or its path; the graph marks int8 layers."""
    hint = "bf16" if precision == "bf16" else "f32"
    options = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
    options["PERFORMANCE_HINT"] = "LATENCY"  # one call uses all threads at any batch size
    compiled = core.compile_model(model, "CPU", options)
    return lambda images: compiled([images])[0]


def one_by_one(infer):
    """Run a batch through `infer`, which takes and returns a batch of one image."""
    return lambda images: np.concatenate([infer(images[i : i + 1]) for i in range(len(images))])


def open_ncnn(path: str, threads: int, precision: str):
    import ncnn

    net, kinds, half = ncnn.Net(), ncnn.Mat.PixelType, precision == "fp16"
    net.opt.num_threads = threads
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = half
    if net.load_param(f"{path}/model.param") or net.load_model(f"{path}/model.bin"):
        raise ValueError("ncnn does not load it")

    def infer(images):
        image = np.ascontiguousarray(images[0])
        source = ncnn.Mat(image) if image.dtype == np.float32 else of_pixels(image)
        extractor = net.create_extractor()
        extractor.input("in0", source)
        failed, result = extractor.extract("out0")
        if failed:
            raise ValueError(f"ncnn failed: {failed}")
        return np.array(result)[None]

    def of_pixels(image):
        h, w, c = image.shape
        kind = kinds.PIXEL_RGB if c == 3 else kinds.PIXEL_GRAY
        return ncnn.Mat.from_pixels(image, kind, w, h)

    return one_by_one(infer)


def litert_session(path: str, threads: int):
    from ai_edge_litert.interpreter import Interpreter

    graph = Interpreter(path, num_threads=threads)
    graph.allocate_tensors()
    return graph


def litert_outputs(graph):
    (source,), (result,) = graph.get_input_details(), graph.get_output_details()

    def infer(images):
        graph.set_tensor(source["index"], images)
        graph.invoke()
        return graph.get_tensor(result["index"])

    return one_by_one(infer)


def executorch_session(path: str):
    from executorch.extension.pybindings import portable_lib

    return portable_lib._load_for_executorch(path)


def executorch_outputs(module, threads: int):
    from executorch.extension.pybindings import portable_lib
    from torch import from_numpy

    def set_threads():
        # XNNPACK's threads belong to the process, and each file asks for its own number.
        if portable_lib._threadpool_get_thread_count() != threads:
            portable_lib._unsafe_reset_threadpool(threads)

    def infer(images):
        set_threads()
        # Contiguous, because the runtime reads other strides as another layout.
        return module.forward([from_numpy(np.ascontiguousarray(images))])[0].numpy().copy()

    set_threads()  # prints a line, which is suppressed while a file is opened
    return one_by_one(infer)


# Arguments: path, number of threads, precision of the file.
OPEN = {
    "onnx": lambda path, threads, _: onnx_outputs(onnx_session(path, threads)),
    "openvino": open_openvino,
    "ncnn": open_ncnn,
    "litert": lambda path, threads, _: litert_outputs(litert_session(path, threads)),
    "executorch": lambda path, threads, _: executorch_outputs(executorch_session(path), threads),
}
