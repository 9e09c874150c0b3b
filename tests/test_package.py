"""The package stays small enough to be read."""

import ast
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "cramming_nb"
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def is_said(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or the list of names that nbdev generates."""
    if isinstance(node, ast.Assign):
        return getattr(node.targets[0], "id", "") == "__all__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def code_lines(path: Path) -> int:
    """Lines that hold code: no blanks, comments, docstrings, or generated names."""
    source, lines = path.read_text(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if is_said(node):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_the_package_stays_under_4000_lines():
    sizes = {path.name: code_lines(path) for path in sorted(PACKAGE.glob("*.py")) if path.name != "_modidx.py"}
    assert len(sizes) > 10
    assert sum(sizes.values()) < 4000, sizes
