"""The command answers at once, explains each of its options, and says what it printed."""

import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest
import yaml
from conftest import command, lines

from cramming_nb.app import cli
from cramming_nb.app.cli import BENCHES, COMMANDS, RunOptions
from cramming_nb.engine.checkpoint import Interrupted
from cramming_nb.engine.errors import UserError
from cramming_nb.recipes import RECIPES, flat, load_recipe

HEAVY = {"torch", "datasets", "tokenizers", "matplotlib", "sklearn", "scipy", "numpy", "pyarrow", "transformers"}


@pytest.mark.parametrize("argv", ["--help", "--version", "run --help"])
def test_answers_without_loading_torch(argv):
    call = [sys.executable, "-X", "importtime", "-c", "import sys; from cramming_nb.app.cli import main; sys.exit(main())"]
    result = subprocess.run([*call, *argv.split()], capture_output=True, text=True)
    imports = [line for line in result.stderr.splitlines() if "import time:" in line]
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in imports}
    assert result.returncode == 0 and "tyro" in loaded
    assert not HEAVY & loaded
    assert result.stdout.strip()


def test_module_is_the_command():
    call = [sys.executable, "-m", "cramming_nb.app.cli"]  # as torchrun starts it
    result = subprocess.run([*call, "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, version("cramming_nb"))
    result = subprocess.run([*call, "recipes", "diff"], capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("cram: ")


@pytest.mark.parametrize("argv", ["recipes fields", "recipes", "--version", "run --help"])
def test_ends_quietly_where_nobody_reads(argv):
    """As in `cram recipes fields | head -1`, once `head` has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    call = [sys.executable, "-m", "cramming_nb.app.cli", *argv.split()]
    result = subprocess.run(call, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_errors_that_nobody_reads_end_it_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    call = [sys.executable, "-m", "cramming_nb.app", "run", "nosuch"]
    result = subprocess.run(call, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert (result.returncode, result.stdout) == (2, b"")


PLAIN = dict(PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
TERMINALS = {
    "ascii": dict(PYTHONIOENCODING="ascii"),
    "latin-1": dict(PYTHONIOENCODING="latin-1"),
    "C locale": dict(LC_ALL="C", **PLAIN),
    "cp437": dict(PYTHONIOENCODING="cp437:strict"),
}


IN_TURN = """import os, sys
from pathlib import Path
import matplotlib.pyplot, torch._dynamo, cramming_nb.app.export, cramming_nb.app.run  # once, and not by each command
from cramming_nb.app.__main__ import program
folder, calls = Path(sys.argv[1]), {calls!a}
for number, (argv, given) in enumerate(calls):
    if not os.fork():
        for stream, text in enumerate((given, "", "")):
            path = folder / f"{{number}}-{{stream}}"
            path.write_bytes(text.encode())
            os.dup2(os.open(path, os.O_RDWR), stream)
        sys.argv = ["cram", *argv]
        code = program()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)  # the end of an interpreter takes a second, with all that torch has loaded
    assert not os.wait()[1], argv
os._exit(0)"""


@pytest.mark.parametrize("terminal", TERMINALS.values(), ids=TERMINALS)
def test_what_a_terminal_cannot_show_is_replaced(terminal, finished, tmp_path):
    """Texts come in, and words go out, that it has no letters for; bars and dashes, too."""
    calls = [
        (("predict", "first", "Łódź’s [MASK] 花"), ""),
        (("predict", "first"), "Łódź’s [MASK] 花\n"),
        (("report", "first", "--markdown"), ""),
        (("recipes",), ""),
    ]
    call = [sys.executable, "-c", IN_TURN.format(calls=calls), tmp_path]
    done = subprocess.run(call, cwd=finished.home, env=os.environ | terminal, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    for number in range(len(calls)):
        assert (tmp_path / f"{number}-1").read_bytes().strip()
        assert b"Traceback" not in (tmp_path / f"{number}-2").read_bytes()


def test_a_mark_of_the_byte_order_is_no_text(finished):
    call = [sys.executable, "-m", "cramming_nb.app", "predict", "first"]
    done = subprocess.run(call, cwd=finished.home, input=b"\xef\xbb\xbfa [MASK]\n", capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith(b"a [MASK]\n")


CLOSED = {"<&-": (2, "no text"), ">&-": (0, ""), "2>&-": (0, ""), ">&- 2>&- <&-": (2, "")}


@pytest.mark.parametrize("closed", CLOSED)
def test_closed_streams(closed, finished):
    code, words = CLOSED[closed]
    text = "" if "<" in closed else "'a [MASK]'"
    shell = f"exec {shlex.quote(sys.executable)} -m cramming_nb.app predict first {text} {closed}"
    done = subprocess.run(shell, shell=True, cwd=finished.home, capture_output=True, text=True)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr


LOADING = """import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
class Interrupting:
    def find_spec(self, name, *more):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from cramming_nb.app.__main__ import program
sys.argv = ["cram", "predict", "nosuch", "a [MASK]"]
sys.exit(program())"""


@pytest.mark.parametrize("name", ["tyro", "yaml", "cramming_nb.app.cli", "numpy", "torch", "safetensors"])
def test_interrupted_while_modules_are_loaded(name, tmp_path):
    """Nothing is half loaded, and no traceback shown."""
    (tmp_path / "runs" / "nosuch").mkdir(parents=True)
    (tmp_path / "runs" / "nosuch" / "config.json").write_text("{}")
    call = [sys.executable, "-c", LOADING.format(name=name)]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr in ("", "cram: interrupted\n"), done.stderr


@pytest.mark.parametrize(
    "argv, wanted",
    {
        "run --set a=1 --set b=2 c=3": "run --set a=1 b=2 c=3",
        "run --set=a=1 --seed=3 pocket --set=b=2": "run pocket --set a=1 b=2 --seed=3",
        "finetune mine --text one --kind classes --text two": "finetune mine --text one two --kind classes",
        "lab list.yaml --only a --jobs 2 --only b": "lab list.yaml --only a b --jobs 2",
        "run --snapshots 0.1 --snapshots 0.5 --name=-x": "run --snapshots 0.1 0.5 --name=-x",
        "predict mine --top 3 text": "predict mine --top 3 text",
    }.items(),
)
def test_an_option_given_twice_adds_up(argv, wanted):
    assert cli.joined(shlex.split(argv)) == shlex.split(wanted)


@pytest.mark.parametrize(
    "argv",
    ["--source a --source b", "--seed 1 --seed=2", "--data-dir a --data_dir b", "--probes --probes", "--set a=1 --set a=2"],
)
def test_an_option_given_twice_is_refused(argv, tmp_path):
    said = command("run", *shlex.split(argv), cwd=tmp_path)
    assert said.code == 2 and "twice" in said.err and said.err.count("\n") == 1


def test_a_tilde_is_the_home_folder(tiny, tmp_path):
    """A shell leaves it in --data-dir=~/x."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path / "home"))
        said = command("data", "build", *tiny.options()[:3], "--data-dir=~/x", cwd=tmp_path)
    assert said.code == 0 and list(tmp_path.glob("home/x/corpus-*")) and not (tmp_path / "~").exists()
    assert cli.with_home("~ is a [MASK]") == "~ is a [MASK]" and "~" not in cli.with_home("files:~/a.txt")


def test_a_user_without_a_home(tiny, tmp_path, monkeypatch):
    def unknown(*user):
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "CRAM_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    said = command("data", "build", *tiny.options()[:3], cwd=tmp_path)
    assert said.code == 2 and lines(said.err)[-1].endswith("name a folder for corpora with --data-dir")
    assert command("data", "build", *tiny.options()[:3], "--data-dir", "data", cwd=tmp_path).code == 0


def test_a_second_sigterm_finds_it_leaving():
    """Slurm and `timeout` signal the whole group, so that it may come twice."""
    code = """import atexit, signal, sys
from cramming_nb.app import cli
atexit.register(signal.raise_signal, signal.SIGTERM)
cli.perform = lambda argv: signal.raise_signal(signal.SIGTERM)
sys.exit(cli.main(["run"]))"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (143, "cram: interrupted; the same command goes on from here\n")


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_is_not_lost_while_an_object_is_deleted(name, code):
    """Python drops what a `__del__` raises, also what the handler of a signal raises there."""
    script = f"""import signal, sys, time
from cramming_nb.app import cli
from cramming_nb.app.__main__ import program
class Deleted:
    def __del__(self):
        signal.raise_signal(signal.{name})
def work(argv):
    Deleted()
    time.sleep(60)
cli.perform, sys.argv = work, ["cram", "run"]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where the tests run under `nohup`
sys.exit(program())"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    said = "cram: interrupted; the same command goes on from here\n"
    assert (result.returncode, result.stderr) == (code, said)


GOES_ON = "data glue lab pretrain run".split()


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (Interrupted(15), 143)], ids=["at once", "saved"])
def test_a_command_says_whether_it_goes_on(name, error, code, monkeypatch):
    def interrupted(argv):
        raise error

    monkeypatch.setattr(cli, "perform", interrupted)
    said = command(name)
    what = "stopped and saved" if code == 143 and name in GOES_ON else "interrupted"
    advice = "; the same command goes on from here" if name in GOES_ON else ""
    assert (said.code, said.err) == (code, f"cram: {what}{advice}\n")


@pytest.mark.parametrize("argv, words", [("list pocket", "no names;"), ("show a b", "1 name;"), ("diff a", "2 names;")])
def test_recipes_say_how_many_names_they_take(argv, words):
    said = command("recipes", *argv.split())
    assert said.code == 2 and f"takes {words}" in said.err


def test_help_lists_every_command(tmp_path):
    for argv in (["--help"], []):
        result = command(*argv, cwd=tmp_path)
        assert result.code == 0
        assert [name for name in COMMANDS if not re.search(rf"^\W*{name}\b", result.out, re.M)] == []


def explained(text: str) -> dict[str, str]:
    """What a help text says about each option and argument: {first words: the rest}."""
    boxed = [line[2:].rstrip("│ ") for line in text.splitlines() if line.startswith("│ ")]
    found, entry = {}, ""
    for line in boxed:
        if re.match(r"\S", line):
            entry, _, rest = line.partition("  ")
            found[entry] = rest.strip()
        elif entry:
            found[entry] += " " + line.strip()
    return found


PAGES = {name: kind for name, kind in COMMANDS.items() if name != "bench"}
PAGES |= {f"bench {name}": kind for name, kind in BENCHES.items()}


def options_of(function) -> list[inspect.Parameter]:
    """The parameters of a command, and the fields of the options that it shares."""
    own = inspect.signature(function).parameters.values()
    shared = inspect.signature(RunOptions).parameters.values()
    return [option for p in own for option in (shared if p.name == "options" else [p])]


def test_options_that_take_several_values_are_known():
    several = [o for kind in PAGES.values() for o in options_of(kind) if isinstance(o.default, (tuple, list))]
    named = {"--" + o.name.replace("_", "-") for o in several if o.kind is not inspect.Parameter.POSITIONAL_ONLY}
    assert named == cli.LISTS


def help_of(name: str, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    call = [sys.executable, "-m", "cramming_nb.app.cli", *name.split(), "--help"]
    return subprocess.run(call, capture_output=True, encoding="utf-8", check=True).stdout


def test_help_lists_every_bench(monkeypatch):
    _, listed = help_of("bench", monkeypatch).split("subcommands")
    listed = " ".join(re.sub(r"[│╭╮╰╯─]", " ", listed).split())
    found = dict(re.findall(r"• (\w+) (.+?)(?= •|$)", listed))
    told = {name: inspect.getdoc(kind).partition("\n\nArgs:")[0] for name, kind in BENCHES.items()}
    assert found == {name: " ".join(text.split()) for name, text in told.items()}


@pytest.mark.parametrize("name", PAGES)
def test_help_explains_each_field_and_its_default(name, monkeypatch):
    found = explained(help_of(name, monkeypatch))
    found = {entry: text for entry, text in found.items() if not entry.startswith("-h")}
    fields = options_of(PAGES[name])
    assert len(found) == len(fields), found
    for entry, text in found.items():
        meaning, default = re.fullmatch(r"(.*?) ?(\(default: .*\)|\(required.*\))?", text).groups()
        assert default, f"{entry}: no default"
        assert len(meaning.split()) >= 2, f"{entry}: {meaning!r} explains nothing"
    for field in fields:
        if field.default not in (inspect.Parameter.empty, None, (), ""):
            assert f"(default: {field.default})" in " ".join(found.values()), field.name


def test_recipes_are_listed(tmp_path):
    result = command("recipes", cwd=tmp_path)
    assert [line.split()[0] for line in result.out.splitlines()] == list(RECIPES)


def test_help_explains_each_field_of_a_recipe(tmp_path):
    result = command("pretrain", "--help", cwd=tmp_path)
    known = flat(RECIPES["crammed-v2"])
    told = dict(re.findall(r"^(\w+\.\w+) = (.+?)  +\S.+$", result.out, re.M))
    assert result.code == 0 and {key: json.loads(value) for key, value in told.items()} == known
    fields = command("recipes", "fields", "pocket", cwd=tmp_path).out
    assert 'schedule.lr = "wsd"' in fields and "triangle2, one_cycle" in fields


def test_default_of_recipes_show(tmp_path):
    assert command("recipes", "show", cwd=tmp_path).out == command("recipes", "show", "pocket", cwd=tmp_path).out


@pytest.mark.parametrize("name", RECIPES)
def test_shown_recipe_is_the_recipe(name, tmp_path):
    (tmp_path / "my.yaml").write_text(command("recipes", "show", name, cwd=tmp_path).out)
    assert flat(load_recipe(str(tmp_path / "my.yaml"))) == flat(RECIPES[name])
    result = command("recipes", "diff", name, "my.yaml", cwd=tmp_path)
    assert result.code == 0 and not re.search(r"\w+\.\w+", result.out)


def test_changed_recipe_differs_in_what_was_changed(tmp_path):
    fields = yaml.safe_load(command("recipes", "show", "pocket", cwd=tmp_path).out)
    fields["schedule"]["batch_size"] = 77
    fields["optimizer"]["betas"] = [0.9, 0.5]
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(fields))
    result = command("recipes", "diff", "pocket", "my.yaml", cwd=tmp_path)
    rows = {row.split()[0]: row for row in result.out.splitlines()}
    assert set(rows) == {"schedule.batch_size", "optimizer.betas"}
    assert rows["schedule.batch_size"].split() == ["schedule.batch_size", "32", "77"]


@pytest.mark.parametrize(
    "change, words",
    [("architecture.vocab_size=999", "set corpus.vocab_size"), ("corpus.decontaminate=true", "with --glue-dir")],
)
def test_change_that_would_do_nothing_is_refused(change, words, tiny, tmp_path):
    result = command("data", "build", *tiny.options()[:3], "--set", change, cwd=tmp_path, cache=tiny.cache)
    assert result.code == 2 and words in lines(result.err)[0]


def test_a_text_is_searched_for_sentences_of_tasks_once(tiny, glue, tmp_path):
    cache, given = tmp_path / "cache", [*tiny.options()[:3], "--glue-dir", glue]
    built = command("data", "build", *given, cwd=tmp_path, cache=cache)
    assert built.code == 0, built.err
    (folder,) = cache.glob("corpus-*")
    assert json.loads((folder / "manifest.json").read_text())["overlap"]["sentences"] > 0
    run = command("pretrain", *tiny.options("2step"), "--name", "searched", cwd=tmp_path, cache=cache)
    assert run.code == 0 and len([*cache.glob("corpus-*")]) == 2  # without the tasks it is another corpus
    argv = ["run", *tiny.options("2step"), "--glue-dir", glue, "--finetune-seeds", "0", "--name", "same"]
    assert command(*argv, cwd=tmp_path, cache=cache).code == 0
    assert len([*cache.glob("corpus-*")]) == 2


def test_options_set_what_they_say(tiny, tmp_path):
    for words, mistake in {
        "--set corpus.normalizer=unicode schedule.batch_size=16 optimizer.lr=1e-2": None,
        "--set schedule.batch_size=16.0 training.micro_batch_size=1.0e+1": None,
        "--set corpus.order=random --seed 3": None,
        "--set optimizer.betas=[0.9,0.99]": None,
        "--set optimizer.betas=0.9": "optimizer.betas",
        "--set schedule.batch_size=1.5": "schedule.batch_size",
        "--set schedule.batch_size=.inf": "schedule.batch_size",
        "--set architecture.embedding_norm=maybe": "architecture.embedding_norm",
    }.items():
        argv = ["run", tiny.recipe, "--source", "files:nosuch", "--budget", "1ktok", *shlex.split(words)]
        result = command(*argv, cwd=tmp_path, cache=tmp_path / "cache")
        assert result.code == 2 and len(lines(result.err)) == 1
        assert (mistake or "nosuch") in result.err  # without a mistake, the text is the next thing to be missed


def test_real_process_exits_with_the_code(tmp_path):
    call = [sys.executable, "-m", "cramming_nb.app.cli", "predict", "nosuch", "a [MASK]"]
    result = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("cram: no run 'nosuch'") and result.stderr.count("\n") == 1


LINES = {  # what comes on standard input: the texts, and those where a text may be empty
    "a\r\nb c \n\n": (["a", "b c "], ["a", "b c "]),
    "a\n\nb\n \nc": (["a", "b", "c"], ["a", "", "b", " ", "c"]),
    "\nb\n": (["b"], ["", "b"]),
    "a\u2028b\x0cc\x85d\n": (["a\u2028b\x0cc\x85d"], ["a\u2028b\x0cc\x85d"]),
}


@pytest.mark.parametrize("given", LINES, ids=repr)
@pytest.mark.parametrize("empty", [False, True])
def test_texts_are_the_lines_of_standard_input(given, empty, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    assert cli.given_texts((), empty) == LINES[given][empty]


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("given", ["", "\n\n\r\n"], ids=repr)
def test_empty_lines_alone_are_no_text(given, empty, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    with pytest.raises(UserError, match="^no text"):
        cli.given_texts((), empty)


def test_a_text_without_a_run_is_told():
    said = command("predict", "The [MASK] is late.")
    assert said.code == 2 and "'The [MASK] is late.' is a text; name a RUN before it" in said.err
