"""The site check sees what a browser sees, and the build of the site takes no warning for an answer."""

import shutil
from functools import partial

import pytest

pytest.importorskip("nbclient")
import book
import site_check

HOME = "http://127.0.0.1:1/"
FINE = [
    {"method": "Page.loadEventFired", "params": {}},
    {"method": "Runtime.consoleAPICalled", "params": {"type": "log", "args": [{"value": "hello"}]}},
    {"method": "Log.entryAdded", "params": {"entry": {"level": "warning", "text": "slow"}}},
    {"method": "Network.requestWillBeSent", "params": {"request": {"url": f"{HOME}styles.css"}}},
    {"method": "Network.requestWillBeSent", "params": {"request": {"url": "data:image/png;base64,"}}},
]


def test_complaints():
    say = partial(site_check.complaint, home=HOME)
    assert not any(map(say, FINE))
    failed = {"exceptionDetails": {"text": "Uncaught", "exception": {"description": "Error: no\n at x"}}}
    assert say({"method": "Runtime.exceptionThrown", "params": failed}) == "a script failed: Error: no"
    error = {"type": "error", "args": [{"value": "bad"}, {"value": 1}]}
    assert say({"method": "Runtime.consoleAPICalled", "params": error}) == "on the console: bad 1"
    missing = {"entry": {"level": "error", "text": "404", "url": f"{HOME}gone.png"}}
    assert say({"method": "Log.entryAdded", "params": missing}) == "on the console: 404 gone.png"
    remote = {"request": {"url": "https://cdn.example/a.js"}}
    assert (
        say({"method": "Network.requestWillBeSent", "params": remote}) == "asks another host: https://cdn.example/a.js"
    )


PAGE = '<!doctype html><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><body style="margin:0"><main>{}</main>'
PAGES = {
    "good.html": "<p>Fine.</p><div style='overflow-x:auto'><div style='width:2000px'>scrolls by itself</div></div>",
    "wide.html": "<p>Narrow.</p><pre style='width:700px'>too wide</pre>",
    "lab/loud.html": "<script>console.error('it', 'fell'); throw new Error('over')</script><img src='gone.png' alt='gone'>",
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
    assert all(part in loud for part in ("it fell", "Error: over", "lab/gone.png"))
    assert len(list((tmp_path / "shots").glob("*.jpg"))) == 12
    assert (tmp_path / "shots" / "lab-loud-390-dark.jpg").stat().st_size > 500


def test_no_browser_is_said_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert site_check.main() is None
    assert capsys.readouterr().out.count("\n") == 1


def test_warnings_of_quarto_are_found():
    log = (
        "[ 1/24] budget.ipynb\n\x1b[33mWARN: Unable to resolve link target: gone.qmd\x1b[39m\n"
        "[WARNING] Citeproc: citation nobody2000 not found\nWARNING (crossref.lua) Unable to resolve crossref @fig-none\n"
        "Output created: _docs/index.html\n"
    )
    assert len(book.warnings(log)) == 3
    assert book.warnings("[ 1/2] faults.ipynb\nOutput created: _docs/index.html\n") == []
