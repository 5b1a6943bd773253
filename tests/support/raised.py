"""The messages of errors, as they stand in the code: what is filled in is an ellipsis."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.support.pages import ROOT

HOLE = "…"


@dataclass(frozen=True, slots=True)
class Raised:
    """Where an error of some class is made, and what it says."""

    where: str
    error: str
    message: str


def raised(folders: Iterable[str], errors: Iterable[str]) -> Iterator[Raised]:
    """
    Each place in the folders, or files, where one of the errors is made with a message that can be read there.

    A message in a variable is followed to its assignments in the same function.
    """
    wanted = set(errors)
    for folder in folders:
        place = ROOT / folder
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for function in [
                node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            ]:
                for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
                    name = getattr(call.func, "id", None)
                    if name in wanted and call.args:
                        where = f"{path.relative_to(ROOT)}:{call.lineno}"
                        yield from (Raised(where, name, text) for text in _texts(call.args[0], function))


def _texts(node: ast.expr, function: ast.AST) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            parts = [[HOLE] if isinstance(one, ast.FormattedValue) else _texts(one, function) for one in values]
            return [re.sub(f"{HOLE}+", HOLE, "".join(part[0] for part in parts))]
        case ast.BinOp(left=left, right=right):
            return [f"{a}{b}" for a in _texts(left, function) for b in _texts(right, function)]
        case ast.IfExp(body=body, orelse=other):
            return [*_texts(body, function), *_texts(other, function)]
        case ast.Name(id=name):
            found = [
                text
                for one in ast.walk(function)
                if isinstance(one, ast.Assign) and any(getattr(target, "id", None) == name for target in one.targets)
                for text in _texts(one.value, function)
            ]
            return found or [HOLE]
        case _:
            return [HOLE]
