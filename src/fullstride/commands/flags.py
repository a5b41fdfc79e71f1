"""What do several commands take?"""

from typing import Annotated, Literal

from tyro.conf import arg

Device = Annotated[str, arg(help="cpu, cuda, cuda:1, or auto: cuda where there is one.")]
Efficiency = Annotated[
    Literal["plain", "lean", "compiled"],
    arg(
        help="How ours train, as a recipe says it: PyTorch's modules, lean operators, or those by torch.compile."
    ),
]
