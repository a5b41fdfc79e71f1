"""Functions stay small: few parameters, short bodies, and no bags of keywords."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "fullstride"
MOST_PARAMETERS, MOST_LINES = 8, 60
# Of these the parameters are dictated: by what the device computes, or by an operator's schema.
DICTATED = ("triton.jit", "operator(", "register_fake")
# Calls of the form dict(name=value), which may only become fewer.
MOST_KEYWORD_BAGS = 60

# "file function" -> why it is still larger. An entry that is no longer needed fails the test.
PENDING: dict[str, str] = {}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(SOURCE)} {node.name}", node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without self and cls; *args and **kwargs are one each."""
    of = function.args
    names = [each.arg for each in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
    stars = (of.vararg is not None) + (of.kwarg is not None)
    return len(names) + stars - (names[:1] in (["self"], ["cls"]))


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of the body without the docstring."""
    body = function.body[ast.get_docstring(function) is not None :]
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def is_dictated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = " ".join(ast.unparse(each) for each in function.decorator_list)
    return any(each in decorators for each in DICTATED)


def test_no_function_has_more_than_8_parameters_or_60_lines():
    large = {}
    for name, function in functions():
        found = parameters(function), lines(function)
        too_many = found[0] > MOST_PARAMETERS and not is_dictated(function)
        if too_many or found[1] > MOST_LINES:
            large[name] = "{} parameters and {} lines".format(*found)
    unexpected = {name: found for name, found in large.items() if name not in PENDING}
    assert not unexpected, "use a frozen dataclass of options, or functions for the parts"
    assert not set(PENDING) - set(large), "these are small now: take them out of PENDING"


def test_keyword_bags_become_fewer():
    bags = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "dict"
        and any(each.arg for each in node.keywords)
    ]
    assert len(bags) <= MOST_KEYWORD_BAGS, bags
