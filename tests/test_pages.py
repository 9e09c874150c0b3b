"""The page check finds each defect it is there for, and nothing in a clean page."""

import json
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("pypandoc")
from pages import build, options
from signatures import defects

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
HOME = "/".join(["", "home", "someone"])
BIB = (
    "@book{knuth1984tex, title = {The TeXbook}, author = {Knuth, Donald}, year = {1984}, publisher = {Addison-Wesley}}"
)

CLEAN = [
    "See @sec-one, @fig-dot, @fig-div, @tbl-n, @tbl-code and @eq-sum, then [-@knuth1984tex] and [@knuth1984tex].\n\n## One {#sec-one}",
    "$$ 1 + 1 = 2 $$ {#eq-sum}\n\n| n |\n|---|\n| 1 |\n\n: Numbers {#tbl-n}",
    '::: {.callout-tip collapse="true"}\n## Mind\nthe gap, said [the other](lab/other.ipynb#sec-there)\n\n::: {.callout-note}\nAs in @tbl-in.\n\n| m |\n|---|\n| 2 |\n\n: More {#tbl-in}\n:::\n:::',
    '```{mermaid}\n%%| label: fig-flow\n%%| fig-cap: "The flow"\ngraph LR\n  a --> b\n```\n\n@fig-flow is drawn.',
    "::: {.callout-tip}\nHalve it.\n:::",
    "::: {#fig-div}\n![a dot](dot.png)\n\nA dot in a div.\n:::",
]


def image() -> dict:
    return {"output_type": "display_data", "metadata": {}, "data": {"image/png": PIXEL, "text/plain": "<Figure>"}}


def stream(text: str, name: str = "stdout") -> dict:
    return {"output_type": "stream", "name": name, "text": text}


def result(data: dict) -> dict:
    return {"output_type": "execute_result", "metadata": {}, "execution_count": None, "data": data}


def code(source: str, *outputs: dict) -> dict:
    return {"cell_type": "code", "metadata": {}, "execution_count": None, "source": source, "outputs": list(outputs)}


def markdown(source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def figure(options: str = "#| fig-alt: A dot.\n") -> dict:
    return code(f'#| label: fig-dot\n#| fig-cap: "A dot: black"\n{options}plot()', image())


def make_site(folder: Path, *cells: dict, sidebar=("index.ipynb", {"section": "Lab", "contents": ["lab/other.ipynb"]})):
    """Build a site of index.ipynb (the given cells, after its front matter) and lab/other.ipynb; returns the findings."""
    nbs = folder / "nbs"
    (nbs / "lab").mkdir(parents=True)
    (nbs / "dot.png").write_bytes(b"")
    head = {"cell_type": "raw", "metadata": {}, "source": "---\ntitle: Front\noutput-file: index.html\n---\n"}
    there = markdown("## There {#sec-there}\n\nBack to [front](../index.ipynb).\n\n### half {#half}")
    for name, page in {"index.ipynb": [head, *cells], "lab/other.ipynb": [there]}.items():
        numbered = [cell | {"id": str(i)} for i, cell in enumerate(page)]
        (nbs / name).write_text(json.dumps({"cells": numbered, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    (nbs / "sidebar.yml").write_text(json.dumps({"website": {"sidebar": {"contents": list(sidebar)}}}))
    (folder / "references.bib").write_text(BIB)
    return build(nbs, nbs, folder / "out", folder / "references.bib", "https://book.example")


@pytest.fixture
def site(tmp_path):
    return partial(make_site, tmp_path)


def test_clean_page(site, tmp_path):
    table = code(
        "#| label: tbl-code\n#| tbl-cap: Made by code\n#| code-fold: true\nTable()",
        result({"text/markdown": "| n |\n|---|\n| 1 |"}),
    )
    linked = markdown("[`half`](https://book.example/lab/other.html#half)")
    assert (
        site(
            *map(markdown, CLEAN),
            figure(),
            table,
            linked,
            code("1 / 2", stream("0.5 m/s, a/tmp/b, https://x.org/home/y")),
        )
        == []
    )
    html = (tmp_path / "out/index.html").read_text()
    for part in ("<math", 'class="mermaid"', "Figure 2: ", "Knuth 1984", "References", 'href="lab/other.html#sec-there"', 'href="lab/other.html#half"',
                 'alt="A dot."', '<details class="callout callout-tip">', "Code\n</summary>", 'id="tbl-code"', 'aria-current="page"', "Your turn", '<a href="lab/other.html">lab/other.ipynb →</a>'):  # fmt: skip
        assert part in html, part
    assert (tmp_path / "out/index_7_0.png").exists()
    assert "../index.html" in (tmp_path / "out/lab/other.html").read_text()


DEFECTS = {
    "an unresolved reference: @fig-none": markdown("As @fig-none shows."),
    "an unresolved reference: @sec-there": markdown("References stay on their page: [@sec-there]."),
    "an unresolved citation: @nobody2000": markdown("Said [@nobody2000; @knuth1984tex]."),
    "an image without alt text (#| fig-alt: ...)": figure(options=""),
    "an image without alt text: dot.png": markdown("![](dot.png)"),
    "an image without alt text": markdown("Raw <img src='dot.png'> markup."),
    f"a local path: {HOME}/data": code(f"open('{HOME}/data')"),
    f"a local path: {HOME}/notes": markdown(f"Kept in {HOME}/notes"),
    f"a local path: {HOME}/lib": code("warn()", stream(f"{HOME}/lib: UserWarning", "stderr")),
    f"a local path: {HOME}/out": code("#| output: false\nshow()", result({"text/html": f"<b>{HOME}/out"})),
    "an error in the output: ZeroDivisionError": code("1/0", {"output_type": "error", "ename": "ZeroDivisionError", "evalue": "", "traceback": []}),
    "an error in the output: a traceback": code("run()", stream("Traceback (most recent call last)\nKeyError: 1")),
    "a dead link: 07_none.ipynb": markdown("[next](07_none.ipynb)"),
    "a dead link: lab/other.ipynb#sec-here": markdown("[there](lab/other.ipynb#sec-here)"),
    "a dead link: none.png": markdown("![a dot](none.png)"),
    "a dead link: #here": markdown("[up](#here)"),
    "a dead link: lab/other.html#here": markdown("Raw <a href='lab/other.html#here'>markup</a>."),
    "a dead link: gone.html": code("show()", result({"text/html": "<a href='gone.html'>gone</a>"})),
    "a dead link: https://book.example/lab/other.html#third": markdown("[`third`](https://book.example/lab/other.html#third)"),
    "cell options that are not YAML": code("#| fig-cap: A dot: black\nplot()", image()),
    "the label eq-a a second time": markdown("$$ a $$ {#eq-a}\n\n$$ b $$ {#eq-a}"),
    "a callout that is none of": markdown("::: {.callout-important}\nMind.\n:::"),
    "a fence in the middle of a paragraph": markdown("Said. ::: {.callout-note}\nAside.\n:::"),
    "half has no docstring": code("#| exports\ndef half(x: int) -> int: return x // 2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> list[str]:
    """What is found in a page with all defects, one a cell, and a clean cell before each."""
    cells = [cell for defect in DEFECTS.values() for cell in (markdown("Nothing wrong here."), defect)]
    return make_site(tmp_path_factory.mktemp("defects"), *cells)


@pytest.mark.parametrize("number, what", enumerate(DEFECTS))
def test_defect_is_found(number, what, findings):
    found = [line for line in findings if line.startswith(f"index.ipynb cell {2 * number + 2}: ")]
    assert len(found) == 1 and found[0].startswith(f"index.ipynb cell {2 * number + 2}: {what}"), found


def test_nothing_but_the_defects_is_found(findings):
    assert len(findings) == len(DEFECTS), findings


def test_hidden_image_needs_no_alt_text(site):
    assert site(code("#| include: false\nplot()", image())) == []


def test_bad_formula_is_found(site):
    assert any("pandoc" in line for line in site(markdown(r"$$ \frac{1} $$")))


def test_sidebar_and_notebooks_agree(site):
    assert site(sidebar=["index.ipynb", "01_gone.ipynb"]) == [
        "sidebar.yml: lab/other.ipynb is missing",
        "sidebar.yml: there is no 01_gone.ipynb",
    ]


def test_the_sidebar_gives_a_page_another_title(site, tmp_path):
    assert site(sidebar=[{"text": "00 Front", "href": "index.ipynb"}, "lab/other.ipynb"]) == []
    assert ">00 Front</a>" in (tmp_path / "out" / "lab" / "other.html").read_text()


def test_options_are_read_as_yaml():
    source = '#| label: fig-a\n#| fig-alt:\n#|   - "one: 1"\n#|   - two\n#| slow\n\nplot()  # | not: this'
    assert options(source) == ({"label": "fig-a", "fig-alt": ["one: 1", "two"]}, "plot()  # | not: this")


SILENT = {
    "": "def half(x: int) -> int:\n    'The half.'\n    return x // 2",
    "half has no docstring": "def half(x: int) -> int: return x // 2",
    "half(x) has no type": "def half(x) -> int:\n    'The half.'\n    return x // 2",
    "half(more) has no type": "def half(**more):\n    'The half.'",
    "half does not say what it returns": "def half(x: int):\n    'The half.'\n    return x // 2",
    "half(x) has no shape": "def half(x: Tensor) -> Tensor:\n    'The half.'\n    return x / 2",
    "half(of) has no unit": "def half(of: float) -> float:\n    'The half.'\n    return of / 2",
    "Halver has no docstring": "class Halver:\n    def half(self):\n        'The half.'",
    "Halver.half has no docstring": "class Halver:\n    'Halves.'\n    def half(self):\n        pass",
    "Halver.of has no comment": "@dataclass\nclass Halver:\n    'Halves.'\n    of: str = '#'",
}


@pytest.mark.parametrize("what", SILENT)
def test_what_a_signature_leaves_unsaid_is_found(what):
    assert defects(SILENT[what]) == [what] * bool(what)


@pytest.mark.parametrize(
    "source",
    [
        "def _half(x): return x / 2",
        "def half(x: Tensor) -> Tensor:  # [B, S]\n    'The half.'\n    return x / 2",
        "def half(x: Tensor) -> Tensor:\n    'The half, [...].'\n    return x / 2",
        "def half(of: float) -> float:\n    'The half of `of` metres.'\n    return of / 2",
        "def wait(seconds: float):\n    'Wait.'",
        "class Halver:\n    'Halves.'\n    def half(self) -> int: return 2",
        "class Half(nn.Module):\n    'Halves, [B, S].'\n    def forward(self, x: Tensor) -> Tensor: return x / 2",
        "@dataclass\nclass Halver:\n    'Halves.'\n    of: int = 2  # parts\n    config: HalfConfig = None",
        "def outer():\n    'Does.'\n    def inner(x): return x",
    ],
)
def test_what_a_signature_says_is_enough(source):
    assert defects(source) == []
