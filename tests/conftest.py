"""A text and a recipe so small that the whole job takes seconds, and ways to give `cram` a command, or Python code."""

import contextlib
import gc
import hashlib
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from functools import partial
from multiprocessing import context, forkserver
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: same bits each time, and no pool of workers
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles the package anew

import pytest

# Reading notebooks imports jsonschema, which asks for this package; it builds grammars for seconds, to check addresses.
sys.modules["rfc3987_syntax"] = None

# A job in the background ignores Ctrl-C, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

RECIPE = """\
corpus: {vocab_size: 400, seq_length: 32, filter_threshold: 0.6, heldout: 0.05, probe: 0.3, sample: 200000}
architecture: {max_length: 64, hidden_size: 32, num_layers: 2, num_heads: 2, ffn_size: 64, classifier_size: 32}
optimizer: {lr: 0.003}
schedule: {lr: wsd, batch_size: 8, batch_ramp: 0}
training: {micro_batch_size: 8, heldout_rows: 16, validations: 5, checkpoint_fraction: 0.1}
protocol: {epochs: 1, batch_size: 64, lr: 0.001, max_length: 64}
"""
THINGS = """garden river kettle lantern window engine market letter bridge harbor teacher sailor painter doctor village
forest mountain castle island valley""".split()
DOES = "finds keeps follows watches carries paints repairs forgets measures describes".split()
LIKE = "old quiet small bright heavy broken careful early northern simple".split()
WHEN = "every morning, after the rain, without a word, before winter, near the station, for the second time".split(", ")
SYLLABLES = "ba do fen gor hul kim lar mos nur pel rov sta tun vik wex yol zan".split()
NAMES = [(a + b).capitalize() for a in SYLLABLES for b in SYLLABLES if a != b]
BAR = re.compile(r"\[\d\d:\d\d|\d\d:\d\d<")  # what a progress bar draws
Said = namedtuple("Said", "code out err")  # what a command left: exit code, standard output, standard error


def sentence(rng: random.Random) -> str:
    a, b = rng.sample(THINGS, 2)
    does, like, other = rng.choice(DOES), rng.choice(LIKE), rng.choice(LIKE)
    return rng.choice(
        [
            f"The {like} {a} {does} the {other} {b} {rng.choice(WHEN)}.",
            f"{rng.choice(WHEN).capitalize()} the {a} {does} a {like} {b} that nobody else remembers.",
            f"{rng.choice(NAMES)} knows why the {like} {a} {does} {rng.choice(NAMES)} and then {rng.choice(DOES)} the {b}.",
        ]
    )


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(folder: Path) -> dict[str, str]:
    """Each file under a folder, hidden ones too, with what it holds."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def hidden(folder: Path) -> list[Path]:
    """Hidden files and folders, all of them temporary, but for the lock of a run, which stays."""
    return [path for path in folder.rglob(".*") if path.name != ".lock"]


def pretraining(folder: Path) -> dict | None:
    """The outcome of pretraining in a run's folder; None while it is not finished."""
    return json.loads((folder / "run.json").read_text())["pretraining"]


def forget_pretraining(folder: Path):
    """Let a run's folder say that its pretraining is not finished."""
    values = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(values | dict(state="begun", pretraining=None)))


def command(*argv, cwd: Path = Path(), cache: Path | None = None) -> Said:
    """Give `cram` a command in this process: as the shell would, but without loading torch again."""
    from cramming_nb.app.cli import main

    out, err, here, before = io.StringIO(), io.StringIO(), Path.cwd(), signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        if cache:
            patch.setenv("CRAM_CACHE", str(cache))
        try:
            code = main([str(a) for a in argv])
        except SystemExit as stop:
            code = stop.code
        finally:
            signal.signal(signal.SIGTERM, before)
            os.chdir(here)
    return Said(code, out.getvalue(), err.getvalue())


def work_briefly():
    """Let runs of this process measure the matrix rate for milliseconds, and make probe tasks of few rows.

    In full, the two are most of what a tiny run does. They are done in full by test_gpu and test_loop, and in
    processes that start anew, as those of `torchrun` and of test_on_gpu.
    """
    from cramming_nb.app import probes, run
    from cramming_nb.engine import hardware, hooks

    def brief(machine: hardware.Hardware, seconds: float = 0.0) -> float:
        return hardware.matrix_rate(machine, seconds=0.005, size=128)

    run.matrix_rate = hooks.matrix_rate = brief
    run.probe_tasks = partial(probes.probe_tasks, train=320, dev=160)


def lines(err: str) -> list[str]:
    """What was said on standard error, progress bars left out."""
    return [line for line in re.split(r"[\r\n]+", err) if line.strip() and not BAR.search(line)]


def child(argv: list[str], cwd: str, cache: str, output: str, mode: str = "w"):
    """The body of a process that can be killed: `cram` with its output in a file."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where the tests run under `nohup`
    os.environ["CRAM_CACHE"] = cache
    os.chdir(cwd)
    sys.stdout = sys.stderr = open(output, mode, buffering=1)
    from cramming_nb.app.cli import main

    work_briefly()
    sys.exit(main(argv))


class Forked(context.ForkServerProcess):
    """A process that is forked from a server which has loaded once what takes seconds to load.

    It has the environment of the process that starts it, as one that starts anew would, and may start others.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        forkserver._forkserver.ensure_running()
        self.environment, self.address = dict(os.environ), forkserver._forkserver._forkserver_address
        self.server_key = getattr(forkserver._forkserver, "_forkserver_authkey", None)  # from Python 3.14 on

    @staticmethod
    def all() -> set[int]:
        """The processes of this kind that live, also those that one of them has started."""
        server = forkserver._forkserver._forkserver_pid
        return set(map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split()))

    def run(self):
        gc.freeze()  # what the server has loaded
        os.environ.clear()
        os.environ.update(self.environment)
        forkserver._forkserver._forkserver_address = self.address  # else it would start a server of its own
        forkserver._forkserver._forkserver_authkey = self.server_key
        forkserver._forkserver.ensure_running = lambda: None
        save_time()
        super().run()


class Server(context.ForkServerContext):
    """What starts such processes."""

    Process = Forked


SERVER = Server()
SERVER.set_forkserver_preload(
    ["cramming_nb.app.run", "cramming_nb.app.counting", "cramming_nb.lab.experiments", "scipy.stats", "torch._dynamo"]
)
multiprocessing.set_forkserver_preload = lambda modules: None  # a bench asks the same server for fewer


def save_time():
    """Let engines of this process fork their workers, which else would start anew and load torch, each of them.

    They start anew in test_guard and test_orphans, and wherever a test runs `cram` by `run_python`. Nor is any file
    waited for until it is on the disk.
    """
    from cramming_nb.engine import jobs

    os.fsync = lambda descriptor: None  # a test ends processes, and never cuts the power
    really = multiprocessing.get_context
    jobs.multiprocessing = SimpleNamespace(
        get_context=lambda method: really("fork") if method == "fork" else SERVER,
        parent_process=multiprocessing.parent_process,
    )


@pytest.fixture(scope="session", autouse=True)
def saved_time():
    save_time()


class Killable:
    """`cram` in a process of its own, with its output in a file."""

    server = SERVER
    body = staticmethod(child)

    def __init__(self, *argv, cwd: Path, cache: Path):
        self.output = cwd / "output.txt"
        self.process = self.server.Process(
            target=self.body, args=([str(a) for a in argv], str(cwd), str(cache), str(self.output))
        )
        self.process.start()

    def wait_for(self, condition, seconds: float = 300, pause: float = 0.005):
        """Wait until something is true of the files; fails if the process ends before."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.is_alive(), f"ended with {self.process.exitcode}: {self.output.read_text()}"
            assert time.monotonic() < end, self.output.read_text()
            time.sleep(pause)

    def send(self, signum: int) -> int:
        """Send a signal; returns the exit code (minus the signal's number if it killed)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signum)
        return self.end()

    def end(self, seconds: float = 300) -> int:
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"did not end: {self.output.read_text()}")
        return self.process.exitcode


class Tiny:
    """The tiny text, its recipe, and a cache folder in which its corpus is built once."""

    def __init__(self, folder: Path):
        rng = random.Random(1)
        docs = [
            dict(text=" ".join(sentence(rng) for _ in range(rng.randint(5, 9))), source=f"book-{i % 3}")
            for i in range(240)
        ]
        docs.append(dict(text="qzx" * 400, source="noise"))  # what the filter is there for
        self.folder, self.cache = folder, folder / "cache"
        self.text = write_jsonl(folder / "tiny.jsonl", docs)
        self.recipe = folder / "tiny.yaml"
        self.recipe.write_text(RECIPE)

    def options(self, budget: str = "20ktok") -> list[str]:
        """The arguments of `cram run` and `cram pretrain` that name this text and recipe."""
        return [str(self.recipe), "--source", f"files:{self.text}", "--budget", budget]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    work_briefly()
    return Tiny(tmp_path_factory.mktemp("tiny"))


class Finished:
    """A run that is done: where it was started, its folder, and what it said."""

    def __init__(self, home: Path, tiny: Tiny, said: Said):
        self.home, self.tiny, self.said, self.folder = home, tiny, said, home / "runs" / "first"

    def command(self, *argv) -> Said:
        return command(*argv, cwd=self.home, cache=self.tiny.cache)

    def copy(self, home: Path) -> "Finished":
        """The same in another folder, to be changed there."""
        shutil.copytree(self.folder, home / "runs" / "first")
        return Finished(home, self.tiny, self.said)


@pytest.fixture(scope="session")
def finished(tiny, tmp_path_factory) -> Finished:
    """The whole job, done once; tests that change it take a copy."""
    home = tmp_path_factory.mktemp("home")
    said = command("run", *tiny.options(), "--name", "first", cwd=home, cache=tiny.cache)
    assert said.code == 0, said.err
    return Finished(home, tiny, said)


@pytest.fixture
def a_copy(finished, tmp_path) -> Finished:
    return finished.copy(tmp_path)


# A Python process in which third-party packages are loaded, but neither transformers nor this one. For each code that
# it reads it forks: the code runs as in a new process, without waiting seconds for torch.
FORKS = """
import gc, json, os, sys, tempfile, traceback
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor, torch.export
import joblib, matplotlib.pyplot, pyarrow.parquet, scipy.optimize, scipy.stats, sklearn.metrics, tokenizers
import sklearn.feature_extraction.text, sklearn.linear_model, sklearn.multiclass, sklearn.pipeline
gc.freeze()
for line in sys.stdin:
    source, cwd, env = json.loads(line)
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        os.chdir(cwd)
        os.environ.clear(), os.environ.update(env)
        code = 0
        try:
            exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
        except BaseException:
            code = 1
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = []
    for file in (out, err):
        file.seek(0)
        said.append(file.read().decode())
    print(json.dumps([code, *said]), flush=True)
os._exit(0)  # the end of an interpreter takes a second, with all that torch has loaded
"""


@pytest.fixture(scope="session")
def run_python():
    """Runs code in a new process that has not loaded transformers nor this package, in a folder if one is given."""
    server = subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(code: str, cwd: Path = Path(), **env: str) -> Said:
        server.stdin.write(json.dumps([code, str(cwd.absolute()), os.environ | env]) + "\n")
        server.stdin.flush()
        return Said(*json.loads(server.stdout.readline()))

    yield run
    server.stdin.close()
    assert server.wait() == 0


@pytest.fixture
def disk(monkeypatch):
    """A disk on which files may grow beyond no more than so many bytes; 0 is a disk with room again."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # else a module would be cached cut short
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most or before[0], before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def cram(tmp_path, run_python):
    """`cram` in a process that has loaded nothing of this package, in a folder of the test's own."""

    def start(*argv) -> Said:
        code = f"""import sys
from cramming_nb.app.cli import main
sys.argv = ["cram", *{[str(a) for a in argv]!r}]
sys.exit(main())"""
        return run_python(code, tmp_path, CRAM_CACHE=str(tmp_path / "cache"))

    return start


GLUE_ROWS = dict(
    cola=[
        dict(sentence=f"The garden {'finds' if i % 2 else 'find the the'} a kettle.", label=i % 2) for i in range(24)
    ],
    stsb=[
        dict(sentence1="The sailor waits.", sentence2="The sailor " + "sings " * (i % 6), label=i % 6)
        for i in range(24)
    ],
    rte=[
        dict(sentence1="Rain fell.", sentence2="It was wet.", label=["entailment", "not_entailment"][i % 2])
        for i in range(24)
    ],
)


def write_glue(folder: Path) -> Path:
    """A GLUE folder with three small tasks."""
    for name, rows in zip(("CoLA", "STS-B", "RTE"), GLUE_ROWS.values(), strict=True):
        (folder / name).mkdir(parents=True)
        write_jsonl(folder / name / "train.jsonl", rows)
        write_jsonl(folder / name / "dev.jsonl", rows[:12])
    return folder


@pytest.fixture
def glue(tmp_path) -> Path:
    return write_glue(tmp_path / "glue")


# Modules that take longest. They are begun first, so that no worker is left alone with one of them at the end.
LONG = "test_on_gpu test_compile test_ray test_lab test_distribution test_export test_glue test_resume test_corpus_build test_faults".split()


def pytest_collection_modifyitems(items: list):
    """Put long modules first, and leave all else as it is."""
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


def pytest_collection_finish():
    """Let no search for garbage go through all that modules hold, neither now and then nor at the end."""
    gc.collect()
    gc.freeze()
