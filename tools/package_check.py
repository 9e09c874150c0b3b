"""The package as others get it: `make package-check`.

    python tools/package_check.py [EXTRA ...]

Source distribution and wheel are built; the wheel is installed into an empty environment, and `cram` does its whole job
in an empty folder. Then each extra, alone, is asked for what it is there for: first without it, which must end in one
line that names it, then with it. Python's package registry is needed, and some minutes. Every step is printed with its
seconds; the first that fails ends the check.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = ["--source", "machine:python"]
SMALL = ["pocket", *TEXT, "--budget", "10step"]
LOADS = """\
import cramming_nb.app.hf
from transformers import AutoModelForMaskedLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained("runs/core/export") for kind in (AutoTokenizer, AutoModelForMaskedLM))
print(tuple(model(**tokenizer("The [MASK] is late.", return_tensors="pt")).logits.shape))
"""
EXTRAS = {  # what asks for the extra, the file that shows that it was there, and whether it is refused without
    "hf": (["python", "-c", LOADS], None, False),
    "optim": (["cram", "pretrain", *SMALL, "--name", "optim", "--set", "optimizer.name=adafactor"], "runs/optim/log.jsonl", True),
    "dedup": (["cram", "data", "build", "pocket", *TEXT, "--set", "corpus.dedup=200"], None, True),
    "onnx": (["cram", "export", "core", "--onnx", "--to", "with-onnx"], "with-onnx/model.onnx", True),
    "track": (["cram", "pretrain", *SMALL, "--name", "track", "--tensorboard"], "runs/track/tensorboard", True),
    "book": (["python", "-c", "import fastcore, pydivsufsort, pytorch_optimizer, transformers"], None, False),
    "ray": (["cram", "data", "build", "pocket", *TEXT, "--engine", "ray", "--data-dir", "by-ray"], "by-ray", True),
}  # fmt: skip


class Environment:
    """A virtual environment, and a folder with nothing of the repository in which its commands run."""

    def __init__(self, folder: Path, below: "Environment | None" = None):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.bin, self.home = folder / "bin", below.home if below else folder.parent / "home"
        self.home.mkdir(exist_ok=True)
        if below:  # what is installed there is seen here: torch is large
            site = next(folder.glob("lib/python*/site-packages"))
            (site / "below.pth").write_text(str(next(below.bin.parent.glob("lib/python*/site-packages"))))

    def do(self, *argv: str, fails: str = "") -> float:
        """Run a command, which must succeed, or say one line with `fails` in it and end with code 2; the seconds."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        start = time.perf_counter()
        done = subprocess.run(
            [self.bin / argv[0], *argv[1:]],
            cwd=self.home,
            env=env | {"PATH": path, "CRAM_CACHE": str(self.home / "cache")},
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - start
        right = (done.returncode, fails in done.stderr) == (2 if fails else 0, True)
        print(f"{seconds:7.2f} s  {' '.join(argv).splitlines()[0][:100]}{'' if right else '  FAILED'}", flush=True)
        if not right:
            sys.exit(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return seconds

    def install(self, *what: str):
        """Install what was built, in the versions that this release was tested with."""
        self.do("python", "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), *what)


def build(folder: Path) -> Path:
    """Build the source distribution, and from it, not from the checkout, the wheel."""
    setup = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder]
    subprocess.run(setup, cwd=ROOT, check=True)
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
    ]
    subprocess.run([*wheel, next(folder.glob("*.tar.gz"))], check=True)
    return next(folder.glob("*.whl"))


def core(env: Environment):
    """The whole job, and how soon the command answers."""
    for argv in (["--help"], ["--version"], ["run", "--help"]):
        seconds = min(env.do("cram", *argv) for _ in range(3))
        assert seconds < 1.5, f"cram {' '.join(argv)} takes {seconds:.2f} s"
    seconds = min(env.do("python", "-c", "import cramming_nb") for _ in range(3))
    assert seconds < 1, f"import cramming_nb takes {seconds:.2f} s"
    env.do("cram", "recipes")
    env.do("cram", "run", "--budget", "20s", "--name", "core")
    env.do("cram", "run", "--budget", "20s", "--name", "core")  # prints its table
    env.do("cram", "report", "core")
    env.do("cram", "predict", "core", "The [MASK] is late.")
    env.do("cram", "export", "core", "--to", "exported")
    for file in ("record.json", "report.html", "export/model.safetensors"):
        assert (env.home / "runs/core" / file).is_file(), file


def main(extras: list[str]):
    with tempfile.TemporaryDirectory() as folder:
        wheel = str(build(Path(folder)))
        base = Environment(Path(folder) / "core")
        base.install(wheel)
        core(base)
        for extra in extras or EXTRAS:
            argv, shows, refused = EXTRAS[extra]
            if refused:
                base.do(*argv, fails=f"pip install 'cramming_nb[{extra}]'")
            env = Environment(Path(folder) / extra, base)
            env.install("--no-deps", "--ignore-installed", wheel)
            env.install(f"cramming_nb[{extra}] @ file://{wheel}")
            env.do(*argv)
            assert not shows or (env.home / shows).exists(), f"{extra}: no {shows}"
    print("the package is whole")


if __name__ == "__main__":
    main(sys.argv[1:])
