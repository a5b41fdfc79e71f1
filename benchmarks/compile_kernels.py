"""What does the compiler make of the Triton kernels for an H100 or H200? Registers, spills and
widths of loads; no GPU.

    python benchmarks/compile_kernels.py --out benchmarks/compile_kernels.json

Each pass is called once for each form that it has, on bf16 maps in NHWC; its kernel is not run but
compiled for sm_90. What has no room in registers is spilled to memory; loads of less than 128 bits
are more instructions than needed.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullstride.measure.environment import Environment
from fullstride.nets.fused.reference import Affine, Slopes, Term

# the interpreter has nothing to compile, and Triton reads this when the kernels are imported
os.environ.pop("TRITON_INTERPRET", None)
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.runtime import driver  # noqa: E402

from fullstride.nets.fused.triton import passes as passes  # noqa: E402

ARCHITECTURE = 90
N, C, SIDE = 2, 128, 32


@dataclass(frozen=True, kw_only=True)
class Compiled:
    form: str
    kernel: str
    registers: int  # a thread
    spilled_bytes: int
    loads: dict[int, int]  # instructions by the bits of each
    stores: dict[int, int]
    lines: int  # of the kernel's source


def forms() -> dict[str, Callable[[], Any]]:
    def maps(side: int = SIDE) -> Tensor:
        return torch.zeros(N, C, side, side, dtype=torch.bfloat16).to(
            memory_format=torch.channels_last
        )

    x, half = maps(), maps(SIDE // 2)
    c, nc = torch.ones(C), torch.ones(N, C)
    affine, slopes, codes = Affine(c, nc, nc), Slopes(nc, nc, nc), x.to(torch.int8)
    other, half_wide, none = Term(x), torch.bfloat16, None
    norm, y_alone = Term(x, affine, slopes), Term(None, affine, slopes)
    coded = Term(codes, affine, slopes)
    rated = Term(x, affine, rate_c=c)
    calls = {
        "stats": (x, c),
        "bn_add_act: batch norm, act": (norm, none, 0.01),
        "bn_add_act: + other": (norm, other, 0),
        "bn_add_act: + normed other": (norm, norm, 0),
        "bn_add_act: to codes": (rated, none, 0),
        "bn_add_act: to codes, + other": (rated, other, 0),
        "bn_add_act: to codes, + normed other": (rated, rated, 0),
        "bn_add_act: of codes + other": (coded, other, 0, half_wide),
        "bn_add_act: of codes + normed codes": (coded, coded, 0, half_wide),
        "bn_add_act_sums: of y": (x, x, y_alone, none, 0.01),
        "bn_add_act_sums: of x": (x, x, norm, other, 0),
        "bn_add_act_sums: normed other": (x, x, norm, norm, 0),
        "bn_add_act_sums: of codes": (x, x, coded, other, 0),
        "bn_add_act_sums: normed codes": (x, x, coded, coded, 0),
        "bn_add_act_gradients: of y": (x, x, y_alone, none, 0.01),
        "bn_add_act_gradients: other": (x, x, norm, other, 0),
        "bn_add_act_gradients: normed other": (x, x, norm, norm, 0),
        "bn_add_act_gradients: of codes": (x, x, coded, other, 0),
        "bn_add_act_gradients: normed codes": (x, x, coded, coded, 0),
        "bn_add_act_gradients: of y, + squeeze": (x, x, y_alone, none, 0.01, nc),
        "slope_means": (norm, 0.01),
        "blurred": (norm, 0.01),
        "blurred_sums": (half, nc, norm, 0.01),
        "blurred_gradients": (half, nc, norm, 0.01),
    }
    return {
        form: partial(getattr(passes, form.partition(":")[0]), *arguments)
        for form, arguments in calls.items()
    }


class Hopper:
    """Stands in for Triton's driver, so that launches compile for a GPU that is not present."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURE, 32)


def compile_all() -> list[Compiled]:
    made, calls = [], []
    launch = triton.JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        calls.append((kernel, launch(kernel, *arguments, warmup=True, **options)))

    driver.set_active(Hopper())
    triton.JITFunction.run = compile_only  # pyright: ignore[reportAttributeAccessIssue]  # where every launch ends up
    for form, call in forms().items():
        call()
        (one,) = calls
        made.append(compiled(form, *one))
        calls.clear()
    return made


def compiled(form: str, kernel: Any, binary: Any) -> Compiled:
    ptx = binary.asm["ptx"]
    registers, spilled_bytes = assembled(ptx)
    return Compiled(
        form=form,
        kernel=kernel.__name__,
        registers=registers,
        spilled_bytes=spilled_bytes,
        loads=widths("ld", ptx),
        stores=widths("st", ptx),
        lines=kernel.src.count("\n"),
    )


def assembled(ptx: str) -> tuple[int, int]:
    """Registers and spilled bytes, as the assembler tells them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [
            get_ptxas(ARCHITECTURE).path,
            "-v",
            f"--gpu-name=sm_{ARCHITECTURE}a",
            file,
            "-o",
            file.with_suffix(".cubin"),
        ]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return int(registers), sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def widths(instruction: str, ptx: str) -> dict[int, int]:
    """How many loads or stores of global memory there are, by their bits."""
    found = re.findall(rf"{instruction}\.global[\w.:]*?(?:\.v(\d))?\.[bu](\d+)", ptx)
    return dict(
        sorted(Counter(int(count or 1) * int(bits) for count, bits in found).items(), reverse=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    made = compile_all()
    for each in made:
        loads = ", ".join(f"{count} x {bits}" for bits, count in each.loads.items())
        print(
            f"{each.form:45} {each.registers:4} registers "
            f"{each.spilled_bytes:3} spilled   loads: {loads} bit"
        )
    if out:
        facts = asdict(Environment.here()) | dict(
            triton=triton.__version__, architecture=f"sm_{ARCHITECTURE}"
        )
        maps = dict(shape=[N, C, SIDE, SIDE], dtype="bfloat16", format="channels_last")
        written = dict(environment=facts, maps=maps, kernels=[asdict(each) for each in made])
        out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
