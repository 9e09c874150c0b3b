"""The site check: every page, as a browser shows it.

    python tests/site_check.py SITE SHOTS

Playwright drives the Chromium of this machine. Each page under SITE is opened at the width of a desk and of a
telephone, in light and in dark. These are findings, one line each (page, what), and with any the exit code is 1:

- errors on the console and requests to other hosts;
- text that makes the page scroll sideways (which no library looks for: WIDE below);
- what axe-core calls serious or critical for readers with a disability, contrast among it;
- links and anchors that lead nowhere, as LinkChecker finds them.

Screenshots lie in SHOTS, as PAGE-WIDTH-SCHEME.jpg. Where there is no Chromium, one line says so and nothing is looked
at; in CI (the variable CI is set) that is an error.
"""

import csv
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import book
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]
SIZES = {1280: 900, 390: 844}  # widths in CSS pixels, with the height of what is seen at once
SCHEMES = ["light", "dark"]
JUDGED = [(1280, "light"), (390, "dark")]  # what axe sees: each width and each scheme once, since it takes seconds
GRAVE = ("serious", "critical")  # in axe's words; what it calls minor or moderate is not a finding
TALLEST = 16_000  # pixels of a screenshot; a page may be longer
PATIENCE = 120_000  # milliseconds for a page to load
WIDE = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return "";
  const shut = e => e && e !== document.body && (getComputedStyle(e).overflowX !== "visible" || shut(e.parentElement));
  const out = [...document.querySelectorAll("main *")].find(
    e => e.getBoundingClientRect().right > width + 1 && !shut(e.parentElement));
  return `${document.documentElement.scrollWidth} px wide` +
    (out ? `: <${out.tagName.toLowerCase()}> ${out.textContent.trim().slice(0, 40)}` : "");
}"""


def listen(tab: Page, home: str, say):
    """Call `say` with a line for each error on the console, each failed script and each request to another host."""

    def console(message):
        if message.type in ("error", "assert"):
            where = message.location.get("url", "").removeprefix(home)
            say(f"on the console: {message.text} {where}".strip())

    def request(request):
        if not request.url.startswith((home, "data:", "blob:", "about:")):
            say(f"asks another host: {request.url}")

    tab.on("console", console)
    tab.on("pageerror", lambda error: say(f"a script failed: {error.message}"))
    tab.on("request", request)


def barriers(tab: Page) -> list[str]:
    """What axe-core finds serious or critical on the page, a line for each rule with its first element."""
    lines = []
    for rule in Axe().run(tab, options={"resultTypes": ["violations"]}).response["violations"]:
        if rule["impact"] in GRAVE:
            places = rule["nodes"]
            first = " ".join(places[0]["html"].split())[:90]
            lines.append(f"{rule['id']} ({rule['impact']}): {rule['help']}; {len(places)} times, as in {first}")
    return lines


def look(browser: Browser, home: str, page: str, shots: Path) -> list[str]:
    """Open a page in each width and scheme; the findings."""
    findings = {}

    def say(what: str):
        findings[what] = None

    for width, scheme in itertools.product(SIZES, SCHEMES):
        size = {"width": width, "height": SIZES[width]}
        with browser.new_context(viewport=size, is_mobile=width < 500, color_scheme=scheme) as context:
            tab = context.new_page()
            tab.set_default_timeout(PATIENCE)
            listen(tab, home, say)
            tab.goto(home + page, wait_until="load")
            if wide := tab.evaluate(WIDE):
                say(f"scrolls sideways at {width} px, {wide}")
            height = tab.evaluate("document.documentElement.scrollHeight")
            clip = {"x": 0, "y": 0, "width": width, "height": min(height, TALLEST)}
            name = page.removesuffix(".html").replace("/", "-")
            file = shots / f"{name}-{width}-{scheme}.jpg"
            tab.screenshot(path=file, type="jpeg", quality=75, clip=clip, full_page=True)
            if (width, scheme) in JUDGED:
                for what in barriers(tab):
                    say(f"{scheme}, {what}")
    return [f"{page}: {what}" for what in findings]


def dead_links(home: str, pages: list[str]) -> list[str]:
    """What LinkChecker finds broken on the site itself, other hosts aside: a line for each page and link."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # LinkChecker, when root starts it, goes on as nobody
        settings = Path(folder, "linkcheckerrc")
        settings.write_text("[AnchorCheck]\n")
        command = [Path(sys.executable).with_name("linkchecker"), f"--config={settings}", "--no-status", "--output=csv"]
        done = subprocess.run(
            [*command, *(home + page for page in pages)], capture_output=True, text=True, cwd=folder, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    if not lines or done.returncode > 1:
        return [f"LinkChecker failed: {done.stderr.strip()[-300:]}"]
    found = {}
    for row in csv.DictReader(lines, delimiter=";"):
        if (row["valid"] or "") == "True" and not row["warningstring"]:
            continue
        what = row["warningstring"] or row["result"]
        found[f"{row['parentname'].removeprefix(home)}: a dead link: {row['urlname']} ({what})"] = None
    return [*found]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing.

    Quarto's 404.html names its files by where they lie on the host of the site, so they are served from there, too.
    """

    def translate_path(self, path):
        base = book.settings()["doc_baseurl"]
        return super().translate_path(path.removeprefix(base) if path.startswith(base + "/") else path)

    def log_message(self, *_):
        pass


def check(site: Path, shots: Path, program: str) -> list[str]:
    """Look at every page of a site; the findings."""
    shutil.rmtree(shots, ignore_errors=True)
    shots.mkdir(parents=True)
    pages = sorted(str(p.relative_to(site)) for p in site.rglob("*.html") if "site_libs" not in p.parts)
    if not pages:
        return [f"{site.name}: there are no pages"]
    findings = []
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server, sync_playwright() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        browser = driver.chromium.launch(executable_path=program, chromium_sandbox=os.geteuid() != 0)
        try:
            for page in pages:
                findings += look(browser, home, page, shots)
            findings += dead_links(home, pages)
        finally:
            browser.close()
            server.shutdown()
    print(f"{len(pages)} pages seen, {len(pages) * len(SIZES) * len(SCHEMES)} screenshots")
    return findings


def browser() -> str | None:
    """The Chromium of this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def main():
    if not (program := browser()):
        print(f"the site is not looked at: there is no browser ({', '.join(NAMES)})")
        sys.exit(bool(os.environ.get("CI")))
    findings = check(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), program)
    print(*findings, f"{len(findings)} findings; the screenshots are in {os.path.relpath(sys.argv[2])}", sep="\n")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
