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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullstride.measure.environment import Environment
from fullstride.nets.fused.reference import Affine, Slopes

# the interpreter has nothing to compile, and Triton reads this when the kernels are imported
os.environ.pop("TRITON_INTERPRET", None)
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fullstride.nets.fused.triton import passes as passes  # noqa: E402
from fullstride.nets.fused.triton.tiles import OPTIONS  # noqa: E402

ARCHITECTURE = 90
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    int: "i32",
    float: "fp32",
}
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
    return {
        "stats": lambda: passes.stats(x, c),
        "bn_add_act: batch norm, act": lambda: passes.bn_add_act(x, affine, None, None, 0.01),
        "bn_add_act: + other": lambda: passes.bn_add_act(x, affine, x, None, 0),
        "bn_add_act: + normed other": lambda: passes.bn_add_act(x, affine, x, affine, 0),
        "bn_add_act_int8: batch norm, act": lambda: passes.bn_add_act_int8(
            x, affine, None, None, 0, c, None
        ),
        "bn_add_act_int8: + other": lambda: passes.bn_add_act_int8(x, affine, x, None, 0, c, None),
        "bn_add_act_int8: + normed other": lambda: passes.bn_add_act_int8(
            x, affine, x, affine, 0, c, c
        ),
        "bn_add_act: of codes + other": lambda: passes.bn_add_act(
            codes, affine, x, None, 0, torch.bfloat16
        ),
        "bn_add_act: of codes + normed codes": lambda: passes.bn_add_act(
            codes, affine, codes, affine, 0, torch.bfloat16
        ),
        "bn_add_act_sums: of y": lambda: passes.bn_add_act_sums(
            x, x, None, affine, None, None, 0.01
        ),
        "bn_add_act_sums: of x": lambda: passes.bn_add_act_sums(x, x, x, affine, x, None, 0),
        "bn_add_act_sums: normed other": lambda: passes.bn_add_act_sums(
            x, x, x, affine, x, affine, 0
        ),
        "bn_add_act_sums: of codes": lambda: passes.bn_add_act_sums(
            x, x, codes, affine, x, None, 0
        ),
        "bn_add_act_sums: normed codes": lambda: passes.bn_add_act_sums(
            x, x, codes, affine, codes, affine, 0
        ),
        "bn_add_act_gradients: of y": lambda: passes.bn_add_act_gradients(
            x, x, None, affine, slopes, None, None, None, 0.01
        ),
        "bn_add_act_gradients: other": lambda: passes.bn_add_act_gradients(
            x, x, x, affine, slopes, x, None, None, 0
        ),
        "bn_add_act_gradients: normed other": lambda: passes.bn_add_act_gradients(
            x, x, x, affine, slopes, x, affine, slopes, 0
        ),
        "bn_add_act_gradients: of codes": lambda: passes.bn_add_act_gradients(
            x, x, codes, affine, slopes, x, None, None, 0
        ),
        "bn_add_act_gradients: normed codes": lambda: passes.bn_add_act_gradients(
            x, x, codes, affine, slopes, codes, affine, slopes, 0
        ),
        "squeezed": lambda: passes.squeezed(x, affine, 0.01),
        "gated": lambda: passes.gated(x, affine, nc, 0.01),
        "gated_sums": lambda: passes.gated_sums(x, x, affine, nc, 0.01),
        "gated_gradients": lambda: passes.gated_gradients(x, x, affine, nc, nc, slopes, 0.01),
        "blurred": lambda: passes.blurred(x, affine, 0.01),
        "blurred_sums": lambda: passes.blurred_sums(half, nc, x, affine, 0.01),
        "blurred_gradients": lambda: passes.blurred_gradients(half, nc, x, affine, slopes, 0.01),
    }


def compile_all() -> list[Compiled]:
    made, calls = [], []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **sizes: Any) -> None:
        calls.append((kernel, arguments, sizes))

    triton.JITFunction.run = run  # pyright: ignore[reportAttributeAccessIssue]  # where every launch ends up
    for form, call in forms().items():
        call()
        (one,) = calls
        made.append(compiled(form, *one))
        calls.clear()
    return made


def compiled(form: str, kernel: Any, arguments: tuple[Any, ...], sizes: dict[str, Any]) -> Compiled:
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | sizes
    options = {name: given.pop(name) for name in OPTIONS}
    fixed = {
        name: value for name, value in given.items() if value is None or name in sizes_fixed(kernel)
    }
    signature = {
        name: "constexpr" if name in fixed else type_of(given[name]) for name in kernel.arg_names
    }
    pointers = [number for number, type_ in enumerate(signature.values()) if type_.startswith("*")]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in fixed.items()},
        attrs={
            (number,): [["tt.divisibility", 16]] for number in pointers
        },  # torch aligns every tensor so
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", ARCHITECTURE, 32), options=options).asm[
        "ptx"
    ]
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


def sizes_fixed(kernel: Any) -> set[str]:
    return {parameter.name for parameter in kernel.params if parameter.is_constexpr}


def type_of(value: Any) -> str:
    return TYPES[value.dtype if isinstance(value, Tensor) else type(value)]


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
