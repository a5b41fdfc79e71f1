"""How do the words of a command line become a call? The parser, and one line for every failure."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import make_dataclass, replace
from difflib import get_close_matches
from functools import partial, wraps
from inspect import Parameter, cleandoc, signature
from io import StringIO
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

import fullstride
from fullstride.commands import COMMANDS, GROUPS
from fullstride.io.console import (
    LostOutputError,
    Output,
    open_closed_descriptors,
    print_error,
    standard_streams,
    without_frame,
)
from fullstride.io.writing import OutOfMemoryError, lacks_memory, lost_worker
from fullstride.train.recipes.choice import NamedRecipe, RecipeChoice, RecipeFields
from fullstride.train.recipes.named import BY_IMAGES, NOMINAL, RECIPES, default_recipe, find_recipe
from fullstride.train.recipes.recipe import SHORT_FLAGS, Recipe, field_help

DESCRIPTION = (
    "The toolkit for GPU-efficient ConvNets: TResNet, ResNet-RS and GENet, trained, measured, "
    "ready to ship.\n\n"
    "Example: fullstride train digits --model genet_tiny --out runs/digits\n\n"
    "fullstride COMMAND --help explains a command."
)
RECIPE_ERROR = "Error parsing recipe: "  # the parser's, before our own message
RESUMABLE = ("train", "fit", "study search", "study scale")
SHOW_TRACEBACK = "FULLSTRIDE_TRACEBACK"  # environment variable, for reports of defects
RecipeName = Annotated[
    str,
    tyro.conf.arg(
        name="recipe",
        metavar="NAME",
        help="A named recipe, or that of a run, a bundle or a JSON file; by default digits for "
        "the digits, else finetune with --weights and scratch without. The numbers of these two "
        "follow the number of images.",
    ),
]


def main() -> None:
    """Run one command and exit.

    Codes: 0 done; 1 the work or the machine failed; 2 the input was wrong; 130 interrupted;
    141 the reader of the output left before it was complete, and there is no --out.
    """
    open_closed_descriptors()
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run the command in `words` and return its exit code. A failure is one line on stderr."""
    try:
        with standard_streams() as output:
            return run_in(output, words)
    except LostOutputError as error:
        # 128 + SIGPIPE, as shells say of a program that its reader has left
        return 141 if error.errno == errno.EPIPE else print_error(error, 1)


def run_in(output: Output, words: Sequence[str]) -> int:
    if list(words) == ["--version"]:
        print(f"fullstride {fullstride.__version__}")
        return 0
    try:
        call = parse(words)
        output.goes_on = getattr(call, "keywords", {}).get("out") is not None
        call()
    except KeyboardInterrupt:
        hint = "; the same command goes on from the last checkpoint"
        resumable = command_in(words)[0] in RESUMABLE
        return print_error(f"interrupted{hint if resumable else ''}", 130)
    except LostOutputError:
        raise
    except Exception as error:
        return print_error(*failure(error))
    return 0


def failure(error: Exception) -> tuple[object, int]:
    """What to print for an error, and the exit code."""
    user_errors = ValueError, FileNotFoundError, PermissionError, OutOfMemoryError
    if isinstance(error, (*user_errors, IsADirectoryError, NotADirectoryError)):
        return error, 2
    code = getattr(error, "errno", None)
    # PyTorch's workers, which send files to each other, raise RuntimeErrors with this text
    if code in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):
        return "too many open files: raise the limit by `ulimit -n`, or use fewer --workers", 1
    if isinstance(error, FloatingPointError | OSError):
        return error, 2 if code in (errno.ELOOP, errno.ENAMETOOLONG) else 1
    if lost_worker(error):
        return (
            "a process that decodes images was killed, often for lack of memory: use fewer "
            "--workers; the same command goes on"
        ), 1
    if lacks_memory(error):
        return "out of memory: use a smaller batch or resolution", 2
    return defect(error), 1


def defect(error: Exception) -> str:
    """One line for an error that nobody has foreseen, with the place in our own code."""
    if os.environ.get(SHOW_TRACEBACK):
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}fullstride{os.sep}" in frame.filename]
    place = f"{own[-1].filename.rpartition(os.sep)[2]} line {own[-1].lineno}, " if own else ""
    return (
        f"a defect of fullstride: {place}{type(error).__name__}: {str(error)[:200]}; please report "
        f"it with the output under {SHOW_TRACEBACK}=1"
    )


def parse(words: Sequence[str]) -> Callable[[], None]:
    """The command in `words` with its arguments, ready to be called.

    Raises ValueError in one line where the parser would draw a frame.
    """
    name, arguments = command_in(words)
    if name not in COMMANDS:
        return list_commands(name)
    command, choice, shown = COMMANDS[name], RecipeChoice(), RECIPES["scratch"]
    if takes_recipe(command):
        refuse_contradictions(words)
        choice, named, explains = chosen_recipe(words)
        if explains:
            return partial(explain, named)
        shown = named.recipe
    output = StringIO()
    try:
        with redirect_stderr(output):
            return tyro.cli(
                deferred(command, choice, shown), args=arguments, prog=f"fullstride {name}"
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        message = without_frame(output.getvalue())
        is_about_recipe = message.startswith(RECIPE_ERROR)
        hint = "" if is_about_recipe else f"; see fullstride {name} --help"
        raise ValueError(message.removeprefix(RECIPE_ERROR) + hint) from None


def command_in(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The name of the command that `words` begin with, of one or two words, and what follows."""
    length = 2 if words and words[0] in GROUPS else 1
    return " ".join(words[:length]), words[length:]


def list_commands(name: str) -> NoReturn:
    """The help of all commands or of a group, each by its first sentence, where it is asked for.

    Raises ValueError for a name that is not one of a command.
    """
    group, _, verb = name.partition(" ")
    if group not in GROUPS:
        group, verb = "", name
    if verb not in ("", "-h", "--help"):
        same = [command for command in COMMANDS if verb in command.split()]
        close = same or get_close_matches(name, [*COMMANDS, *GROUPS], n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else "see fullstride --help"
        raise ValueError(f"no command {name!r}: {hint}")
    if group:
        commands = {verb: deferred(COMMANDS[f"{group} {verb}"]) for verb in verbs(group)}
    else:
        commands = {name: deferred(COMMANDS[name]) for name in COMMANDS if " " not in name}
        commands |= {name: group_line(name) for name in GROUPS}
    for command in commands.values():
        command.__doc__ = (command.__doc__ or "").partition("\n")[0]
    settings: dict[str, Any] = dict(prog="fullstride", description=DESCRIPTION)
    if group:
        settings = dict(prog=f"fullstride {group}", description=GROUPS[group])
    tyro.extras.subcommand_cli_from_dict(commands, args=["--help"], **settings)
    raise AssertionError("the parser ends after the help")


def verbs(group: str) -> list[str]:
    """The second words of the commands of a group."""
    return [name.removeprefix(f"{group} ") for name in COMMANDS if name.startswith(f"{group} ")]


def group_line(group: str) -> Callable[[], Callable[[], None]]:
    """A group as a line of the help, as the parser takes it: a function with a docstring."""

    def line() -> Callable[[], None]:
        raise AssertionError("a group is no command")

    line.__doc__ = f"{GROUPS[group]} Commands: {', '.join(verbs(group))}."
    return line


def takes_recipe(command: Callable[..., None]) -> bool:
    return get_type_hints(command).get("recipe") is RecipeChoice


def refuse_contradictions(words: Sequence[str]) -> None:
    """Raises ValueError if a short flag and the flag of its field have different values."""
    for short, field in SHORT_FLAGS.items():
        values: dict[str, str] = {}
        for word, following in zip(words, [*words[1:], ""], strict=True):
            flag, equals, value = word.partition("=")
            if flag.replace("_", "-") in (short, f"--recipe.{field}"):
                values[flag] = value if equals else following
        if len(values) == 2 and len({number_in(value) for value in values.values()}) == 2:
            flags = " and ".join(f"{flag} {value}" for flag, value in values.items())
            raise ValueError(f"{flags} are the same setting: give one of them")


def number_in(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def deferred(
    command: Callable[..., None],
    choice: RecipeChoice | None = None,
    shown: Recipe = RECIPES["scratch"],
) -> Callable[..., Callable[[], None]]:
    """A function with the arguments of `command` that returns the call instead of making it.

    For an argument `recipe` there are `--recipe NAME` and a flag for each field, whose defaults are
    those of `shown`; the call has `choice`.
    """

    @wraps(command)
    def bind(*args: Any, recipe_name: str = "", **kwargs: Any) -> Callable[[], None]:
        if "recipe" in kwargs:
            kwargs["recipe"] = choice
        return partial(command, *args, **kwargs)

    hints = get_type_hints(command, include_extras=True)
    parameters = []
    for name, parameter in signature(command).parameters.items():
        if name == "recipe":
            hints |= {"recipe_name": RecipeName, "recipe": RecipeFields}
            kind = Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(Parameter("recipe_name", kind, default="", annotation=RecipeName))
            fields_of_it = RecipeFields(**vars(shown))
            parameter = parameter.replace(default=fields_of_it, annotation=RecipeFields)
        parameters.append(parameter)
    del bind.__dict__["__wrapped__"]  # else the parser would read the annotations of `command`
    bind.__dict__["__signature__"] = signature(command).replace(parameters=parameters)
    bind.__annotations__ = hints
    bind.__doc__ = joined_lines(command.__doc__ or "")
    return bind


def joined_lines(docstring: str) -> str:
    """A docstring whose paragraphs and arguments are one line each, which the parser breaks."""
    return re.sub(r"(?<!\n)\n(?!\n| {4}\w+: )\s*", " ", cleandoc(docstring))


def chosen_recipe(words: Sequence[str]) -> tuple[RecipeChoice, NamedRecipe, bool]:
    """What `--recipe NAME`, the flags of fields, DATA and `--weights` choose.

    This is a pass before that of the command, whose defaults are the fields of the recipe. No
    argument is required in it.

    Returns the choice, its recipe before the changes where it follows no data yet, and whether
    `--recipe.help` is given.
    """
    hints = get_type_hints(Recipe, include_extras=True)
    pairs = {name: two_values(hint) for name, hint in hints.items()}
    first, second = (parsed_loosely(words, {n: pairs[n][i] for n in pairs}) for i in (0, 1))
    if not (first and second):  # the command's own pass says what is wrong
        return RecipeChoice(), NamedRecipe(RECIPES["scratch"], "scratch"), False
    # A flag that was given has its value whatever the default is.
    changes = {
        name: getattr(first.recipe, name)
        for name in pairs
        if getattr(first.recipe, name) == getattr(second.recipe, name)
    }
    case = replace(
        NOMINAL,
        has_weights=bool(getattr(first, "weights", "")),
        is_digits=first.data == "digits",
        width=getattr(first, "width", 1.0),
        resolution=changes.get("resolution"),
    )
    name = first.recipe_name or default_recipe(case)
    shown = NamedRecipe(find_recipe(name, case), name, case)
    return RecipeChoice(first.recipe_name, changes), shown, first.recipe.help


def two_values(hint: Any) -> tuple[Any, Any]:
    """Two values of a type that differ in each of their parts."""
    origin, kinds = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return two_values(kinds[0])
    if origin is Literal:
        return kinds[0], kinds[1]
    if origin in (Union, UnionType):
        return None, two_values(kinds[0])[1]
    if origin is tuple:
        first, second = zip(*(two_values(kind) for kind in kinds if kind is not ...), strict=True)
        return first, second
    return hint(0), hint(1)


def parsed_loosely(words: Sequence[str], defaults: Mapping[str, Any]) -> Any:
    """The arguments of a command with a recipe, whose fields have `defaults`, and none required.

    None if the parser refuses the words.
    """
    flags: list[tuple[str, Any, Any]] = [
        (name, hint, defaults[name])
        for name, hint in get_type_hints(Recipe, include_extras=True).items()
    ]
    flags_type = make_dataclass("RecipeFlags", [*flags, ("help", bool, False)], frozen=True)
    arguments: list[tuple[str, Any, Any]] = [("recipe_name", RecipeName, "")]
    command, words = command_in(words)
    hints = get_type_hints(COMMANDS[command], include_extras=True)
    for name, parameter in signature(COMMANDS[command]).parameters.items():
        if name == "recipe":
            arguments.append((name, flags_type, flags_type()))
        elif parameter.default is Parameter.empty:
            arguments.append((name, optional(hints[name]), None))
        else:
            arguments.append((name, hints[name], parameter.default))
    try:
        with redirect_stderr(StringIO()):
            values, _ = tyro.cli(
                make_dataclass("Arguments", arguments),
                args=words,
                return_unknown_args=True,
                add_help=False,
                console_outputs=False,
            )
    except SystemExit:
        return None
    return values


def optional(hint: Any) -> Any:
    """The same type or None, with the same metadata."""
    metadata = getattr(hint, "__metadata__", ())
    either = (hint.__origin__ if metadata else hint) | None
    return Annotated[either, *metadata] if metadata else either


def explain(named: NamedRecipe) -> None:
    """Print each field of a recipe with its value, its help and its short flag."""
    if named.name in BY_IMAGES:
        images = f"{named.case.images:,} images"
        print(f"{named.name} for {images}: its numbers follow the data, and training prints them")
    short = {field: f" ({flag})" for flag, field in SHORT_FLAGS.items()}
    for name, text in field_help().items():
        value = getattr(named.recipe, name)
        if isinstance(value, tuple):
            value = " ".join(f"{number:.4g}" for number in value)
        print(f"--recipe.{name.replace('_', '-'):22} {value!s:>21}  {text}{short.get(name, '')}")
