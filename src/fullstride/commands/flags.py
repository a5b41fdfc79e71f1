"""What do several commands take?"""

from typing import Annotated

from tyro.conf import arg

Device = Annotated[str, arg(help="cpu, cuda, cuda:1, or auto: cuda where there is one.")]
