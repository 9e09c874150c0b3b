"""The reference of the package, read from its source while the site is built.

griffe reads the modules without importing them. Each public name gets a heading, its signature with one parameter a
line, its docstring, and a table of its parameters: type, default and meaning. A meaning is the comment at the end of
a parameter's line, the second argument of `option(default, meaning)`, or the help of a command line option.

`pages` makes one notebook for each module, and `overview` the list of all names. `brief` is what a chapter shows
below a cell that it exports; `ShowSource` puts it there, as the last step of nbdev's processing (see settings.ini).
"""

import ast
import json
import re
from configparser import ConfigParser
from functools import cache
from pathlib import Path

import griffe
import nbformat
from nbdev.doclinks import NbdevLookup
from nbdev.process import Processor

ROOT = Path(__file__).resolve().parents[1]
SHOWN = re.compile(r"^show_doc\(([\w.]+)\)", re.M)
CHAPTER = re.compile(r"File to edit: (?:\.\./)+nbs/(\S+\.ipynb)")
SPECIAL = ("__call__",)  # the special methods that a reader calls
LIST_HERE = "<!-- every name -->"
LISTED = 72  # characters of a signature, or of a constant, that still fit in a line


@cache
def settings() -> dict[str, str]:
    """settings.ini, which has the address of the repository."""
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(parser["DEFAULT"])


@cache
def package() -> griffe.Module:
    """The package, read and not imported."""
    return griffe.load(settings()["lib_name"], search_paths=[ROOT])


@cache
def comments(path: Path) -> dict[int, str]:
    """The comment that ends a line of code, by line number."""
    found = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.arg | ast.AnnAssign | ast.Assign | ast.expr):
            line = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
            if match := re.fullmatch(r"[\s,():\[\]{}]*(?:= ?[^#]*)?#(?!\|)\s*(.*)", line):
                found[node.end_lineno] = match[1].strip()
    return found


def public(parent: griffe.Object) -> list[griffe.Object]:
    """The members that a reader is meant to use, in the order of the source: of a module, those of `__all__`."""
    members = [m for m in parent.members.values() if not m.is_alias and not m.is_module]
    members = [m for m in members if not m.name.startswith("_") or m.name in SPECIAL]
    if parent.is_module and parent.exports is not None:
        members = [m for m in members if m.name in parent.exports]
    return sorted(members, key=lambda member: member.lineno)


@cache
def exported() -> set[str]:
    """Every name that a module of the package exports."""
    return {member.name for module in modules() for member in public(module)}


def anchor(member: griffe.Object) -> str:
    """The part of the link to a name that follows the #."""
    return member.path.removeprefix(member.module.path + ".").replace(".", "-")


def shown_type(annotation: griffe.Expr | str | None, scope: griffe.Object) -> str:
    """A type as a reader sees it: of an option of the command line, what stands before its help."""
    text = str(annotation or "").strip("'\"")
    if text.startswith("Annotated["):
        return ast.unparse(ast.parse(text, mode="eval").body.slice.elts[0])
    given = option_alias(text, scope)
    return ast.unparse(given[0]) if given else text


def option_alias(name: str, scope: griffe.Object) -> tuple[ast.expr, str] | None:
    """Type and help of a name such as `Seeds = Annotated[int, arg(help="Seeds.")]`; None for other names."""
    member = scope.module.members.get(name)
    if member is None or member.is_alias or not member.is_attribute or "Annotated[" not in str(member.value):
        return None
    tree = ast.parse(str(member.value), mode="eval").body
    texts = [k.value for call in ast.walk(tree) if isinstance(call, ast.Call) for k in call.keywords if k.arg == "help"]
    inner = next(n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and ast.unparse(n.value) == "Annotated")
    return inner.slice.elts[0], " ".join(ast.literal_eval(text) for text in texts)


def option(default: str) -> tuple[str, str]:
    """Default and meaning of a field made by `option(default, meaning, ...)`; others have no meaning here."""
    call = ast.parse(default, mode="eval").body
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != "option":
        factory = re.fullmatch(r"field\(default_factory=(\w+)\)", default)
        return (f"{factory[1]}()" if factory else default), ""
    value, meaning = call.args
    meaning = ast.literal_eval(meaning)
    limits = []
    for given in call.keywords:
        if given.arg == "choices":
            meaning += ": " + ", ".join(f"`{choice}`" for choice in choices(given.value))
        else:
            limits.append(f"{given.arg.replace('_', ' ')} {ast.unparse(given.value)}")
    return ast.unparse(value), meaning + (f" ({', '.join(limits)})" if limits else "")


def choices(value: ast.expr) -> list[str]:
    """The names in a tuple of choices; one that is made by code is shown as that code."""
    try:
        return list(ast.literal_eval(value))
    except ValueError:
        return [ast.unparse(value)]


@cache
def functions(path: Path) -> dict[tuple[str, int], ast.FunctionDef]:
    """The functions of a file, by name and last line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {(n.name, n.end_lineno): n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def line_of(function: griffe.Function) -> dict[str, int]:
    """The line on which each parameter of a function ends, and `return` for its result."""
    node = functions(function.filepath)[function.name, function.endlineno]
    known = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    lines = {arg.arg: arg.end_lineno for arg in known if arg is not None}
    defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    for name, line in lines.items():  # a long default ends later than its parameter
        later = [d.end_lineno for d in defaults if d.lineno == line]
        lines[name] = max([line, *later])
    return lines | ({"return": node.returns.end_lineno} if node.returns else {})


def parameters(member: griffe.Function | griffe.Class) -> list[tuple[str, str, str, str]]:
    """Name, type, default and meaning of what a function or a class takes; a field's meaning may lie in a base."""
    said = comments(member.filepath)
    function = member if member.is_function else member.members.get("__init__")
    written = function is not None and not function.is_alias and "dataclass" not in member.labels
    lines = line_of(function) if written else {}
    if len(set(lines.values())) == 1:
        said = {}  # see `remark`
    rows = []
    for parameter in member.parameters:
        if parameter.name in ("self", "cls", "ctx"):
            continue
        fields = [] if lines else [c.members[parameter.name] for c in family(member) if parameter.name in c.members]
        field = fields[0] if fields else None
        note = said.get(lines[parameter.name], "") if lines else ""
        if field is not None:
            note = comments(field.filepath).get(field.endlineno, "")
        default, meaning = option(str(parameter.default)) if parameter.default is not None else ("", "")
        given = option_alias(str(parameter.annotation or ""), field or member)
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(parameter.kind.value, "")
        default = "" if star else default
        kind = shown_type(parameter.annotation, field or member)
        rows.append((star + parameter.name, kind, default, meaning or note or (given[1] if given else "")))
    return rows


def remark(member: griffe.Object) -> str:
    """The comment beside a function that is defined in one line: it is about all that goes in and out."""
    if not member.is_function:
        return ""
    lines = set(line_of(member).values())
    return comments(member.filepath).get(lines.pop(), "") if len(lines) == 1 else ""


def family(member: griffe.Object) -> list[griffe.Class]:
    """A class and the classes of the package that it extends."""
    return [member, *member.mro()] if member.is_class else []


def docstring(member: griffe.Object) -> str:
    """A docstring, or for a method without one that of the method it overrides; examples become code."""
    own = member.docstring.value if member.docstring else ""
    if not own and member.parent.is_class:
        above = [c.members[member.name] for c in member.parent.mro() if member.name in c.members]
        own = next((m.docstring.value for m in above if m.docstring), "")
    examples = re.compile(r"(?m)^(>>> .*(?:\n(?!\s*$).*)*)")
    lines, fenced = [], False
    for line in examples.sub(r"```python\n\1\n```", own).splitlines():
        fenced ^= line.startswith("```")
        as_it_stands = fenced or line.startswith(("```", "    "))
        lines.append(line if as_it_stands else prose(line))
    return "\n".join(lines)


def bases(member: griffe.Class) -> str:
    """The classes that a class extends, in brackets."""
    return f"({', '.join(map(str, member.bases))})" if member.bases else ""


def signature(member: griffe.Object, with_comments: bool = False) -> str:
    """The signature as code, one parameter a line where a line does not hold them all."""
    if member.is_attribute:  # a property
        result = f" -> {member.annotation}" if member.annotation else ""
        return f"@property\ndef {member.name}(self){result}"
    rows = parameters(member)
    result = f" -> {member.returns}" if member.is_function and member.returns is not None else ""
    result = result.replace("'", "")
    opening = f"class {member.name}" if member.is_class else f"def {member.name}"
    decorators = [f"@{label}\n" for label in ("classmethod", "staticmethod") if label in member.labels]
    given = []
    for name, kind, default, _ in rows:
        typed = f"{name}: {kind}" if kind else name
        equals = " = " if kind else "="
        given.append(typed + (f"{equals}{default}" if default else ""))
    if member.is_class and not rows:
        return opening + bases(member)
    noted = with_comments and any(row[3] for row in rows)
    line = f"{opening}({', '.join(given)}){result}"
    if len(line) <= LISTED and not noted and not (member.is_class and len(rows) > 1):
        return "".join(decorators) + line + (f"  # {remark(member)}" if remark(member) else "")
    notes = [f"  # {row[3]}" if with_comments and row[3] else "" for row in rows]
    lines = [f"    {text},{note}" for text, note in zip(given, notes, strict=True)]
    closing = f"){result}" + (f"  # {remark(member)}" if remark(member) else "")
    return "".join(decorators) + "\n".join([f"{opening}(", *lines, closing])


def source_link(member: griffe.Object) -> str:
    """The address of a definition in the repository."""
    cfg = settings()
    path = member.filepath.relative_to(ROOT).as_posix()
    lines = "" if member.is_module else f"#L{member.lineno}-L{member.endlineno}"
    return f"{cfg['git_url']}/blob/{cfg['branch']}/{path}{lines}"


def cell(text: str) -> str:
    """A text as it stands in a table of Markdown."""
    return re.sub(r"\s*\n\s*", " ", text).replace("|", r"\|")


def prose(text: str) -> str:
    """A comment as Markdown: what is in backticks is code, all else is to be read as it stands."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if i % 2 else re.sub(r"([\\*_$<>\[\]@~^])", r"\\\1", part) for i, part in enumerate(parts))


def code(text: str) -> str:
    """A piece of code in a table of Markdown."""
    return f"`{cell(text)}`" if text else ""


def linked(text: str, scope: griffe.Object) -> str:
    """Markdown in which a name of the package in backticks leads to its place in the reference."""

    def link(match: re.Match) -> str:
        target = resolved(match[1], scope)
        return f"[`{match[1]}`]({target})" if target else match[0]

    fence = re.compile(r"(?ms)^```.*?^```$")
    parts, at = [], 0
    for block in fence.finditer(text):
        parts += [re.sub(r"(?<!\[)`([A-Za-z_][\w.]*)`", link, text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, re.sub(r"(?<!\[)`([A-Za-z_][\w.]*)`", link, text[at:])])


def resolved(name: str, scope: griffe.Object) -> str:
    """Where the reference explains a name that is used in `scope`; empty for a name that is not of the package."""
    try:
        path = scope.resolve(name.partition(".")[0]) + name[len(name.partition(".")[0]) :]
        target = package()[path.removeprefix(package().path + ".")]
        target = target.final_target if target.is_alias else target
    except (griffe.NameResolutionError, griffe.AliasResolutionError, KeyError):
        return ""
    documented = target.is_class or target.is_function
    if not documented or target not in [*public(target.parent)] or target.path == scope.path:
        return ""
    return f"{target.module.name}.ipynb#{anchor(target)}"


def table(member: griffe.Function | griffe.Class) -> str:
    """The parameters as a table, and the result where a comment says what it is."""
    given = parameters(member)
    rows = [f"| {code(n)} | {cell(linked(prose(m), member))} | {code(k)} | {code(d)} |" for n, k, d, m in given]
    meanings = [row[3] for row in given]
    if member.is_function and member.returns is not None and not remark(member):
        result = comments(member.filepath).get(line_of(member)["return"], "")
        meanings.append(result)
        if result:
            rows.append(f"| *returns* | {cell(linked(prose(result), member))} | {code(str(member.returns))} | |")
    if not any(meanings):
        return ""  # the signature says it all
    return "\n".join(["| name | meaning | type | default |", "|---|---|---|---|", *rows])


def attributes(member: griffe.Class) -> str:
    """What a class that is no dataclass sets for all its objects, where a comment says what it means."""
    if "dataclass" in member.labels:
        return ""
    said = comments(member.filepath)
    found = [m for m in public(member) if m.is_attribute and "class-attribute" in m.labels]
    rows = [(m.name, str(m.value), said.get(m.endlineno, "")) for m in found]
    rows = [f"| {code(n)} | {cell(linked(prose(meaning), member))} | {code(v)} |" for n, v, meaning in rows if meaning]
    return "\n".join(["| attribute | meaning | value |", "|---|---|---|", *rows]) if rows else ""


def entry(member: griffe.Object, level: int = 2) -> list[str]:
    """The paragraphs about one name, and about its methods."""
    within = member.path.removeprefix(member.module.path + ".")
    title = f"{'#' * level} {prose(within)} {{#{anchor(member)}}}"
    head = [title, f"[source]({source_link(member)})", f"```python\n{signature(member)}\n```"]
    if member.is_class and member.bases and member.parameters:
        head.append(f"Extends {', '.join(linked(f'`{base}`', member) for base in member.bases)}.")
    parts = [*head, linked(docstring(member), member), "" if member.is_attribute else table(member)]
    if member.is_class:
        parts.append(attributes(member))
        for method in public(member):
            if method.is_function or "property" in method.labels:
                parts += entry(method, level + 1)
    return [part for part in parts if part]


def constants(module: griffe.Module) -> str:
    """The constants of a module, as a table."""
    said, rows = comments(module.filepath), []
    for member in public(module):
        value = cell(str(member.value)) if member.is_attribute else ""
        if not value or "Annotated[" in value:
            continue
        short = value if len(value) <= LISTED else value[:LISTED].rstrip() + " …"
        rows.append(
            f"| [`{member.name}`]({source_link(member)}) | `{short}` | {cell(prose(said.get(member.endlineno, '')))} |"
        )
    return "\n".join(["| constant | value | meaning |", "|---|---|---|", *rows]) if rows else ""


def chapter(module: griffe.Module) -> str:
    """The notebook that a module is exported from; empty for a plain module."""
    match = CHAPTER.search(module.filepath.read_text(encoding="utf-8"))
    return match[1] if match else ""


def modules() -> list[griffe.Module]:
    """The modules of the method in the order of their chapters, then those of each wing; plain modules last."""
    found = []
    for name, module in package().modules.items():
        if not name.startswith("_"):
            found += module.modules.values() or [module]  # a wing is a package
    found = [module for module in found if not module.name.startswith("_")]
    return sorted(found, key=lambda module: (wing(module), chapter(module) or "~", module.name))


def wing(module: griffe.Module) -> int:
    """The place of a module's wing in the reference."""
    return ["", "engine", "app", "lab"].index(title(module).rpartition(".")[0])


def title(module: griffe.Module) -> str:
    """The name of a module within the package, such as `engine.hardware`."""
    return module.path.partition(".")[2]


def first_line(member: griffe.Object) -> str:
    """The first line of a docstring."""
    return docstring(member).partition("\n")[0] if member.is_function or member.is_class else ""


def names(module: griffe.Module, folder: str = "") -> str:
    """The functions and classes of a module with a line on each; `folder` leads from the page to the reference."""
    found = [m for m in public(module) if m.is_function or m.is_class]
    place = f"{folder}{module.name}.ipynb"
    rows = [f"| [`{m.name}`]({place}#{anchor(m)}) | {cell(first_line(m))} |" for m in found]
    return "\n".join(["| name | what it is for |", "|---|---|", *rows]) if rows else ""


def page(module: griffe.Module) -> dict:
    """The notebook about one module."""
    summary = (module.docstring.value if module.docstring else "").partition("\n")[0].rstrip(".")
    meta = {"title": title(module), "description": plain(summary), "repo-actions": False, "toc-depth": 2}
    head = "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in meta.items()), "---"])
    origin = chapter(module)
    number = re.match(r"\d+[a-z]?", origin)
    name = f"chapter {number[0].lstrip('0')}" if number else "its page"
    place = f"explained and built in [{name}](../{origin})"
    if not origin:
        place = f"a plain module beside the chapters, of which this is the [source]({source_link(module)})"
    parts = [f"`{module.path}`: {place}.", constants(module), names(module)]
    for member in public(module):
        if member.is_function or member.is_class:
            parts += entry(member)
    return notebook(head, *[part for part in parts if part])


def plain(text: str) -> str:
    """A text without the marks of Markdown."""
    return text.replace("`", "")


def notebook(head: str, *cells: str) -> dict:
    """A notebook of a raw cell with the front matter, and cells of Markdown."""
    made = [{"cell_type": "raw", "id": "front", "metadata": {}, "source": head}]
    for i, source in enumerate(cells):
        made.append({"cell_type": "markdown", "id": f"part-{i}", "metadata": {}, "source": source})
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def overview() -> str:
    """Every name of the package, module by module."""
    parts = []
    for module in modules():
        summary = (module.docstring.value if module.docstring else "").partition("\n")[0]
        parts += [f"## [{title(module)}](api/{module.name}.ipynb) {{#{module.name}}}", summary, names(module, "api/")]
    return "\n\n".join(part for part in parts if part)


def write(processed: Path):
    """Put the pages of the reference beside the notebooks that nbdev made ready for Quarto."""
    folder = processed / "api"
    folder.mkdir(exist_ok=True)
    for module in modules():
        # nbformat writes a text as a list of lines; of one string, Quarto would lose the ends of lines.
        nbformat.write(nbformat.from_dict(page(module)), folder / f"{module.name}.ipynb")


def brief(member: griffe.Object, up: str) -> str:
    """What a chapter shows of a definition: signature, meanings as comments, docstring, and where to read more."""
    place = f"{up}api/{member.module.name}.ipynb#{anchor(member)}"
    links = f"[source]({source_link(member)}) · [reference]({place})"
    title = f"### {prose(member.name)}"
    first, *rest = docstring(member).split("\n\n")
    said = NbdevLookup().linkify("\n\n".join([f"*{first}*" if first else "", *rest]))
    return "\n\n".join([title, links, f"```python\n{signature(member, True)}\n```", said])


def place_of(nb) -> str:
    """The path of a notebook within nbs/; empty for one that has no file."""
    path = getattr(nb, "path_", None)
    return Path(path).resolve().relative_to(ROOT / "nbs").as_posix() if path else ""


class ShowSource(Processor):
    """Fills each `show_doc` cell that nbdev puts below an exported cell, and the place for the list of all names."""

    def __init__(self, nb):
        super().__init__(nb)
        given = [c.directives_["default_exp"] for c in nb.cells if "default_exp" in c.directives_]
        self.module = given[0][0] if given else ""
        self.up = "../" * place_of(nb).count("/")

    def cell(self, cell):
        if cell.cell_type == "markdown" and cell.get("source", "").strip() == LIST_HERE:
            cell.source = overview()
        if cell.cell_type != "code" or not (shown := SHOWN.search(cell.get("source", ""))):
            return
        text = brief(package()[f"{self.module}.{shown[1]}"], self.up)
        data = {"text/markdown": text, "text/plain": shown[1]}
        cell.outputs = [{"output_type": "display_data", "metadata": {}, "data": data}]


class HideCells(Processor):
    """Takes away the source of cells that a reader does not need: `#| export`, `#| hide` and `#| default_exp`.

    nbdev's own step would hide `#| exporti` as well. Such a cell defines what only its module uses; it is not in
    `__all__` nor in the reference, and its page shows it.
    """

    def cell(self, cell):
        if cell.directives_.keys() & {"export", "hide", "default_exp"}:
            del cell["source"]
