"""Turns a command line into a call, and every failure into one line."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, cleandoc, signature
from io import StringIO
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

import fullstride
from fullstride.commands import COMMANDS, GROUPS, USUAL, VALUES
from fullstride.io import console
from fullstride.io.writing import OutOfMemoryError, lacks_memory, looks_like_path, lost_worker
from fullstride.tables import FORMATS, TASKS, check_name
from fullstride.train.recipes.choice import NamedRecipe, RecipeChoice, RecipeFields, RunOptions
from fullstride.train.recipes.named import BY_IMAGES, NOMINAL, RECIPES, default_recipe, find_recipe
from fullstride.train.recipes.recipe import SHORT_FLAGS, Recipe, field_help

if TYPE_CHECKING:
    from fullstride.tasks.task import Task

DESCRIPTION = (
    "The most accurate ConvNet that runs in your milliseconds: trained, measured, ready to ship.\n"
    "\nExample: fullstride train digits --model genet_tiny --out runs/digits\n\n"
    "fullstride COMMAND --help explains a command."
)
RECIPE_ERROR = "Error parsing recipe: "  # the parser's prefix of our own message
RESUMABLE = ("train", "fit", "study search", "study scale")
SHOW_TRACEBACK = "FULLSTRIDE_TRACEBACK"  # environment variable, for reports of defects
DATA_ARGUMENTS = "data", "calibration"
MODEL_ARGUMENTS = "run", "runs", "model", "models", "teacher"
TASK_OPTION = "--task."  # prefix of flags for a task's options
HELP, WHOLE_HELP, RECIPE_HELP = ("-h", "--help"), "--help-all", "--recipe.help"
RecipeName = Annotated[
    str,
    tyro.conf.arg(
        name="recipe",
        metavar="NAME",
        help="A named recipe, or a run, a bundle or a JSON file with a recipe; by default digits "
        "for the digits, else finetune with --weights and scratch without. The numbers of these "
        "two follow the number of images. --recipe.help lists the names.",
    ),
]


def main() -> None:
    """Run one command and exit.

    Codes: 0 done; 1 the work or the machine failed; 2 the input was wrong; 130 interrupted;
    141 the reader of the output left before it was complete, and there is no --out.
    """
    console.open_closed_descriptors()
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run the command in `words` and return its exit code. A failure is one line on stderr."""
    try:
        with console.standard_streams() as output:
            return run_in(output, words)
    except console.LostOutputError as error:
        # 128 + SIGPIPE, as in shells for a program without a reader
        return 141 if error.errno == errno.EPIPE else console.print_error(error, 1)


def run_in(output: console.Output, words: Sequence[str]) -> int:
    if list(words) == ["--version"]:
        print(f"fullstride {fullstride.__version__}")
        return 0
    try:
        call = parse(words)
        arguments = getattr(call, "keywords", {})
        check_words(arguments)
        output.optional = arguments.get("out") is not None
        call()
    except KeyboardInterrupt:
        hint = "; the same command goes on from the last checkpoint"
        resumable = command_in(words)[0] in RESUMABLE
        return console.print_error(f"interrupted{hint if resumable else ''}", 130)
    except console.LostOutputError:
        raise
    except Exception as error:
        return console.print_error(*failure(error))
    return 0


def failure(error: Exception) -> tuple[object, int]:
    """The message for an error, and the exit code."""
    if str(error).startswith("Expected more than 1 value per channel"):  # of PyTorch
        return (
            "a step of one image leaves one value of each channel, which batch normalisation "
            "cannot train on: use a larger batch or resolution, or more images"
        ), 2
    user_errors = ValueError, FileNotFoundError, PermissionError, OutOfMemoryError
    if isinstance(error, (*user_errors, IsADirectoryError, NotADirectoryError)):
        return error, 2
    code = getattr(error, "errno", None)
    # PyTorch's workers raise RuntimeErrors with this text
    if code in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):
        return "too many open files: raise the limit by `ulimit -n`, or use fewer --workers", 1
    if isinstance(error, FloatingPointError | OSError):
        return error, 2 if code in (errno.ELOOP, errno.ENAMETOOLONG) else 1
    if lost_worker(error):
        return (
            "a process that decodes images was killed, often for lack of memory: use fewer "
            "--workers; the same command goes on"
        ), 1
    library = library_imported(error)
    if lacks_memory(error):
        if library:
            return f"out of memory while {library} was imported: free some memory", 1
        return "out of memory: use a smaller batch or resolution", 2
    if library:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return (
            f"{library} could not be imported ({reason}): free some memory, or install it again"
        ), 1
    return defect(error), 1


def library_imported(error: Exception) -> str:
    """The library whose import raised `error`; "" if a call of this package raised it.

    A library that lacks memory for one of its parts may fail later with an unrelated message.
    """
    library = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == fullstride.__name__:
            library = ""
        elif frame.f_code.co_name == "<module>":
            library = library or package
    if isinstance(error, ImportError):  # the interpreter may raise it outside any module
        library = library or (error.name or "").partition(".")[0]
    return "" if library == fullstride.__name__ else library


def defect(error: Exception) -> str:
    """One line for an unforeseen error, with the place in our own code."""
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
    """Parse `words` into a command with its arguments, ready to be called.

    Raises ValueError in one line instead of the parser's frame.
    """
    name, arguments = command_in(words)
    if name not in COMMANDS:
        return partial(print, list_commands(name))
    command = COMMANDS[name]
    if takes_recipe(command):
        refuse_contradictions(arguments)
    if {*HELP, WHOLE_HELP, RECIPE_HELP} & set(arguments):
        return partial(print_help, name, arguments)
    output, task = StringIO(), task_in(name, arguments)
    try:
        with redirect_stderr(output):
            typed = deferred(command, task=task)
            call = tyro.cli(typed, args=arguments, prog=f"fullstride {name}")
    except SystemExit:
        message = console.without_frame(output.getvalue())
        is_about_recipe = message.startswith(RECIPE_ERROR)
        hint = "" if is_about_recipe else f"; see fullstride {name} --help"
        raise ValueError(message.removeprefix(RECIPE_ERROR) + hint) from None
    if not takes_recipe(command):
        return call
    source = call.keywords.pop("recipe_name")
    if source:
        find_recipe(source, NOMINAL)  # refuses an unknown name before data are read
    changes = {field: getattr(call.keywords["recipe"], field) for field in given_fields(arguments)}
    if task:
        values = call.keywords.pop("task_options")
        names = names_after(TASK_OPTION, arguments)
        options = {name: value for name, value in vars(values).items() if name in names}
        task.read_options(options)
        changes |= {"task_options": options} if options else {}
    return partial(call, recipe=RecipeChoice(source, changes))


def check_words(values: Mapping[str, Any]) -> None:
    """Raise ValueError for unknown tasks and formats, and for files that do not exist.

    PyTorch is not imported yet. `values` are the arguments of a command by name, some in
    dataclasses.
    """
    groups = [values, *(vars(value) for value in values.values() if is_dataclass(value))]
    tasks = [group["task"] for group in groups if group.get("task")]
    for name in tasks:
        check_name("task", name, TASKS)
    for group in groups:
        for name in group.get("formats", ()):
            check_name("format", name, FORMATS)
    for group in groups:
        models, images = words_of(group, MODEL_ARGUMENTS), words_of(group, ("images",))
        missing = [word for word in models if looks_like_path(word) and is_missing(word)]
        missing += images if all(map(is_missing, images)) else []
        if missing:
            refuse_missing(missing[0])
        for word in words_of(group, DATA_ARGUMENTS):
            if word and not os.path.exists(word):  # noqa: PTH110  names may be too long for `Path`
                from fullstride.data.targets import check_place

                check_place(word, tasks[0] if tasks else "")


def refuse_missing(word: str) -> None:
    """Raise ValueError with the exported file that has the name of a path, if there is one."""
    path = Path(word)
    if any(each.stem == path.stem for each in path.parent.glob("*")):
        from fullstride.deploy.formats import near

        if beside := near(path):
            raise ValueError(f"no file {word}: there is {beside}")
    raise ValueError(f"no such file or folder: {word}")


def words_of(group: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The words that are the values of some arguments, each one word or several."""
    values = (group.get(name, ()) for name in names)
    return [word for each in values for word in ([each] if isinstance(each, str) else each or ())]


def is_missing(word: str) -> bool:
    """Whether `word` is neither a path that exists nor a name or a pattern of other things."""
    is_other = word in ("-", "digits") or word.startswith(("timm/", "hf:")) or {*"*{?"} & {*word}
    return not is_other and not os.path.exists(word)  # noqa: PTH110


def command_in(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The name of the command, the first or the first two of `words`, and the remaining words."""
    length = 2 if words and words[0] in GROUPS else 1
    return " ".join(words[:length]), words[length:]


# Help.


def list_commands(name: str) -> str:
    """The help of all commands or of a group, each with its first sentence.

    Raises ValueError for the name of no command.
    """
    group, _, verb = name.partition(" ")
    if group not in GROUPS:
        group, verb = "", name
    if verb not in ("", *HELP, WHOLE_HELP):
        same = [command for command in COMMANDS if verb in command.split()]
        close = same or get_close_matches(name, [*COMMANDS, *GROUPS], n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else "see fullstride --help"
        raise ValueError(f"no command {name!r}: {hint}")
    lines = {
        verb: (COMMANDS[f"{group} {verb}".strip()].__doc__ or "").partition("\n")[0]
        for verb in verbs(group)
    }
    if not group:
        lines |= {name: f"{GROUPS[name]} Commands: {', '.join(verbs(name))}." for name in GROUPS}
    listing = "\n".join(
        fill(text, 80, initial_indent=f"  {verb:11}", subsequent_indent=13 * " ")
        for verb, text in lines.items()
    )
    usage = f"usage: {f'fullstride {group}'.strip()} COMMAND ..."
    return f"{usage}\n\n{GROUPS.get(group, DESCRIPTION)}\n\n{listing}"


def verbs(group: str) -> list[str]:
    """The last words of a group's commands; the group "" has commands of one word."""
    pairs = (name.rpartition(" ") for name in COMMANDS)
    return [verb for first, _, verb in pairs if first == group]


def print_help(name: str, arguments: Sequence[str]) -> None:
    """Print the help of a command: its usual flags and the number of other flags, or all flags."""
    command, recipe, task = COMMANDS[name], RECIPES["scratch"], task_in(name, arguments)
    if takes_recipe(command):
        named = recipe_in(name, arguments)
        if RECIPE_HELP in arguments:
            explain(named, task)
            return
        recipe = named.recipe
    prog, usual = f"fullstride {name}", USUAL.get(name)
    if usual and task:
        usual += "".join(f" {field.name}" for field in fields(task.options))
    flags = HelpFlags(name, None if WHOLE_HELP in arguments or not usual else usual.split())
    registry = ConstructorRegistry()
    registry.struct_rule(flags)
    typed = deferred(command, recipe, flags.mark, task=task)
    try:
        tyro.cli(typed, args=["--help"], prog=prog, registry=registry)
    except SystemExit:
        if flags.hidden:
            print(f"{console.count_of(len(flags.hidden), 'more flag')}: {prog} {WHOLE_HELP}")


class HelpFlags:
    """Shows the values of text flags in the parser's help, and hides flags from it.

    Beside required ones, `usual` parameters and fields are described; None for all.
    """

    def __init__(self, command: str, usual: Sequence[str] | None):
        self.command, self.usual = command, usual
        self.hidden, self.asks = set[tuple[str, Any]](), False

    def mark(self, name: str, hint: Any, owner: Any = None) -> Any:
        """The type of a flag with its values, marked as hidden if it is not usual."""
        kind = hint.__origin__ if get_origin(hint) is Annotated else hint
        values = VALUES.get(f"{self.command} {name}", VALUES.get(name))
        if values and kind in (str, str | None, tuple[str, ...]):
            hint = Annotated[hint, tyro.conf.arg(metavar=values)]
        never = name == "task_options"  # it has its own flags
        if never or self.usual is None or name in self.usual or is_dataclass(kind):
            return hint
        self.hidden.add((name, owner))
        return Annotated[hint, tyro.conf.Suppress]

    def __call__(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        """Mark flags that are fields of a dataclass, as a rule of the parser."""
        if self.asks or not is_dataclass(info.type):
            return None
        self.asks = True
        spec = ConstructorRegistry.get_struct_spec(info)  # the parser's own rules
        self.asks = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        marked = (
            replace(field, type=self.mark(field.name, field.type, info.type))
            for field in spec.fields
        )
        return replace(spec, fields=tuple(marked))


# Functions for the parser.


def deferred(
    command: Callable[..., None],
    recipe: Recipe = RECIPES["scratch"],
    mark: Callable[[str, Any], Any] = lambda name, hint: hint,
    requires: bool = True,
    task: "Task | None" = None,
) -> Callable[..., Any]:
    """Make a function with the arguments of `command` that returns the call as a partial.

    An argument that is a dataclass becomes a flag for each of its fields, and `recipe` becomes
    `--recipe NAME`, a flag for each field with the defaults of `recipe`, and one for each option of
    `task`. `mark` changes the types of arguments with a default, by name. Without `requires`,
    arguments without a default are None.
    """

    def bind(**values: Any) -> Callable[[], None]:
        return partial(command, **values)

    hints = get_type_hints(command, include_extras=True)
    parameters = []
    for name, parameter in signature(command).parameters.items():
        default, hint = parameter.default, hints[name]
        if name == "recipe":
            keyword = Parameter("recipe_name", Parameter.KEYWORD_ONLY, default="")
            parameters.append(keyword.replace(annotation=mark("recipe_name", RecipeName)))
            default, hint = RecipeFields(**vars(recipe)), RecipeFields
        elif isinstance(hint, type) and is_dataclass(hint):  # each field is a flag with its name
            default = hint() if default is Parameter.empty else default
            hint = Annotated[hint, tyro.conf.arg(name="")]
        elif default is not Parameter.empty:
            hint = mark(name, hint)
        elif not requires:
            default, hint = None, optional(hint)
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    if task:
        values = task.read_options(recipe.task_options)
        options = Parameter("task_options", Parameter.KEYWORD_ONLY, default=values)
        kind = Annotated[task.options, tyro.conf.arg(name="task")]
        parameters.append(options.replace(annotation=kind))
    bind.__dict__["__signature__"] = signature(bind).replace(parameters=parameters)
    bind.__annotations__ = {each.name: each.annotation for each in parameters}
    # each paragraph and argument in one line, which the parser breaks
    lines = cleandoc(command.__doc__ or "")
    bind.__doc__ = re.sub(r"(?<!\n)\n(?!\n| {4}\w+: )\s*", " ", lines)
    return bind


def optional(hint: Any) -> Any:
    """The type or None, with the same metadata."""
    metadata = getattr(hint, "__metadata__", ())
    either = (hint.__origin__ if metadata else hint) | None
    return Annotated[either, *metadata] if metadata else either


# The recipe of a command line.


def takes_recipe(command: Callable[..., None]) -> bool:
    return get_type_hints(command).get("recipe") is RecipeChoice


def refuse_contradictions(words: Sequence[str]) -> None:
    """Raise ValueError if a short flag and the flag of its field have different values."""
    for short, field in SHORT_FLAGS.items():
        values: dict[str, str] = {}
        for word, following in pairwise((*words, "")):
            flag, equals, value = word.partition("=")
            if flag.replace("_", "-") in (short, f"--recipe.{field.replace('_', '-')}"):
                values[flag] = value if equals else following
        if len(values) == 2 and len({number_in(value) for value in values.values()}) == 2:
            flags = " and ".join(f"{flag} {value}" for flag, value in values.items())
            raise ValueError(f"{flags} are the same setting: give one of them")


def number_in(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def given_fields(words: Sequence[str]) -> list[str]:
    """The fields of a recipe that flags among `words` set, even to the recipe's own value."""
    flags = {word.partition("=")[0].replace("_", "-") for word in words}
    names = names_after("--recipe.", words) | {SHORT_FLAGS[flag] for flag in flags & {*SHORT_FLAGS}}
    return [field.name for field in fields(Recipe) if field.name in names]


def names_after(prefix: str, words: Sequence[str]) -> set[str]:
    """The Python names of flags that begin with `prefix`; for `no-NAME` also NAME."""
    flags = [word.partition("=")[0].replace("-", "_") for word in words if word.startswith(prefix)]
    names = {flag[len(prefix) :] for flag in flags}
    return names | {name.removeprefix("no_") for name in names}


def task_in(command: str, words: Sequence[str]) -> "Task | None":
    """The task of `--task` if its options are given or need an explanation; else None.

    The import of tasks takes seconds. Raises ValueError for flags of a task without options.
    """
    flags = [word for word in words if word.startswith(TASK_OPTION)]
    places = [number for number, word in enumerate(words) if word.partition("=")[0] == "--task"]
    asks = {*HELP, WHOLE_HELP, RECIPE_HELP} & set(words)
    if not takes_recipe(COMMANDS[command]) or not (flags or (asks and places)):
        return None
    if not places:
        raise ValueError(f"{flags[0]}: name the task that has this option, by --task NAME")
    _, equals, value = words[places[-1]].partition("=")
    name = value if equals else "".join(words[places[-1] + 1 : places[-1] + 2])
    check_name("task", name, TASKS)
    from fullstride.tasks import find_task

    task = find_task(name)
    if fields(task.options):
        return task
    if flags:
        raise ValueError(f"{flags[0]}: the task {name} has no options of its own: leave it out")
    return None


def recipe_in(name: str, words: Sequence[str]) -> NamedRecipe:
    """The recipe chosen by `--recipe NAME`, or else DATA and `--weights`, before data are read.

    No argument is required. Flags of fields do not change the recipe, except the resolution, which
    other fields follow.
    """
    words = [word for word in words if word not in (*HELP, WHOLE_HELP, RECIPE_HELP)]
    try:
        with redirect_stderr(StringIO()):
            call, _ = tyro.cli(
                deferred(COMMANDS[name], requires=False),
                args=words,
                return_unknown_args=True,
                add_help=False,
                console_outputs=False,
            )
    except SystemExit:
        return NamedRecipe(RECIPES["scratch"], "scratch")
    values = call.keywords
    groups = (each for each in values.values() if isinstance(each, RunOptions))
    options = next(groups, RunOptions())
    case = replace(
        NOMINAL,
        has_weights=bool(options.weights),
        is_digits=values["data"] == "digits",
        width=options.width,
        resolution=values["recipe"].resolution if "resolution" in given_fields(words) else None,
    )
    recipe = values["recipe_name"] or default_recipe(case)
    return NamedRecipe(find_recipe(recipe, case), recipe, case)


def explain(named: NamedRecipe, task: "Task | None" = None) -> None:
    """Print the names of recipes, and each field of one recipe with value, help and short flag.

    The options of `task` follow.
    """
    print(fill(f"recipes: {', '.join(RECIPES)}", 100, subsequent_indent="  "))
    if named.name in BY_IMAGES:
        images = console.count_of(named.case.images, "image")
        print(f"{named.name} for {images}: its numbers follow the data, and training prints them")
    short = {field: f" ({flag})" for flag, field in SHORT_FLAGS.items()}
    rows = [
        (f"--recipe.{name.replace('_', '-'):22}", getattr(named.recipe, name), text, name)
        for name, text in field_help().items()
        if name != "task_options"
    ]
    if task:
        options = task.read_options(named.recipe.task_options)
        rows += [
            (f"{TASK_OPTION}{name.replace('_', '-'):24}", getattr(options, name), text, "")
            for name, text in field_help(task.options).items()
        ]
    for flag, value, text, name in rows:
        if isinstance(value, tuple):
            value = " ".join(f"{number:.4g}" for number in value)
        print(f"{flag} {value!s:>21}  {text}{short.get(name, '')}")
