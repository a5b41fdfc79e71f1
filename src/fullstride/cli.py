"""The roof: how do words become a command? What goes wrong becomes one line."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial, wraps
from io import StringIO

import tyro

import fullstride
from fullstride.commands import COMMANDS
from fullstride.terminal import complain, unboxed
from fullstride.train.recipes import RECIPES, Recipe

ABOUT = "The toolkit for GPU-efficient ConvNets: TResNet, ResNet-RS and GENet, trained, measured, ready to ship."


def main() -> None:
    """Run one command and exit. 0: done; 1: the work or the machine failed; 2: the input; 130: interrupted."""
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run the command that `words` spell; what goes wrong is one line on the standard error stream."""
    if list(words) == ["--version"]:
        print(f"fullstride {fullstride.__version__}")
        return 0
    try:
        recipe, words = take_recipe(words)
        command = parse(words, recipe)
        command()
    except KeyboardInterrupt:
        return complain("interrupted; the same command goes on from the last checkpoint of a run", 130)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        return complain(error, 2)
    except (FloatingPointError, OSError) as error:
        return complain(error, 1)
    except (MemoryError, RuntimeError) as error:
        from fullstride.measure.memory import lacks_memory

        if not lacks_memory(error):
            raise
        return complain("out of memory: use a smaller batch or resolution", 2)
    return 0


def parse(words: Sequence[str], recipe: Recipe) -> Callable[[], None]:
    """The command that `words` spell, ready to be called; `recipe` gives the defaults of its fields.

    Raises ValueError in one line where the parser would draw a box.
    """

    def later(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
        return wraps(command)(lambda *args, **kwargs: partial(command, *args, **kwargs))

    commands = {name: later(command) for name, command in COMMANDS.items()}
    commands["train"] = partial(commands["train"], recipe=recipe)
    drawn = StringIO()
    try:
        with redirect_stderr(drawn):
            return tyro.extras.subcommand_cli_from_dict(commands, args=words, prog="fullstride", description=ABOUT)
    except SystemExit as stop:
        if not stop.code:  # it was --help
            raise
        raise ValueError(unboxed(drawn.getvalue())) from None


def take_recipe(words: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe that `--recipe NAME` names, and the other words: the flags of its fields are left to tyro."""
    after_flag = {i + 1 for i, word in enumerate(words) if word.startswith("--")}  # as in --out digits
    digits = any(word == "digits" and i not in after_flag for i, word in enumerate(words))
    name = "digits" if digits and list(words[:1]) == ["train"] else "finetune"
    kept = []
    rest = iter(words)
    for word in rest:
        if word == "--recipe":
            name = next(rest, "")
        elif word.startswith("--recipe="):
            name = word.removeprefix("--recipe=")
        else:
            kept.append(word)
    if name not in RECIPES:
        raise ValueError(f"no recipe named {name!r}: choose from {', '.join(RECIPES)}")
    return RECIPES[name], kept
