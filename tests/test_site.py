"""The site check sees what a browser sees, and the build of the site takes no warning for an answer."""

import json
import shutil

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("pypandoc")
import book
import pypandoc
import site_check

PAGE = '<!doctype html><html lang="en"><title>A page</title><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><body style="margin:0"><main>{}</main>'
PAGES = {
    "good.html": "<h1>Fine</h1><a href='#fine'>up</a><p id='fine'>Fine.</p><div style='overflow-x:auto'><div style='width:2000px'>scrolls by itself</div></div>",
    "wide.html": "<p>Narrow.</p><pre style='width:700px'>too wide</pre>",
    "lab/loud.html": "<script>console.error('it', 'fell'); throw new Error('over')</script><img src='gone.png' alt='gone'>"
    "<script src='http://cdn.invalid/a.js'></script>",
    "faint.html": "<p style='color:#bbb;background:#fff'>Hardly read.</p>",
    "dead.html": "<a href='nowhere.html'>out</a> <a href='good.html#none'>past</a> <a href='good.html#fine'>there</a>",
}


@pytest.mark.skipif(not site_check.browser(), reason="there is no browser")
def test_pages_in_a_browser(tmp_path, capsys):
    for name, body in PAGES.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(PAGE.format(body))
    found = site_check.check(tmp_path / "site", tmp_path / "shots", site_check.browser())
    assert not [line for line in found if line.startswith("good.html")]
    assert [line for line in found if "wide.html" in line] == [
        "wide.html: scrolls sideways at 390 px, 700 px wide: <pre> too wide"
    ]
    loud = " ".join(line for line in found if line.startswith("lab/loud.html"))
    assert all(part in loud for part in ("it fell", "a script failed: over", "lab/gone.png", "http://cdn.invalid/a.js"))
    faint = [line for line in found if line.startswith("faint.html")]
    assert faint and all("color-contrast (serious)" in line for line in faint)
    dead = [line for line in found if line.startswith("dead.html") and "a dead link" in line]
    assert len(dead) == 2 and "nowhere.html" in " ".join(dead) and "#none" in " ".join(dead)
    assert len(list((tmp_path / "shots").glob("*.jpg"))) == 20
    assert (tmp_path / "shots" / "lab-loud-390-dark.jpg").stat().st_size > 500


def test_links_of_the_404_page_begin_with_the_base_of_the_site(tmp_path):
    base = book.settings()["doc_baseurl"]
    links = f"<a href='{base}/api/a.html#one'>good</a> <a href='{base}/b.html'>bad</a>"
    (tmp_path / "api").mkdir()
    (tmp_path / "api/a.html").write_text(PAGE.format("<p id='one'>One.</p>"))
    (tmp_path / "404.html").write_text(PAGE.format(links))
    assert site_check.dead_links(tmp_path, ["404.html", "api/a.html"]) == [f"404.html: a dead link: {base}/b.html"]


def test_names_are_no_links_within_links_and_code(tmp_path, monkeypatch):
    monkeypatch.setattr(book.reference, "exported", lambda: {"f", "g", "C"})
    def linked(name):
        return f"[`{name}`]({book.site()}/a.html#{name})"

    assert book.mend_links(f"[06: {linked('f')} of {linked('C')}](06.ipynb)") == "[06: `f` of `C`](06.ipynb)"
    assert book.mend_links(f"[{linked('f')}](06.ipynb#f), [{linked('g')}](b)") == "[`f`](06.ipynb#f), [`g`](b)"
    plain = f"See {linked('f')}, [it](a.html) and {linked('g')}."
    assert book.mend_links(plain) == plain
    assert book.mend_links(f"{linked('f')} and {linked('internal')}") == f"{linked('f')} and `internal`"
    code = f'{plain}\n```python\n"A {linked("C")}."\n```\n{plain}'
    assert book.mend_links(code, is_output=True) == f'{plain}\n```python\n"A `C`."\n```\n{plain}'
    (tmp_path / "a.html").write_text(PAGE.format(f"<p>{linked('f')}</p><pre>{linked('f')}</pre>"))
    assert len(site_check.raw_markdown(tmp_path, ["a.html"])) == 1


def test_no_browser_is_said_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(SystemExit) as ended:
        site_check.main()
    assert not ended.value.code
    assert capsys.readouterr().out.count("\n") == 1


def test_warnings_of_quarto_are_found():
    log = (
        "[ 1/24] budget.ipynb\n\x1b[33mWARN: Unable to resolve link target: gone.qmd\x1b[39m\n"
        "[WARNING] Citeproc: citation nobody2000 not found\nWARNING (crossref.lua) Unable to resolve crossref @fig-none\n"
        "Output created: _docs/index.html\n"
    )
    assert len(book.warnings(log)) == 3
    assert book.warnings("[ 1/2] guides/faults.ipynb\nOutput created: _docs/index.html\n") == []


IMPORTS = "from a import (b,\n    c)\nimport d"
LONG = "\n".join(f"x{i} = {i}" for i in range(61))


@pytest.mark.parametrize(
    ("given", "code", "output", "summary"),
    [
        ("", IMPORTS, "", "Imports"),
        ("", IMPORTS + "\nb()", "", None),
        ("", "plot()", "![a dot](dot.png)", "Code of the figure"),
        ("", LONG, "", "Code (61 lines)"),
        ('code-fold="show" code-summary="Exported source"', LONG, "", "Exported source (61 lines)"),
        ('code-fold="false"', LONG, "", None),
        ("", "x = 1", "", None),
        ("", "\n".join(LONG.splitlines()[:60]), "", None),
    ],
)
def test_what_is_folded(given, code, output, summary):
    source = f"::: {{.cell}}\n``` {{.python .cell-code {given}}}\n{code}\n```\n\n{output}\n:::"
    arguments = [f"--lua-filter={book.NBS / 'fold.lua'}"]
    block = json.loads(pypandoc.convert_text(source, "json", "markdown", arguments))["blocks"][0]["c"][1][0]
    assert block["t"] == "CodeBlock" and dict(block["c"][0][2]).get("code-summary") == summary
