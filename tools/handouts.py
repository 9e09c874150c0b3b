"""Notebooks to take away: a line of links on each page, and copies that set themselves up.

A notebook of the book imports the package and reads records/, so opened alone it would fail in its first cell. The
copies that `write` makes begin with a cell that fetches the book and installs its package. The site offers them for
download; the workflow that publishes the site also puts them on a branch of the repository, from which Colab and
Kaggle open them. `Links` puts the line of links on each page, as a step of nbdev's processing (see settings.ini).
"""

import json
import re
from pathlib import Path

import nbformat
from execnb.nbio import mk_cell
from nbdev.process import Processor
from reference import ROOT, place_of, settings

BRANCH = "notebooks"  # the branch with the copies, and the folder of the site that has them
EXTRAS = "book"  # what chapters use beyond the core

SETUP = """\
# This notebook was opened by itself, as on Colab or Kaggle. This cell fetches the book that it
# belongs to, and installs its package: a minute or two. It needs git and a Unix shell.
!test -d ~/{repo} || git clone --quiet --depth 1 --branch {branch} {git_url} ~/{repo}
%pip install --quiet "$HOME/{repo}[{extras}]"
%cd ~/{repo}/{folder}"""


def chapters(nbs: Path = ROOT / "nbs") -> list[str]:
    """The notebooks that run code, by their path in nbs/."""
    found = []
    for path in sorted(nbs.rglob("*.ipynb")):
        name = path.relative_to(nbs).as_posix()
        kinds = [cell["cell_type"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
        if not name.startswith((".", "_", "api/")) and kinds.count("code") > 1:
            found.append(name)
    return found


def setup(name: str) -> dict:
    """The first cell of the copy of a notebook."""
    cfg = settings()
    folder = (Path("nbs") / name).parent.as_posix()
    source = SETUP.format(extras=EXTRAS, folder=folder, **cfg)
    return {
        "cell_type": "code",
        "id": "setup",
        "metadata": {},
        "execution_count": None,
        "outputs": [],
        "source": source,
    }


def write(out: Path):
    """Write the copies into their folder of the site in `out`."""
    out = out / BRANCH
    for name in chapters():
        copy = nbformat.read(ROOT / "nbs" / name, as_version=4)
        copy.cells.insert(1, nbformat.from_dict(setup(name)))  # below the title
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(copy, out / name)


def links(name: str) -> str:
    """The line of links to a notebook's copies."""
    cfg = settings()
    path = f"{cfg['user']}/{cfg['repo']}/blob/{BRANCH}/{name}"
    places = {
        "Open in Colab": f"https://colab.research.google.com/github/{path}",
        "Open in Kaggle": f"https://kaggle.com/kernels/welcome?src=https://github.com/{path}",
        "Download notebook": f"{cfg['doc_host']}{cfg['doc_baseurl']}/{BRANCH}/{name}",
        "On GitHub": f"{cfg['git_url']}/blob/{cfg['branch']}/nbs/{name}",
    }
    line = " · ".join(f"[{text}]({place})" for text, place in places.items())
    return f"::: {{.notebook-links}}\n{line}\n:::"


class Links(Processor):
    """Puts the line of links below the title of each page."""

    def begin(self):
        name = place_of(self.nb)
        if name == "index.ipynb":  # a link to the site shows its card; to a chapter, the first figure
            self.nb.cells[0].source = re.sub(r"\A---\n", "---\nimage: card.png\n", self.nb.cells[0].source)
        if name in chapters():
            self.nb.cells.insert(1, mk_cell(links(name), "markdown", id="notebook-links"))
