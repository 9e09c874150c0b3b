"""What the signatures of an exported cell leave unsaid.

The site's reference is made of them, so each public name says what it is for, what it takes and what it gives back:
a docstring; a type for each parameter and result; the shape of each tensor; the unit of each float; and a comment
beside each field of a dataclass, but where its type is a class of the book, which has its own. A method that overrides
one of a base class in the book has that one's docstring, as `help` shows it. A shape is anything in
brackets, [B, S] or [...], or the word scalar, in the comment beside the parameter or in the docstring; a unit is the parameter's name in
the docstring, a comment beside it, or the name itself.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "cramming_nb"

SAID_BY_CLASS = {"forward", "backward", "main"}  # what a module, a rule of autograd or a command is there for
UNITS = {"seconds", "tokens", "fraction", "loss", "lr", "probability", "dropout", "threshold", "second", "flops"}
UNITS |= {"t"}  # the fraction of the budget, throughout the book
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public(name: str) -> bool:
    """Whether a reader is meant to use it."""
    return not name.startswith("_") or name in ("__init__", "__call__")


def parameters(function: Function) -> list[ast.arg]:
    """All that a function takes, but for the object itself."""
    a = function.args
    found = [*a.posonlyargs, *a.args, *filter(None, [a.vararg]), *a.kwonlyargs, *filter(None, [a.kwarg])]
    return [p for p in found if p.arg not in ("self", "cls", "ctx") and not p.arg.startswith("_")]


def gives(function: Function) -> bool:
    """Whether a function returns or yields something, functions inside it left out."""
    todo = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value is not None:
            return True
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            todo += ast.iter_child_nodes(node)
    return False


@cache
def documented() -> dict[str, set[str]]:
    """The methods with a docstring of each class of the package."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                methods = [m for m in node.body if isinstance(m, Function)]
                found[node.name] = {m.name for m in methods if ast.get_docstring(m)}
    return found


def is_option(value: ast.expr | None) -> bool:
    """Whether a field is made by `option(default, meaning, ...)`, which says what it means."""
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "option" and len(value.args) == 2


class Cell:
    """One exported cell, read for what is missing."""

    def __init__(self, source: str):
        self.lines, self.tree = source.splitlines(), ast.parse(source)

    def comment(self, node: ast.AST) -> str:
        """The comment at the end of a node's last line."""
        return self.lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().partition("#")[2]

    def defects(self) -> Iterator[str]:
        """One line for each thing that is not said."""
        yield from self.of(self.tree.body, "", "")

    def of(self, body: list[ast.stmt], prefix: str, told: str, inherited: frozenset = frozenset()) -> Iterator[str]:
        """The defects of a module's statements, or of a class's, whose docstring is `told`."""
        for node in body:
            if isinstance(node, ast.ClassDef) and public(node.name):
                yield from self.class_(node, prefix)
            elif isinstance(node, Function) and public(node.name):
                yield from self.function(node, prefix, told, node.name in inherited)

    def class_(self, node: ast.ClassDef, prefix: str) -> Iterator[str]:
        """A class, its fields and its methods."""
        name, told = prefix + node.name, ast.get_docstring(node) or ""
        if not told:
            yield f"{name} has no docstring"
        if any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            fields = [s for s in node.body if isinstance(s, ast.AnnAssign)]
            fields = [f for f in fields if not re.fullmatch(r"(?!Path)[A-Z]\w+", ast.unparse(f.annotation))]
            for field in fields:
                above = self.lines[field.lineno - 2].strip().startswith("#")
                if not (self.comment(field).strip() or above or is_option(field.value)):
                    yield f"{name}.{field.target.id} has no comment"
        bases = [documented().get(ast.unparse(base), set()) for base in node.bases]
        yield from self.of(node.body, name + ".", told, frozenset().union(*bases))

    def function(self, node: Function, prefix: str, told: str, inherits: bool) -> Iterator[str]:
        """A function or a method."""
        name, said = prefix + node.name, f"{told} {ast.get_docstring(node) or ''}"
        special = node.name.startswith("__") or bool(told) and node.name in SAID_BY_CLASS
        plain = bool(told) and node.lineno == node.end_lineno  # a method of one line shows what it does
        if not (ast.get_docstring(node) or special or plain or inherits):
            yield f"{name} has no docstring"
        if node.returns is None and gives(node) and not special:
            yield f"{name} does not say what it returns"
        for p in parameters(node):
            kind, comment = ast.unparse(p.annotation or ast.Constant("")), self.comment(p)
            if p.annotation is None:
                yield f"{name}({p.arg}) has no type"
            elif re.fullmatch(r"Tensor( \| None)?", kind) and not re.search(r"\[.+?\]|\bscalar\b", said + comment):
                yield f"{name}({p.arg}) has no shape"
            elif re.fullmatch(r"float( \| None)?", kind) and not (comment or re.search(rf"\b{p.arg}\b", said)):
                if p.arg.rpartition("_")[2] not in UNITS:
                    yield f"{name}({p.arg}) has no unit"


def defects(source: str) -> list[str]:
    """What the definitions in an exported cell leave unsaid, one line each."""
    return list(Cell(source).defects())
