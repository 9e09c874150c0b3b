"""The picture that is shown where someone shares a link to the site: python tools/card.py

It draws nbs/card.png, 1200 by 630 pixels, from the records of the front page's runs.
"""

from configparser import ConfigParser
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from cramming_nb.app.records import RunRecord

ROOT = Path(__file__).resolve().parents[1]
RUNS = {
    "pocket": ("lab/crammed-nb_small-3m-?.json", "#1a7f4b"),
    "the paper's recipe, as small": ("lab/crammed-v2_small_lr_3e-3-3m-?.json", "#8a93a0"),
}


def main():
    """Draw the picture."""
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    figure = plt.figure(figsize=(12, 6.3), dpi=100, facecolor="white")
    figure.text(0.05, 0.84, parser["DEFAULT"]["title"], fontsize=50, weight="bold")
    figure.text(0.05, 0.70, "The cramming paper\nas a book that runs", fontsize=27, linespacing=1.3, va="top")
    said = "Train a language model\nfrom scratch on any budget:\nthree minutes of a laptop,\nor a day of a GPU"
    figure.text(0.05, 0.44, said, fontsize=20, color="#4a5260", linespacing=1.45, va="top")
    ax = figure.add_axes((0.53, 0.16, 0.42, 0.66))
    for name, (pattern, color) in RUNS.items():
        paths = sorted((ROOT / "records").glob(pattern))
        for i, path in enumerate(paths):
            curve = RunRecord.read(path).pretraining["curve"]
            seconds, losses = [p["seconds"] for p in curve], [p["heldout_loss"] for p in curve]
            ax.plot(seconds, losses, color=color, lw=2.5, label=None if i else name)
    ax.set_xlabel("rated seconds of two CPU cores", fontsize=15)
    ax.set_ylabel("held-out loss (nats)", fontsize=15)
    ax.set_title("The first three minutes", fontsize=19)
    ax.tick_params(labelsize=13)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=15)
    figure.savefig(ROOT / "nbs" / "card.png")


if __name__ == "__main__":
    main()
