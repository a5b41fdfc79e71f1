import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fullstride.nets.fused import reference
from fullstride.nets.fused.operators import choose

HERE = Path(__file__).parent


def run(*command: str, **variables: str) -> str:
    """What a Python process of its own prints: Triton decides when it is imported whether it
    interprets or compiles."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command], env=inherited | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sentences(mark: str) -> str:
    pytest.importorskip(
        "triton", reason="the kernels are written in Triton, which is not installed here"
    )
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    return run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(HERE / "kernels_in_triton.py"),
        "-m",
        mark,
        **interpret,
    )


@pytest.mark.slow
def test_the_kernels_give_the_numbers_of_their_definitions():
    assert " passed" in sentences("not slow")


@pytest.mark.slow
def test_the_kernels_are_right_for_maps_of_any_shape_strides_and_cut():
    assert " passed" in sentences("slow")


def test_maps_on_the_cpu_are_for_plain_pytorch():
    assert choose(torch.zeros(1)) is reference


def test_without_triton_the_plain_passes_are_chosen_also_for_a_gpu():
    code = """
import sys
sys.modules["triton"] = None
import torch
from fullstride.nets.fused.operators import choose, reference
print(choose(torch.zeros(1)) is reference)
"""
    assert run("-c", code, TRITON_INTERPRET="1") == "True\n"


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_without_spills_and_reads_and_writes_maps_in_128_bits(
    tmp_path,
):
    pytest.importorskip(
        "triton", reason="the kernels are written in Triton, which is not installed here"
    )
    from fullstride.nets.fused.triton import passes

    names = {name for name, value in vars(passes).items() if inspect.isfunction(value)}
    run(
        str(HERE.parents[2] / "benchmarks" / "compile_kernels.py"),
        "--out",
        str(tmp_path / "found.json"),
    )
    kernels = json.loads((tmp_path / "found.json").read_text())["kernels"]
    assert {each["form"].partition(":")[0] for each in kernels} == names & {*vars(reference)}
    for each in kernels:
        loads, stores = ([int(bits) for bits in each[name]] for name in ("loads", "stores"))
        assert each["spilled_bytes"] == 0, each
        assert min(loads + stores) >= 32, (
            each
        )  # no value of 16 bits, and no byte, comes or goes alone
        widest = {
            "bn_add_act: of codes + normed codes": 64,
        }  # 8 codes are as many as a thread takes at once
        assert max(loads) == widest.get(each["form"], 128), each
