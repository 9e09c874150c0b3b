"""The author's chores.

python tools/book.py run [NAME ...]   execute notebooks in place (all of them, or 05_model, lab/bench ...);
                                      with --slow, their cells marked slow as well
python tools/book.py readme           write README.md from nbs/index.ipynb
python tools/book.py agree            check that notebooks, package and README.md agree; changes nothing
python tools/book.py verdicts         bring the verdicts that chapters quote up to date with records/ (see lab/claims)
python tools/book.py address          bring the repository's address in every file up to date with settings.ini
python tools/book.py docs             build the site in _docs/ with Quarto; a warning is an error
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from configparser import ConfigParser
from functools import cache
from pathlib import Path

import nbformat
import reference
import yaml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import MarkdownExporter
from traitlets import Bool

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / "nbs"
IMAGES = "README_files"
WARNING = re.compile(r"\bWARN(ING)?\b|unable to resolve|citation \S+ not found", re.I)  # what Quarto says, and goes on
KERNEL = [
    "--IPKernelApp.log_level=CRITICAL",
    "--InlineBackend.figure_formats={'retina'}",  # twice the pixels, and their size on the page
]
os.environ["PYTHONWARNINGS"] = (
    "ignore:IProgress not found"  # tqdm's remark where ipywidgets are missing; it names a local path
)


def notebooks() -> list[Path]:
    """Every notebook of the book."""
    return [p for p in sorted(NBS.rglob("*.ipynb")) if not any(part[0] in "._" for part in p.relative_to(NBS).parts)]


def nbdev(command: str, *arguments: str | Path, root: Path = ROOT):
    """Run one of nbdev's commands."""
    subprocess.run([Path(sys.executable).with_name(f"nbdev_{command}"), *arguments], cwd=root, check=True)


class Author(NotebookClient):
    """Executes a notebook as nbdev_test does: `#| eval: false` and the flags of settings.ini keep their old outputs."""

    slow = Bool(help="execute the cells marked slow as well")

    async def async_execute_cell(self, cell, cell_index, **kwargs):
        flags = [flag for flag in settings()["tst_flags"].split() if not (self.slow and flag == "slow")]
        kept = "|".join([r"eval:\s*false", *flags])
        if re.search(rf"^#\|\s*({kept})\b", cell.source, re.M):
            return cell
        return await super().async_execute_cell(cell, cell_index, **kwargs)


def run(arguments: list[str]):
    """Execute notebooks in place; one that fails is left as it was."""
    names, slow = [a for a in arguments if a != "--slow"], "--slow" in arguments
    chosen = [p for p in notebooks() if not names or str(p.relative_to(NBS).with_suffix("")) in names]
    if not chosen:
        sys.exit(f"no such notebook: {' '.join(names)}")
    for path in chosen:
        print(path.relative_to(ROOT), flush=True)
        nb = nbformat.read(path, as_version=4)
        try:
            resources = {"metadata": {"path": path.parent}}
            Author(nb, timeout=600, slow=slow, extra_arguments=KERNEL, resources=resources).execute()
        except CellExecutionError as error:
            sys.exit(f"{path.relative_to(ROOT)} was left as it was:\n{error}")
        nbformat.write(nb, path)
        nbdev("clean", "--fname", path)


@cache
def settings() -> dict[str, str]:
    """settings.ini, which has the address of the repository and of the site."""
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(parser["DEFAULT"])


def site() -> str:
    """The address of the site."""
    return settings()["doc_host"] + settings()["doc_baseurl"]


def badges() -> str:
    """What README.md shows below its title: the state of the workflows, the licence, and Python."""
    cfg = settings()
    actions, shields = f"{cfg['git_url']}/actions/workflows", "https://img.shields.io/badge"
    licence = cfg["license"].replace("-", "--")
    shown = {
        "tests": (f"{actions}/test.yml/badge.svg", f"{actions}/test.yml"),
        "site": (f"{actions}/docs.yml/badge.svg", site()),
        f"licence {cfg['license']}": (f"{shields}/licence-{licence}-blue", "LICENSE"),
        f"Python {cfg['min_python']} or later": (f"{shields}/python-{cfg['min_python']}%2B-blue", "settings.ini"),
    }
    pictures = [f"[![{text}]({picture})]({target})" for text, (picture, target) in shown.items()]
    return "\n".join(pictures)


def section_links(source: str) -> str:
    """The same Markdown with links to a section leading to the site: GitHub opens notebooks at their top."""

    def link(match: re.Match) -> str:
        folder, name, section = match.groups()
        page = re.sub(r"^\d+[a-z]*_", "", name)  # as nbdev names pages
        return f"]({site()}/{folder}{page}.html#{section})"

    return re.sub(r"\]\(((?:\w+/)*)(\w+)\.ipynb#([\w-]+)\)", link, source)


def links_from_root(source: str) -> str:
    """The same Markdown with links that lead on from the folder of README.md, above the notebooks."""
    return re.sub(r"\]\((?![a-z]+:|#)", "](nbs/", section_links(source))


def readme() -> dict[str, bytes]:
    """README.md and its images, by file name, as nbs/index.ipynb gives them."""
    nb = nbformat.read(NBS / "index.ipynb", as_version=4)
    nb.cells = [c for c in nb.cells if not re.search(r"^#\|\s*(hide|default_exp|include:\s*false)", c.source, re.M)]
    nb.metadata.language_info = {"name": "python"}  # nbdev_clean takes it away
    alts = {}
    for i, cell in enumerate(nb.cells):
        if cell.cell_type == "code":
            found = re.search(r"^#\|\s*fig-alt:(.*)", cell.source, re.M)
            alts[str(i)] = yaml.safe_load(found[1]) if found else ""
            hidden = re.search(r"^#\|\s*echo:\s*false", cell.source, re.M)
            cell.source = "" if hidden else re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M)
            for shown in [output.data for output in cell.outputs if "text/markdown" in output.get("data", {})]:
                shown["text/markdown"] = links_from_root(shown["text/markdown"])
        else:
            cell.source = links_from_root(cell.source)
            cell.source = cell.source.replace("```{mermaid}", "```mermaid")
    title, _, rest = nb.cells[0].source.partition("\n")
    told = f"**[Read it as a site]({site()})**, where each chapter opens in Colab or Kaggle, or is downloaded."
    nb.cells[0].source = f"{title}\n\n{badges()}\n{rest}\n\n{told}"
    body, extra = MarkdownExporter().from_notebook_node(nb, {"unique_key": "README", "output_files_dir": IMAGES})
    body = re.sub(rf"!\[\w*\]\(({IMAGES}/README_(\d+)_)", lambda m: f"![{alts[m[2]]}]({m[1]}", body)
    body = re.sub(r"```python\s*```", "", body)
    body = re.sub(r"[ \t]+$", "", body, flags=re.M)
    body = re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"
    if quarto := re.search(r"^:::.*|(?<!\w)@[a-z]+[-\d]\w*", body, re.M):
        sys.exit(f"nbs/index.ipynb: README.md cannot show {quarto[0]!r}: write it as plain markdown")
    return {"README.md": body.encode(), **extra["outputs"]}


def write_readme():
    """Write README.md, and replace its images."""
    shutil.rmtree(ROOT / IMAGES, ignore_errors=True)
    for name, content in readme().items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_bytes(content)


def contents(root: Path) -> dict[str, bytes]:
    """The notebooks and the package under `root`, by path."""
    paths = [p for pattern in ("nbs/**/*.ipynb", "cramming_nb/**/*.py") for p in root.glob(pattern)]
    return {str(p.relative_to(root)): p.read_bytes() for p in paths if ".ipynb_checkpoints" not in p.parts}


def agree():
    """Export and clean a copy of the book, and name every file that this changes; then compare README.md."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copy(ROOT / "settings.ini", copy)
        for name in ("nbs", "cramming_nb"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "_*/"))
        nbdev("export", root=copy)
        nbdev("clean", root=copy)
        ours, theirs = contents(ROOT), contents(copy)
    stale = [f"{p}: not what `make export` gives" for p in sorted({*ours, *theirs}) if ours.get(p) != theirs.get(p)]
    images = {str(p.relative_to(ROOT)): b"" for p in (ROOT / IMAGES).glob("*")}
    for name, content in {**images, **readme()}.items():
        if not (ROOT / name).exists() or (ROOT / name).read_bytes() != content:
            stale.append(f"{name}: not what `make readme` gives")
    print(*stale or ["notebooks, package and README.md agree"], sep="\n")
    sys.exit(bool(stale))


DECIDED = ("agrees with the paper", "contradicts the paper", "equivalent")
VERDICTS = (
    *DECIDED,
    "undecided",
    "not run yet",
    "computed",
    "stated",
    "needs a GPU",
    "not built",
)
QUOTED = re.compile(
    rf"\[({'|'.join(VERDICTS)})\]\(((?:lab/)?claims\.ipynb#claim-(\w+))\)( \([+−][\d.]+ nats, 95 % [^)]*\))?"
)


# What the claims page computes from records/, for other pages: what each change of lab/changes.yaml did, and the verdicts.
CHANGES, FOUND = ROOT / "records/changes.json", ROOT / "records/verdicts.json"


def claims_page() -> dict[str, object]:
    """The names that the claims page defines when its cells are executed, among them `judgements` and `changes`."""
    import matplotlib

    matplotlib.use("agg")
    names, here = {}, Path.cwd()
    os.chdir(NBS / "lab")
    try:
        for cell in nbformat.read("claims.ipynb", as_version=4).cells:
            if cell.cell_type == "code":
                exec(cell.source, names)
    finally:
        os.chdir(here)
    return names


def found(judged) -> str:
    """The difference that decided a verdict, arm less baseline, as chapters quote it; nothing for other verdicts."""
    gap = judged.difference
    if judged.verdict not in DECIDED or judged.test.get("metric", "heldout_loss") != "heldout_loss":
        return ""
    return f" ({gap.mean:+.3f} nats, 95 % {gap.low:+.3f} to {gap.high:+.3f})".replace("-", "−")


def quotations(text: str, judgements: dict[str, object]) -> str:
    """The same text with every verdict that it quotes as a link, and the interval beside it, brought up to date."""

    def verdict(match: re.Match) -> str:
        judged = judgements[match[3]]
        return f"[{judged.verdict}]({match[2]}){found(judged) if match[4] else ''}"

    return QUOTED.sub(verdict, text)


def claims_quoted(path: Path) -> set[str]:
    """The ids of the claims whose verdicts a notebook quotes, in its prose or on a card (tools/cards.py)."""
    prose = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    on_cards = {claim for text in prose for claim in re.findall(r"\[[●○=?–] (\w+)\]\(", text)}
    return on_cards | {match[3] for text in prose for match in QUOTED.finditer(text)}


def write_verdicts():
    """Make every verdict that a page quotes or counts, and the record of changes, what the records support now."""
    page = claims_page()
    known = page["judgements"]
    CHANGES.write_text(json.dumps(page["changes"], indent=1) + "\n")
    verdicts = {row["id"]: known[row["id"]].verdict for row in page["claims"] if "tests" in row}
    FOUND.write_text(json.dumps(verdicts, indent=1) + "\n")
    for path in notebooks():
        nb = nbformat.read(path, as_version=4)
        before = [cell.source for cell in nb.cells]
        for cell in nb.cells:
            if cell.cell_type == "markdown":
                cell.source = quotations(cell.source, known)
        if before != [cell.source for cell in nb.cells]:
            nbformat.write(nb, path)
            nbdev("clean", "--fname", path)
            print(path.relative_to(ROOT))


def mend_links(text: str, is_output: bool = False) -> str:
    """Markdown without the links that nbdev puts where none can be.

    nbdev makes a link of each name in backticks, also of one that only its module uses, within the text of another
    link, and, in the output of a cell, within code.
    """
    name = rf"\[(`[^`\]]+`)\]\({re.escape(site())}/[^)\s]*\)"

    def without_links(found: re.Match) -> str:
        return re.sub(name, r"\1", found[0])

    def if_public(found: re.Match) -> str:
        return found[0] if re.split(r"\W", found[1].strip("`"))[0] in reference.exported() else found[1]

    text = re.sub(rf"\[(?:[^\[\]]|{name})*?{name}(?:[^\[\]]|{name})*\](?=\()", without_links, text)
    text = re.sub(name, if_public, text)
    if is_output:
        text = re.sub(r"(?ms)^```.*?^```", without_links, text)
    return text


def mend_notebooks(folder: Path):
    """Mend the links of the notebooks that nbdev has processed for the site."""
    for path in folder.rglob("*.ipynb"):
        nb = nbformat.read(path, as_version=4)
        for cell in nb.cells:
            if cell.cell_type == "markdown":
                cell.source = mend_links(cell.source)
            for output in cell.get("outputs", []):
                if "text/markdown" in output.get("data", {}):
                    output.data["text/markdown"] = mend_links(output.data["text/markdown"], is_output=True)
        nbformat.write(nb, path)


def warnings(log: str) -> list[str]:
    """The lines of Quarto's log that are warnings; it is coloured."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    return [line.strip() for line in plain.splitlines() if WARNING.search(line)]


SITE = """\
project:
  output-dir: {doc_path}

website:
  title: "{title}"
  site-url: "{doc_host}{doc_baseurl}"
  description: "{description}"
  repo-branch: {branch}
  repo-url: "{git_url}"
  repo-subdir: {nbs_path}
  navbar:
    right:
      - icon: github
        href: "{git_url}"
        aria-label: "The repository on GitHub"
"""
MENTION = r"https://github\.com/[\w.-]+/{repo}\b|https://[\w.-]+\.github\.io/{repo}\b"


def mentions(text: str) -> set[str]:
    """The addresses of the repository and of its site that a text names, whoever the owner."""
    return set(re.findall(MENTION.format(repo=settings()["repo"]), text))


def addresses() -> dict[Path, str]:
    """The files that name the address, README.md among them, as settings.ini wants them; those that agree too."""
    cfg, found = settings(), {NBS / "nbdev.yml": SITE.format(**settings())}
    text = (NBS / "nbdev.yml").read_text(encoding="utf-8")
    before = yaml.safe_load(text)["website"]
    changes = {before["repo-url"]: cfg["git_url"], before["site-url"]: site()}
    folder = {f"cd {before['repo-url'].rpartition('/')[2]}": f"cd {cfg['repo']}"}
    for path in [*notebooks(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        text = path.read_text(encoding="utf-8")
        for was, now in {**changes, **folder}.items():
            text = text.replace(was, now)
        found[path] = text
    return found


def write_addresses():
    """Make every mention of the repository and its site the address that settings.ini gives."""
    for path, text in addresses().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    nbdev("export")  # the index of names has the address too
    write_readme()


def docs():
    """Build the site as nbdev does, with the pages of the reference, and fail where Quarto only warns."""
    # Imported here, for the processes that nbdev starts import this file.
    import handouts
    from nbdev.serve import proc_nbs

    if not shutil.which("quarto"):
        sys.exit("the site is built with Quarto (quarto.org), which is not installed; `make pages` builds a preview")
    os.chdir(ROOT)
    processed = Path(proc_nbs(force=True, n_workers=2))
    mend_notebooks(processed)
    reference.write(processed)
    command = ["quarto", "render", "--no-cache"]
    process = subprocess.Popen(command, cwd=processed, stderr=subprocess.PIPE, text=True)
    log = []
    for line in process.stderr:
        print(line, end="", file=sys.stderr, flush=True)
        log.append(line)
    if process.wait():
        sys.exit(process.returncode)
    out = ROOT / settings()["doc_path"]
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(processed / out.name, out)
    handouts.write(out)
    found = warnings("".join(log))
    print(*found, f"{len(found)} warnings; the site is in {out.name}", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or ["help"]
    commands = {"run": lambda: run(arguments), "readme": write_readme, "agree": agree, "docs": docs}
    commands |= {"verdicts": write_verdicts, "address": write_addresses}
    commands.get(command, lambda: sys.exit(__doc__))()
