"""The page check: every notebook as a web page, by pandoc alone.

    python tools/pages.py OUT

The notebooks, as nbdev prepares them for Quarto, become a small site in OUT. Every reference, citation, link and
image is followed on the way; the outputs are searched for errors and for paths of the machine that made them, and the
exported cells for what their signatures leave unsaid (tools/signatures.py). One line is printed for each finding
(notebook, cell, what), and the exit code is 1 if there is any.

Notebooks are read by nbformat, Markdown by pandoc and HTML by lxml. What is written here is what none of them has:
Quarto's own syntax (cell options, callouts, cross-references), so that the site can be checked where Quarto is not
installed, and links followed from the cell that holds them, so that a finding names that cell.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path

import book
import handouts
import lxml.html
import nbformat
import pypandoc
import reference
import yaml
from signatures import defects

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"fig": "Figure", "tbl": "Table", "eq": "Equation", "sec": "Section"}
CALLOUTS = yaml.safe_load((ROOT / "_quarto.yml").read_text())["language"]  # what the boxes of a chapter are called
IMAGES = {"image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpg"}
SHOWN = ["text/html", *IMAGES, "text/markdown", "text/plain"]  # the richest form of an output comes first
LOCAL_PATH = re.compile(
    r"(?<![\w.~:])/(?:root|home|tmp|mnt|opt|work|Users|var/folders)/[^\s'\"]*|[A-Z]:\\Users\\|site-packages[/\\]"
)
EXPORTED = re.compile(r"^#\|\s*exports?i?\b", re.M)
FENCE = "`" * 10


def walk(node, visit):
    """A copy of pandoc's tree in which each element, parents first, is what `visit` makes of it: one, or a list.

    Unlike in pandocfilters.walk, the elements of such a list are visited too: a figure holds an image to be looked at.
    """
    if isinstance(node, dict):
        return {key: walk(value, visit) for key, value in node.items()}
    if not isinstance(node, list):
        return node
    made = []
    for item in node:
        new = visit(item) if isinstance(item, dict) and "t" in item else item
        made += walk(new, visit) if isinstance(new, list) and new is not item else [walk(new, visit)]
    return made


def fragment(html: str) -> lxml.html.HtmlElement:
    """A piece of HTML, its elements under one."""
    return lxml.html.fragment_fromstring(html, create_parent=True)


def raw(html: str) -> dict:
    """A block of HTML for pandoc's tree."""
    return {"t": "RawBlock", "c": ["html", html]}


def words(string: str) -> list[dict]:
    """A text for pandoc's tree."""
    return [{"t": "Str", "c": string}]


def options(source: str) -> tuple[dict, str]:
    """The `#| key: value` lines that open a cell, read as Quarto reads them (as YAML), and the code below them."""
    lines = source.splitlines()
    n = next((i for i, line in enumerate(lines) if not line.startswith("#|")), len(lines))
    head = [line[2:].removeprefix(" ") for line in lines[:n]]
    values = yaml.safe_load("\n".join(line for line in head if ":" in line or line.startswith(" ")))
    return values or {}, "\n".join(lines[n:]).strip("\n")


class Page:
    """One notebook on its way to a page; `findings` grow as it goes."""

    def __init__(self, name: str, source: Path, processed: Path, out: Path):
        self.name, self.out, self.cell = name, out, 0
        self.processed = nbformat.read(processed / name, as_version=4).cells
        written = source / name  # a page of the reference is made without one
        self.source = nbformat.read(written, as_version=4).cells if written.exists() else self.processed
        head = self.processed[0].source.strip()  # nbdev makes the first cell the front matter
        self.meta = yaml.safe_load(head.strip("-")) if head.startswith("---") else {}
        self.href = str(Path(name).with_name(self.meta.get("output-file", Path(name).stem + ".html")))
        self.up = "../" * name.count("/")
        self.findings: list[str] = []
        self.labels: dict[str, list] = {}  # label -> what a reference to it reads
        self.links: list[tuple[int, str, str, str]] = []  # cell, the link as it was written, page, anchor

    def find(self, what: str):
        """Note a finding of the present cell, once."""
        line = f"{self.name} cell {self.cell}: {what}"
        self.findings += [line] * (line not in self.findings)

    def scan(self, cell: dict):
        """Look for errors and for paths of the machine in one cell."""
        pieces = [cell["source"]]
        for output in cell.get("outputs", []):
            if output["output_type"] == "error" or "Traceback (most recent call last)" in output.get("text", ""):
                self.find(f"an error in the output: {output.get('ename', 'a traceback')}")
            pieces.append(output.get("text", ""))
            pieces += [v for k, v in output.get("data", {}).items() if k.startswith("text/") or "svg" in k]
        for found in filter(None, map(LOCAL_PATH.search, pieces)):
            self.find(f"a local path: {found[0]}")

    def markdown(self) -> str:
        """The notebook as one markdown text, with a comment where each cell begins."""
        for self.cell, cell in enumerate(self.source):
            self.scan(cell)
            source = cell["source"]
            if cell["cell_type"] == "code" and EXPORTED.search(source):
                for what in defects(source):
                    self.find(what)
        number, parts = {cell["id"]: i for i, cell in enumerate(self.source)}, []
        for cell in self.processed:
            self.cell = number.get(cell["id"], self.cell)  # a cell that nbdev put in counts to the one before it
            self.scan(cell)
            parts.append(f"<!-- cell {self.cell} -->")
            if cell["cell_type"] == "code":
                parts.append(self.code(cell))
            elif cell["cell_type"] == "markdown":
                parts.append(re.sub(r"(?m)^```\{(\w+)\}", r"```{.\1}", cell["source"]))
        return "\n\n".join(parts)

    def code(self, cell: dict) -> str:
        """A code cell with its outputs, as its options want it."""
        try:
            given, source = options(cell["source"])
        except yaml.YAMLError:
            self.find("cell options that are not YAML (a text with a colon needs quotes)")
            return ""
        if given.get("include") is False:
            return ""
        block = f"{FENCE} python\n{source}\n{FENCE}" if source and given.get("echo", True) else ""
        if given.get("code-fold"):
            opened = " open" * (given["code-fold"] == "show")
            block = f"<details{opened}><summary>{given.get('code-summary', 'Code')}</summary>\n\n{block}\n\n</details>"
        shown = [self.output(output, i, given) for i, output in enumerate(cell["outputs"])]
        caption = given.get("fig-cap") or given.get("tbl-cap", "")
        if caption or "label" in given:
            shown = [f"::: {{#{given.get('label', f'cell-{self.cell}')} .captioned}}", *shown, caption, ":::"]
        return "\n\n".join([block, *(shown if given.get("output") is not False else [])])

    def output(self, output: dict, i: int, given: dict) -> str:
        """One output in its richest form; an image becomes a file beside the page."""
        data = output.get("data", {"text/plain": output.get("text", "")})
        kind = next((k for k in SHOWN if k in data), "text/plain")
        body = data.get(kind, "")
        if kind in IMAGES:
            file = (self.out / self.href).with_name(f"{Path(self.href).stem}_{self.cell}_{i}.{IMAGES[kind]}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(body.encode() if kind == "image/svg+xml" else base64.b64decode(body))
            # The width is in CSS pixels; the file may have twice as many.
            wide = output.get("metadata", {}).get(kind, {}).get("width")
            width, alt = f' width="{wide}"' if wide else "", escape(str(given.get("fig-alt", "")))
            kind, body = "text/html", f'<img src="{file.name}"{width} alt="{alt}">'
        form = {"text/html": "{=html}", "text/plain": "{.output}"}.get(kind)
        return f"{FENCE} {form}\n{body}\n{FENCE}" if form else body

    def visit(self, tree: dict, do) -> dict:
        """Walk over the page's tree with `do`, knowing which cell each element is from."""

        def step(e: dict):
            if e["t"] == "RawBlock" and (mark := re.match(r"<!-- cell (\d+) -->", e["c"][1])):
                self.cell = int(mark[1])
            return do(e)

        return walk(tree, step)

    def label(self, identifier: str, title: list | None = None) -> list[dict]:
        """Give a label its number; the answer opens the caption."""
        kind = identifier.partition("-")[0]
        if kind not in KINDS or kind == identifier:
            return []
        if identifier in self.labels:
            self.find(f"the label {identifier} a second time")
        name = f"{KINDS[kind]} {1 + sum(known.startswith(kind + '-') for known in self.labels)}"
        self.labels[identifier] = title or words(name)
        return [{"t": "Strong", "c": words(name + ": ")}]

    def number(self, e: dict) -> dict | list:
        """First visit: number what has a label, look at images, and spell out what only Quarto knows."""
        kind, c = e["t"], e.get("c")
        if kind in ("RawBlock", "RawInline"):
            if any(not img.get("alt", "").strip() for img in fragment(c[1]).iter("img")):
                self.find("an image without alt text (#| fig-alt: ...)")
        elif kind == "Image":
            alt = dict(c[0][2]).get("fig-alt")
            c[0][2] += [["alt", alt]] if alt else []
            if not (alt or c[1]):
                self.find(f"an image without alt text: {c[2][0]}")
        elif kind == "Header" and c[1][0].startswith("sec-"):
            self.label(c[1][0], c[2])
        elif kind in ("Figure", "Table"):
            opening = self.label(c[0][0])
            for block in c[1][1][:1]:
                block["c"] = opening + block["c"]
        elif kind == "Para" and c[-1]["t"] == "Str" and (found := re.fullmatch(r"\{#(eq-[\w-]+)\}", c[-1]["c"])):
            self.label(found[1])
            n = self.labels[found[1]][0]["c"].split()[1]
            return [raw(f'<div class="equation" id="{found[1]}">'), e | {"c": c[:-1]}, raw(f"<span>({n})</span></div>")]
        elif kind == "Str" and ":::" in c:
            self.find("a fence in the middle of a paragraph (::: wants a line before it)")
        elif kind == "CodeBlock" and "mermaid" in c[0][1]:
            given = dict(re.findall(r"(?m)^%%\| *([\w-]+): *\"?(.*?)\"? *$", c[1]))
            drawing = escape(re.sub(r"(?m)^%%[|].*\n?", "", c[1]))
            blocks = [raw(f'<pre class="mermaid">{drawing}</pre>')]
            return self.figure(given.get("label", ""), blocks, words(given.get("fig-cap", "")))
        elif kind == "Div":
            (identifier, classes, attributes), blocks = c
            if classes and classes[0].startswith("callout-"):
                return self.callout(classes[0].removeprefix("callout-"), dict(attributes), blocks)
            if "captioned" in classes or identifier.partition("-")[0] in ("fig", "tbl"):
                caption = blocks.pop()["c"] if blocks and blocks[-1]["t"] == "Para" else []
                return self.figure(identifier, blocks, caption)
        return e

    def figure(self, identifier: str, blocks: list, caption: list) -> list[dict]:
        """Blocks with a numbered caption below."""
        below = {"t": "Plain", "c": self.label(identifier) + caption}
        return [raw(f'<figure id="{identifier}">'), *blocks, raw("<figcaption>"), below, raw("</figcaption></figure>")]

    def callout(self, kind: str, attributes: dict, blocks: list) -> list[dict]:
        """A callout, as a box that opens and shuts."""
        if f"callout-{kind}-title" not in CALLOUTS:
            self.find(f"a callout that is none of {', '.join(key.removesuffix('-title') for key in CALLOUTS)}: {kind}")
        title = words(attributes.get("title", CALLOUTS.get(f"callout-{kind}-title", kind)))
        if blocks and blocks[0]["t"] == "Header":
            title, blocks = blocks[0]["c"][2], blocks[1:]
        start = f'<details class="callout callout-{kind}"{"" if attributes.get("collapse") == "true" else " open"}><summary>'
        return [raw(start), {"t": "Plain", "c": title}, raw("</summary>"), *blocks, raw("</details>")]

    def resolve(self, e: dict, pages: dict, keys: set[str], site: str) -> dict | list:
        """Second visit: follow references, citations and links."""
        if e["t"] == "Cite":
            ids = [c["citationId"] for c in e["c"][0]]
            references = [i for i in ids if i.partition("-")[0] in KINDS and "-" in i]
            for i in ids:
                if i not in (self.labels if i in references else keys):
                    self.find(f"an unresolved {'reference' if i in references else 'citation'}: @{i}")
            known = [i for i in references if i in self.labels]
            links = [{"t": "Link", "c": [["", [], []], self.labels[i], [f"#{i}", ""]]} for i in known]
            return [x for link in links for x in (*words("; "), link)][1:] or e
        if e["t"] in ("Link", "Image"):
            e["c"][2][0] = self.follow(e["c"][2][0], pages, site)
        elif e["t"] in ("RawBlock", "RawInline"):
            for element, _, url, _ in fragment(e["c"][1]).iterlinks():
                if element.tag in ("a", "img"):
                    self.follow(url, {}, site)
        return e

    def follow(self, url: str, pages: dict, site: str) -> str:
        """Where a link leads on this site; anchors are looked at when all pages are there."""
        if url.startswith(site + "/"):  # nbdev's own link from a name to its page
            return self.up + self.note(url, *url.removeprefix(site + "/").partition("#")[::2])
        if re.match(r"[a-z]+:", url):
            return url
        path, _, anchor = url.partition("#")
        target = os.path.normpath(Path(self.name).parent / path) if path else self.name
        if target in pages:
            page = self.note(url, pages[target].href, anchor)
            return self.up + page if path else f"#{anchor}"
        if path and (self.out / target).suffix != ".html" and not (self.out / target).exists():
            self.find(f"a dead link: {url}")
        elif not path or target.endswith(".html"):
            self.note(url, target if path else self.href, anchor)
        return url

    def note(self, url: str, page: str, anchor: str) -> str:
        """Remember a link to a page; the answer is its address from the root of the site."""
        self.links.append((self.cell, url, page, anchor))
        return page + (f"#{anchor}" if anchor else "")

    def pandoc(self, stdin: str, *arguments: str) -> str:
        """Run pandoc; its warnings are findings, but for citations: `resolve` knows their cells."""
        command = [pypandoc.get_pandoc_path(), *arguments]
        done = subprocess.run(command, input=stdin, text=True, capture_output=True, check=False)
        if done.returncode:
            sys.exit(f"{self.name}: pandoc ended with exit code {done.returncode}: {done.stderr.strip()}")
        self.findings += [f"{self.name}: pandoc: {line}" for line in done.stderr.splitlines() if "Citeproc" not in line]
        return done.stdout


def flat(entries: list) -> list[str]:
    """The notebooks of a sidebar, in order: entries are names, {text, href} or {section, contents}."""
    rows = [e if isinstance(e, dict) else {"href": e} for e in entries]
    return [name for row in rows for name in (flat(row["contents"]) if "section" in row else [row["href"]])]


def nested(entries: list, pages: dict, here: Page) -> str:
    """The sidebar as lists of links."""
    items = []
    for row in [e if isinstance(e, dict) else {"href": e} for e in entries]:
        if "section" in row:
            items.append(f"{escape(row['section'])}{nested(row['contents'], pages, here)}")
        elif (name := row["href"]) in pages:
            mark = ' aria-current="page"' if name == here.name else ""
            title = row.get("text") or pages[name].meta.get("title", name)
            items.append(f'<a href="{here.up}{pages[name].href}"{mark}>{escape(title)}</a>')
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def turn(names: list[str], pages: dict, here: Page) -> str:
    """Links to the page before and the page after, in the order of the sidebar."""
    order = [pages[name] for name in names if name in pages]
    at = order.index(here) if here in order else len(order)
    near = {"← {}": order[at - 1 : at] if at else [], "{} →": order[at + 1 : at + 2]}
    link = '<a href="{}">{}</a>'.format
    found = [(page, form) for form, pages in near.items() for page in pages]
    return "".join(link(here.up + p.href, form.format(escape(p.meta.get("title", p.name)))) for p, form in found)


def build(source: Path, processed: Path, out: Path, bibliography: Path, site: str, add: Callable = id) -> list[str]:
    """Make the site of the notebooks in `source`, of which nbdev made those in `processed`; returns the findings.

    `add(out)` puts other files into the site, to which pages link.
    """
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(processed, out, ignore=shutil.ignore_patterns("*.ipynb", "*.yml", ".*", "_*"))
    names = sorted(str(p.relative_to(processed)) for p in processed.rglob("*.ipynb"))
    names = [name for name in names if not re.search(r"(^|/)[._]", name)]
    entries = yaml.safe_load((source / "sidebar.yml").read_text())["website"]["sidebar"]["contents"]
    findings = [f"sidebar.yml: {name} is missing" for name in names if name not in flat(entries)]
    findings += [f"sidebar.yml: there is no {name}" for name in flat(entries) if name not in names]
    keys = set(re.findall(r"(?m)^@\w+\{([^,\s]+),", bibliography.read_text()))
    pages = {name: Page(name, source, processed, out) for name in names}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # pandoc is a process of its own
        parsed = list(pool.map(lambda page: page.pandoc(page.markdown(), "--to=json"), pages.values()))
        trees = []
        for page, tree in zip(pages.values(), parsed, strict=True):
            trees.append(page.visit(json.loads(tree), page.number))
        resolved = []
        for page, tree in zip(pages.values(), trees, strict=True):  # when all labels are known
            resolved.append(page.visit(tree, lambda e, page=page: page.resolve(e, pages, keys, site)))

        def render(page: Page, tree: dict) -> str:
            metadata = {
                "title": page.meta.get("title", page.name),
                "subtitle": page.meta.get("description", ""),
                "lang": "en",
                "link-citations": "true",
                "reference-section-title": "References",
            }
            return page.pandoc(
                json.dumps(tree),
                "--from=json",
                "--to=html5",
                f"--template={Path(__file__).with_suffix('.html')}",
                "--toc",
                "--toc-depth=2",
                "--mathml",
                "--citeproc",
                f"--bibliography={bibliography}",
                f"--variable=up:{page.up}",
                f"--variable=sidebar:{nested(entries, pages, page)}",
                f"--variable=turn:{turn(flat(entries), pages, page)}",
                *(f"--metadata={key}:{value}" for key, value in metadata.items()),
            )

        htmls = list(pool.map(render, pages.values(), resolved))
    anchors = {}
    for page, html in zip(pages.values(), htmls, strict=True):
        (out / page.href).parent.mkdir(parents=True, exist_ok=True)
        (out / page.href).write_text(html)
        anchors[page.href] = set(lxml.html.document_fromstring(html).xpath("//@id"))
    add(out)
    for page in pages.values():
        for page.cell, url, target, anchor in page.links:
            is_file = target not in anchors and (out / target).is_file()
            if not is_file and (target not in anchors or anchor and anchor not in anchors[target]):
                page.find(f"a dead link: {url}")
        findings += page.findings
    return findings


def main():
    # Imported here, for the processes that it starts import this file.
    from nbdev.serve import proc_nbs

    out = Path(sys.argv[1]).resolve()
    offered = out / handouts.BRANCH if (out / "index.html").exists() else None  # of the site that was here before
    if any(offered not in path.parents for path in out.rglob("*.ipynb")):
        sys.exit(f"{sys.argv[1]}: holds notebooks, which would be removed; name a folder for the site")
    os.chdir(ROOT)
    site = yaml.safe_load(Path("nbs/nbdev.yml").read_text())["website"]["site-url"]
    processed = proc_nbs(force=True, n_workers=2)
    book.mend_notebooks(Path(processed))
    reference.write(processed)
    findings = build(Path("nbs"), processed, out, Path("references.bib"), site, handouts.write)
    print(*findings, f"{len(findings)} findings; the pages are in {os.path.relpath(out)}", sep="\n")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
