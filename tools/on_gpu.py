"""A quarter of an hour on a GPU, in stages: what is new comes first, and each leaves its results before the next begins.

python tools/on_gpu.py plan                                              print the stages with their seconds
python tools/on_gpu.py pack FOLDER --text TEXT --glue-dir G --blimp B    build the rows, and compress them for two trips
python tools/on_gpu.py run OUT --from FOLDER/1 FOLDER/2 --stages profile sprint --minutes 9

`pack` runs where the text is. It writes the rows of the recipe `sprint`, compressed, into FOLDER/1 and FOLDER/2, with
the tasks in each. It says how large each trip is, with the files of the repository, and fails if one is over 64 MiB.
`run` works with the trips that have arrived; half of the rows are a corpus, too. OUT gets flat files: status.json, and
a JSON file and a plot of each stage. What a stage has finished is not done again, as long as the folder `--work` stays.

The stages:
profile    20 steps of some arms: seconds to compile, tokens a second, memory, and the time of each kernel
sprint     the budget on the recipe `sprint`, then GLUE
variants   some changes of it, half a minute each; the lowest held-out loss is chosen
best       the budget on what was chosen, then GLUE
extra      the newest model without fine-tuning: BLiMP, and its vectors as features
steps      the time of a step of fine-tuning, recorded and plain
at_once    what a compiler that sees the whole model takes
tests      the tests marked gpu
bench      our training step and the baselines

A pretraining of `sprint` or `best` begins with a cold compiler, as a first `cram run` does. Fine-tuning follows the recipe,
three times on each small task. Other learning rates and readings of pairs were tried on held-back training rows
(records/gpu/mended.json), and no difference was clear.

It needs torch, numpy, safetensors, tokenizers, tqdm, pyyaml, joblib, matplotlib, pyarrow, scikit-learn and scipy. It
does without an installed package, datasets, tyro and nvidia-ml-py; without the last there is no energy in the records.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import lzma
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

NEEDED = "torch numpy safetensors tokenizers tqdm yaml joblib matplotlib pyarrow sklearn scipy".split()
TRIP = 64 * 2**20  # bytes that travel at once
PARTS = 4  # of the rows: two a trip
FILTERS = [dict(id=lzma.FILTER_LZMA2, preset=9 | lzma.PRESET_EXTREME, lc=0, lp=1, pb=1, dict_size=1 << 26)]
SMALL = {
    "architecture.hidden_size": 512,
    "architecture.num_layers": 12,
    "architecture.num_heads": 8,
    "architecture.ffn_size": 2048,
    "optimizer.lr": 1.5e-3,
    "training.micro_batch_size": 512,
}
MUON = {"optimizer.name": "muon", "optimizer.lr": 3e-3}
REPLACED = {"objective.name": "rtd"}
ARMS = {  # what is profiled: recipe and changes
    "sprint": ("sprint", {}),
    "small": ("sprint", SMALL),
    "small, muon": ("sprint", SMALL | MUON),
    "small, replaced tokens": ("sprint", SMALL | REPLACED),
    "crammed-v2": (
        "crammed-v2",
        {"schedule.batch_size": 512, "schedule.batch_ramp": 0.0, "training.compile_by": "block"},
    ),
}
AT_ONCE = {"sprint, compiled at once": ("sprint", {"training.compile_by": "model"})}
VARIANTS = {  # changes of `sprint`, and the arm whose speed they have
    "small": (SMALL, "small"),
    "small, muon": (SMALL | MUON, "small, muon"),
    "small, muon, 40 % masks": (SMALL | MUON | {"objective.mlm_probability": 0.4}, "small, muon"),
    "small, replaced tokens": (SMALL | REPLACED, "small, replaced tokens"),  # its loss is its generator's
}
LARGE = 20_000  # training rows; a larger task is fine-tuned once
GROUPS = {  # kernels, by what their names contain
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma"),
    "attention": ("sdpa", "flash", "fmha", "dot_do_o", "convert_dq"),
    "rotation": ("addcmul", "flip"),
    "gates": ("gelu",),
    "norms": ("norm",),
    "optimizer": ("multi_tensor", "FusedOptimizer"),
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["plan", "pack", "run"])
    parser.add_argument("folder", type=Path, nargs="?", help="where results, or packed rows, go")
    parser.add_argument("--text", help="a source of text, as `cram run` reads it")
    parser.add_argument("--from", type=Path, nargs="*", default=[], dest="trips", help="folders that `pack` wrote")
    parser.add_argument("--glue-dir", type=Path, help="folder of GLUE tasks, to pack")
    parser.add_argument("--blimp", type=Path, help="folder of BLiMP's paradigms, to pack")
    parser.add_argument("--stages", nargs="*", default=["profile", "sprint", "extra"], choices=list(STAGES))
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir(), "on_gpu"), help="folder for rows, checkpoints, results"
    )
    parser.add_argument("--budget", default="330s", help="of the stages sprint and best")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS), help="of the stage profile")
    parser.add_argument("--variant", default="", help="of the stage best; empty: what the stage variants chose")
    parser.add_argument("--variant-seconds", type=float, default=20.0, help="of steps, for each variant")
    parser.add_argument("--steps", type=int, default=20, help="that are timed in the stage profile")
    parser.add_argument("--set", nargs="*", default=[], help="changes of every recipe, FIELD=VALUE")
    parser.add_argument("--processes", type=int, default=4, help="that fine-tune at a time")
    parser.add_argument("--without-gpu", action="store_true", help="go on where PyTorch finds no GPU")
    parser.add_argument("--stage", help=argparse.SUPPRESS)  # a process of its own does one stage
    a = parser.parse_args(argv)
    if a.action != "plan" and not a.folder:
        parser.error(f"{a.action} needs a folder")
    return a


# Rows that travel


def pack(a: argparse.Namespace) -> int:
    """Write the rows of `sprint` for two trips; returns 2 if one is too large."""
    from cramming_nb.app.run import dev_sentences
    from cramming_nb.corpus import get_corpus
    from cramming_nb.glue import load_glue

    tasks = load_glue(a.glue_dir) if a.glue_dir else {}
    corpus = get_corpus(a.text, recipe_of(a, {}).corpus, a.work / "data", avoid=dev_sentences(tasks))
    trips = [a.folder / "1", a.folder / "2"]
    for trip in trips:
        trip.mkdir(parents=True, exist_ok=True)
        for name in ("manifest.json", "tokenizer.json", "heldout.npy"):
            shutil.copy(corpus.folder / name, trip)
        for name, source in (("glue", a.glue_dir), ("blimp", a.blimp)):
            if source:
                shutil.copytree(source, trip / name, dirs_exist_ok=True)
    places = [trips[number * len(trips) // PARTS] for number in range(PARTS)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(pack_part, [corpus.folder] * PARTS, places, range(PARTS)))
    return sum(say_size(trip) > TRIP for trip in trips) and 2


def pack_part(corpus: Path, folder: Path, number: int):
    """Compress one part of the rows."""
    import numpy as np

    rows = np.load(corpus / "train.npy", mmap_mode="r")
    first, last = len(rows) * number // PARTS, len(rows) * (number + 1) // PARTS
    packed = lzma.compress(np.ascontiguousarray(rows[first:last]).tobytes(), lzma.FORMAT_XZ, filters=FILTERS)
    (folder / f"rows-{number}.xz").write_bytes(packed)


def say_size(trip: Path) -> int:
    """The bytes of a trip with the repository's files; prints them."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in tracked.split("\0") if name] + list(trip.rglob("*"))
    total = sum(path.stat().st_size for path in paths if path.is_file())
    verdict = "" if total <= TRIP else "; too large: leave out nbs/ and records/, or pack less text"
    print(f"{trip}: {total / 2**20:.1f} MiB with the repository, of {TRIP / 2**20:.0f}{verdict}")
    return total


def unpacked(path: Path):
    """The rows of a part, uint16 [rows * length]."""
    import numpy as np

    return np.frombuffer(lzma.decompress(path.read_bytes()), np.uint16)


def corpus_from(a: argparse.Namespace):
    """The corpus of the parts that have arrived."""
    import numpy as np

    from cramming_nb.corpus import Corpus
    from cramming_nb.engine.files import file_checksum

    found = {path.name: path for trip in a.trips for path in sorted(trip.glob("*"))}
    parts = sorted(name for name in found if name.startswith("rows-"))
    if not parts:
        raise SystemExit(f"no packed rows in {', '.join(map(str, a.trips)) or 'any folder: name some with --from'}")
    folder = a.work / "data" / f"corpus-{len(parts)}-parts"
    if not (folder / "manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "heldout.npy"):
            shutil.copy(found[name], folder)
        manifest = json.loads(found["manifest.json"].read_text())
        with ProcessPoolExecutor(len(parts)) as pool:
            rows = np.concatenate(list(pool.map(unpacked, [found[name] for name in parts])))
        rows = rows.reshape(-1, manifest["config"]["seq_length"])
        np.save(folder / "train.npy", rows)
        checksum = file_checksum(folder / "train.npy")
        if len(parts) == PARTS and checksum != manifest["files"]["train"]["sha256"]:
            raise SystemExit("the packed rows are damaged; pack them again")
        manifest["files"]["train"] |= dict(shape=list(rows.shape), sha256=checksum)
        (folder / "probe.jsonl").write_bytes(b"")  # its documents stay behind
        manifest["files"]["probe.jsonl"]["sha256"] = file_checksum(folder / "probe.jsonl")
        write(folder / "manifest.json", manifest)
    return Corpus(folder)


def tasks_from(a: argparse.Namespace, names: tuple = ()) -> dict:
    """The GLUE tasks that have arrived."""
    from cramming_nb.glue import load_glue

    folders = [trip / "glue" for trip in a.trips if (trip / "glue").exists()]
    return load_glue(folders[0], names) if folders else {}


def recipe_of(a: argparse.Namespace, changes: dict, name: str = "sprint"):
    """A recipe with the changes of an arm, and those of the command line."""
    import yaml

    from cramming_nb.recipes import change, load_recipe

    asked = {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in a.set)}
    return change(load_recipe(name), changes | asked)


def learner_of(a: argparse.Namespace, corpus, changes: dict, name: str = "sprint"):
    """A learner of an arm, compiled as its recipe says."""
    from cramming_nb.app.run import should_compile
    from cramming_nb.engine.hardware import DTYPES, Hardware
    from cramming_nb.training import Learner

    r = recipe_of(a, changes, name)
    hardware = Hardware.detect(DTYPES[r.training.dtype])
    hardware.device.prepare(hardware.dtype)
    compiled = should_compile(r.training, hardware, 1e9)
    return Learner(corpus, r.architecture, r.objective, r.optimizer, r.schedule, r.training, hardware, 0, compiled)


# Stages of pretraining


def profile(a: argparse.Namespace) -> dict:
    """Time and profile some steps of each arm."""
    return profile_arms(a, "profile", {arm: ARMS[arm] for arm in a.arms})


def at_once(a: argparse.Namespace) -> dict:
    """The same for a model that is compiled at once."""
    return profile_arms(a, "at_once", AT_ONCE)


def profile_arms(a: argparse.Namespace, stage: str, arms: dict) -> dict:
    """Time and profile some steps of some arms; an arm that fails is named, and the next one comes."""

    corpus, found = corpus_from(a), {}
    for arm, (name, changes) in arms.items():
        forget()
        try:
            found[arm] = profile_arm(a, learner_of(a, corpus, changes, name))
        except Exception as error:  # the other arms are worth the rest of the time
            found[arm] = dict(error=f"{type(error).__name__}: {error}"[:2000])
        print(arm, {key: value for key, value in found[arm].items() if key != "kernels"}, flush=True)
        write(a.folder / f"{stage}.json", found)
    plot_kernels(found, a.folder / f"{stage}.png")
    return found


def forget():
    """Give back what the last arm compiled and the memory of its model."""
    import torch

    torch.compiler.reset()
    gc.collect()


def profile_arm(a: argparse.Namespace, learner) -> dict:
    """Seconds to the first steps, then the speed of some more, and the time of each kernel."""
    from cramming_nb.budget import Budget
    from cramming_nb.engine.clock import Clock
    from cramming_nb.engine.hardware import datasheet_rate
    from cramming_nb.training import prepare

    device, spent = learner.device, learner.state.spent
    learner.budget, learner.clock = Budget.parse("1h"), Clock()
    learner.clock.start()
    begun = time.perf_counter()
    prepare(learner)
    take(learner, 3)
    ready, flops, tokens = time.perf_counter() - begun, spent.flops, spent.tokens
    seconds = take(learner, a.steps)
    flops, tokens, sheet = spent.flops - flops, spent.tokens - tokens, datasheet_rate(learner.hardware.name)
    return dict(
        seconds_to_start=ready, step_ms=1e3 * seconds / a.steps, tokens_per_second=tokens / seconds,
        flops_per_second=flops / seconds, of_datasheet=flops / seconds / sheet if sheet else None,
        peak_memory=device.peak_memory(), micro_batch_size=learner.gradients.micro_batch_size,
        attention=learner.attention, device=learner.hardware.name, kernels=kernels_of(learner),
    )  # fmt: skip


def take(learner, steps: int) -> float:
    """Take some steps; returns their seconds."""
    begun = time.perf_counter()
    for _ in range(steps):
        learner.step()
    learner.settle()
    return time.perf_counter() - begun


def kernels_of(learner, steps: int = 3) -> dict[str, float]:
    """Milliseconds a step of each kernel on a GPU, the longest first; empty on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    if learner.device.kind != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        take(learner, steps)
    times = defaultdict(float)
    for event in found.key_averages():
        times[event.key[:160]] += event.device_time_total / 1e3 / steps
    return {name: times[name] for name in sorted(times, key=times.get, reverse=True)[:60]}


def grouped(kernels: dict[str, float]) -> dict[str, float]:
    """Milliseconds a step by group of kernels."""
    groups = defaultdict(float)
    for name, ms in kernels.items():
        own = (group for group, parts in GROUPS.items() if any(part in name for part in parts))
        groups[next(own, "the rest")] += ms
    return dict(groups)


def plot_kernels(found: dict, path: Path):
    """Draw where the time of a step goes, a bar for each arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    for arm, values in found.items():
        left, groups = 0.0, grouped(values.get("kernels", {}))
        for number, group in enumerate([*GROUPS, "the rest"]):
            label = group if arm == next(iter(found)) else None
            axes.barh(arm, groups.get(group, 0.0), left=left, color=f"C{number}", label=label)
            left += groups.get(group, 0.0)
    axes.set(xlabel="milliseconds a step", title="Where the time of a training step goes")
    axes.legend(ncols=3, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def variants(a: argparse.Namespace) -> dict:
    """Pretrain each variant for the same seconds of steps, by the speeds that `profile` measured."""

    from cramming_nb.budget import Budget
    from cramming_nb.training import pretrain

    corpus, found = corpus_from(a), {}
    profiled = json.loads(result_file(a, "profile").read_text())
    for variant, (changes, arm) in VARIANTS.items():
        if "flops_per_second" not in profiled.get(arm, {}):
            print(f"{variant}: left out, since its arm failed", flush=True)
            continue
        forget()
        few = {"training.validations": 3, "training.checkpoint_fraction": 1.0}
        learner = learner_of(a, corpus, changes | few)
        speed = profiled[arm]["flops_per_second"] / learner.schedule.flops_per_token(0.5)
        budget = Budget.parse(f"{int(a.variant_seconds * speed)}tok")
        outcome = pretrain(learner, budget, a.work / "variants" / variant.replace(" ", "_"), progress=False)
        found[variant] = outcome
        print(variant, f"held-out loss {outcome['heldout_loss']:.3f}", outcome["spent"], flush=True)
        write(a.folder / "variants.json", found)
    plot_curves(found, a.folder / "variants.png")
    return found


def plot_curves(outcomes: dict, path: Path):
    """Draw the held-out loss of some pretrainings."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name, outcome in outcomes.items():
        points = [point for point in outcome["curve"] if point["tokens"]]
        losses = [point["heldout_loss"] for point in points]
        axes.plot([point["tokens"] / 1e6 for point in points], losses, marker=".", label=name)
    axes.set(xlabel="tokens read (millions)", ylabel="held-out loss (nats)", title="Held-out loss")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# A budget, then GLUE


def sprint(a: argparse.Namespace) -> dict:
    """Pretrain and fine-tune the recipe `sprint`."""
    return pretrain_and_tune(a, "sprint", {})


def best(a: argparse.Namespace) -> dict:
    """Pretrain and fine-tune the variant that was chosen."""
    variant = a.variant
    if not variant:
        tried = json.loads(result_file(a, "variants").read_text())
        comparable = [name for name in tried if not REPLACED.items() <= VARIANTS[name][0].items()]
        variant = min(comparable, key=lambda name: tried[name]["heldout_loss"])
    return dict(variant=variant) | pretrain_and_tune(a, "best", VARIANTS[variant][0])


def pretrain_and_tune(a: argparse.Namespace, stage: str, changes: dict) -> dict:
    """Spend the budget with a cold compiler, fine-tune on every task, and leave the run's record."""
    from cramming_nb.app.run import Run, finish, locked, pretrain_run

    cold = a.work / f"cold-{stage}"
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(cold), "TRITON_CACHE_DIR": str(cold / "triton")}
    corpus, tasks, folder = corpus_from(a), tasks_from(a), a.work / "runs" / stage
    run = Run(recipe_of(a, changes), "files:text", a.budget, 0, folder, data_dir=a.work / "data", progress=False)
    with locked(run, corpus):
        pretraining = pretrain_run(run, corpus)
        print(f"{stage}: held-out loss {pretraining['heldout_loss']:.3f}", flush=True)
        write(a.folder / f"{stage}.pretraining.json", pretraining)
        plot_curves({stage: pretraining}, a.folder / f"{stage}.png")
        tuned = Tuning(a, stage, run, tasks).all()
        record = finish(run, tuned)
    shutil.copy(folder / "record.json", a.folder / f"{stage}.record.json")
    return dict(heldout_loss=pretraining["heldout_loss"], key=record.key)


class Tuning:
    """Fine-tunes a model on every task, several at a time."""

    def __init__(self, a: argparse.Namespace, stage: str, run, tasks: dict):
        self.a, self.run, self.tasks = a, run, tasks
        self.path = a.folder / f"{stage}.finetuning.json"
        kept = a.work / "results" / self.path.name  # of a call that was stopped
        self.kept, self.done = kept, json.loads(kept.read_text()) if kept.exists() else []

    def all(self) -> list[dict]:
        """The results of every task, of the first seed first."""
        first = [(name, 0) for name in self.tasks]
        small = [name for name, data in self.tasks.items() if len(data.train) < LARGE]
        self.do(first)
        self.do([(name, seed) for seed in (1, 2) for name in small])
        return self.done

    def do(self, jobs: list[tuple[str, int]]):
        """Do what is not done of some fine-tunings, the largest tasks first."""
        before = {(result["task"], result["seed"]) for result in self.done}
        todo = sorted(set(jobs) - before, key=lambda job: -len(self.tasks[job[0]].train))
        for result in self.results(todo):
            self.done.append(result)
            write(self.kept, self.done)
            write(self.path, self.done)
            print({key: result[key] for key in ("task", "seed", "scores")}, flush=True)

    def results(self, jobs: list[tuple[str, int]]):
        """Each result as it comes, from some processes, or from this one if it should be one."""
        if self.a.processes == 1:
            make_ready(self.run, self.tasks)
            yield from map(tune, jobs)
            return
        context, started = multiprocessing.get_context("spawn"), (self.run, self.tasks, self.a.processes)
        with ProcessPoolExecutor(self.a.processes, context, start_tuner, started) as pool:
            for future in as_completed([pool.submit(tune, job) for job in jobs]):
                yield future.result()


TUNER = {}  # what a process that fine-tunes keeps


def start_tuner(run, tasks: dict, processes: int):
    """Make a new process ready to fine-tune."""
    import torch

    from cramming_nb.engine.jobs import exit_with_parent

    exit_with_parent()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    make_ready(run, tasks)


def make_ready(run, tasks: dict):
    """Make this process ready to fine-tune."""
    from cramming_nb.app.run import hardware_of
    from cramming_nb.glue import encoder_weights

    TUNER.update(run=run, tasks=tasks, hardware=hardware_of(run), weights=encoder_weights(run.folder / "checkpoints"))


def tune(job: tuple[str, int]) -> dict:
    """Fine-tune on a task with a seed."""
    from cramming_nb.app.run import tokenizer_of
    from cramming_nb.glue import finetune_task, for_task

    name, seed = job
    run, tasks = TUNER["run"], TUNER["tasks"]
    protocol = for_task(run.recipe.protocol, name, tasks)
    model = run.recipe.architecture, TUNER["weights"], tokenizer_of(run)
    found = finetune_task(*model, tasks[name], protocol, seed, TUNER["hardware"])
    return dict(task=name, init="pretrained", seed=seed, data=tasks[name].digest) | found


def extra(a: argparse.Namespace) -> dict:
    """What the newest model knows without fine-tuning: pairs of sentences, and its vectors as features."""
    import torch
    from blimp import paradigms_in, preferred

    from cramming_nb.app.export import load_model
    from cramming_nb.app.frozen import frozen_scores
    from cramming_nb.app.run import hardware_of, load_run, tokenizer_of

    folder = max((a.work / "runs").glob("*/record.json"), key=lambda path: path.stat().st_mtime).parent
    run, found = load_run(folder), dict(run=folder.name)
    hardware, folders = hardware_of(run), [trip / "blimp" for trip in a.trips if (trip / "blimp").exists()]
    if folders and run.recipe.objective.name == "mlm":  # others give no sentence a probability
        model, tokenizer = load_model(folder / "export")
        with torch.device(hardware.kind):
            pairs = paradigms_in(folders[0], 200).items()
            right = {name: mean(preferred(model.to(hardware.kind), tokenizer, of)) for name, of in pairs}
        found["blimp"] = right
        print(f"BLiMP {mean(right.values()):.1%}", flush=True)
        write(a.folder / "extra.json", found)
    tasks = tasks_from(a)
    for name, data in sorted(tasks.items(), key=lambda item: len(item[1].train)):
        frozen = frozen_scores({name: data}, run.recipe.architecture, folder / "checkpoints", tokenizer_of(run),
                               folder / "frozen", hardware, (), False)  # fmt: skip
        found.setdefault("frozen", []).extend(frozen)
        print(name, [(r["init"], r["scores"]) for r in frozen], flush=True)
        write(a.folder / "extra.json", found)
    return found


def steps(a: argparse.Namespace) -> dict:
    """Milliseconds of a fine-tuning step, recorded and plain."""
    from cramming_nb.engine.hardware import Hardware
    from cramming_nb.glue import FineTuner, for_task

    corpus, found, tasks = corpus_from(a), {}, tasks_from(a, ("cola", "rte"))
    recipe, hardware = recipe_of(a, SMALL), Hardware.detect()
    for kind in ("recorded", "plain"):
        if kind == "plain":
            type(hardware.device).recorder = lambda device: None
        for name, data in tasks.items():
            protocol = for_task(recipe.protocol, name, tasks)
            tuner = FineTuner(recipe.architecture, None, corpus.tokenizer, data, protocol, 0, hardware)
            batches = tuner.batches[: 2 * a.steps]
            for batch in batches[: a.steps]:
                tuner.step(batch)
            tuner.model.head[0].weight.sum().item()
            begun = time.perf_counter()
            for batch in batches[a.steps :]:
                tuner.step(batch)
            total = tuner.model.head[0].weight.float().sum().item()
            ms = 1e3 * (time.perf_counter() - begun) / max(1, len(batches) - a.steps)
            found[f"{name}, {kind}"] = dict(ms=ms, sum_of_weights=total)
            print(name, kind, f"{ms:.1f} ms", total, flush=True)
            write(a.folder / "steps.json", found)
    return found


def tests(a: argparse.Namespace) -> dict:
    """The tests marked gpu; their output is kept."""
    path = a.folder / "tests.txt"
    call = [sys.executable, "-m", "pytest", "-m", "gpu", "--durations=20", "tests/test_gpu.py"]
    with open(path, "w") as output:
        code = subprocess.call(call, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    if code not in (0, 1):  # 1: all were run, and some failed
        raise SystemExit(f"the tests could not be run; {path} says why")
    return dict(exit_code=code, last=path.read_text().strip().splitlines()[-1:])


def bench(a: argparse.Namespace) -> dict:
    """Our training step and the baselines, in turns."""
    from cramming_nb.lab.bench import bench_table, bench_train

    result = bench_train("full", 5, 256, progress=False)
    print(bench_table(result), flush=True)
    return result


STAGES = dict(profile=profile, sprint=sprint, variants=variants, best=best, extra=extra, steps=steps, at_once=at_once,
              tests=tests, bench=bench)  # fmt: skip


# The run of stages


def plan(a: argparse.Namespace) -> int:
    """Print the stages, with the seconds that they took on an H200, or would take by what was measured there."""
    known = json.loads((ROOT / "records" / "gpu" / "quarter.json").read_text())["seconds"]
    seconds = {stage: f"{known[stage]:4} s" if stage in known else "  not timed yet" for stage in STAGES}
    seconds["sprint"] = seconds["best"] = f"{seconds_of_a_run(a.processes):4.0f} s, estimated"
    for stage, work in STAGES.items():
        print(f"{stage:10} {seconds[stage]:18} {work.__doc__.splitlines()[0]}")
    print("A machine takes a minute or two to start, and each trip some seconds.")
    return 0


def seconds_of_a_run(processes: int) -> float:
    """Seconds of a pretraining of 330 s and its fine-tunings, three of each small task, some processes at a time."""
    run = json.loads((ROOT / "records" / "gpu" / "mended.json").read_text())["sprint"]
    usual = {row["task"]: row["seconds"] for row in run["finetuning"] if (row["pairs"], row["rate"]) == ("apart", 1e-4)}
    jobs = [usual["sst2"]] + [seconds for task, seconds in usual.items() if task != "sst2"] * 3
    return run["pretraining"]["spent"]["seconds"] + max(usual["sst2"], sum(jobs) / processes)


def result_file(a: argparse.Namespace, stage: str) -> Path:
    """Where a stage leaves its result."""
    return a.work / "results" / f"{stage}.json"


def write(path: Path, value: object):
    """Write JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(value, indent=1))
    path.with_suffix(".part").replace(path)


def run(a: argparse.Namespace) -> int:
    """Do the stages in turn, each in a process of its own, until the time is over."""
    begun, status = time.monotonic(), {}
    a.folder.mkdir(parents=True, exist_ok=True)
    for stage in a.stages:
        left = 60 * a.minutes - (time.monotonic() - begun)
        if result_file(a, stage).exists():
            status[stage] = "done before"
        elif left < 20:
            status[stage] = "not begun: the time is over; give the same command again"
        else:
            status[stage] = do(a, stage, left)
        if result_file(a, stage).exists():
            shutil.copy(result_file(a, stage), a.folder)
        print(f"{stage}: {status[stage]}", flush=True)
        write(a.folder / "status.json", dict(status=status, machine=machine()))
    return 0 if all(text.startswith("done") for text in status.values()) else 1


def do(a: argparse.Namespace, stage: str, left: float) -> str:
    """Do a stage in a process of its own for as long as there is time; says what came of it."""
    begun = time.monotonic()
    process = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--stage", stage], cwd=ROOT)
    code = wait(process, left)
    return f"{'done' if code == 0 else f'ended with {code}'} in {time.monotonic() - begun:.0f} s"


def wait(process: subprocess.Popen, seconds: float) -> int:
    """The exit code of a process; when the time is over, it is asked to stop and given half a minute."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(30)
    finally:
        if process.poll() is None:
            process.kill()
    return process.wait()


def machine() -> dict:
    """What this is, without loading torch in this process."""
    versions = {}
    for name in ("torch", "triton", "transformers", "tokenizers", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return dict(python=sys.version.split()[0], cores=os.cpu_count(), versions=versions)


def finds_gpu() -> bool:
    """Whether PyTorch finds a GPU; asked in a process of its own, which gives all memory back."""
    call = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.call([sys.executable, "-c", call]) == 0


def main() -> int:
    """Plan, pack, or run."""
    a = arguments()
    if a.stage:
        write(result_file(a, a.stage), STAGES[a.stage](a))
        return 0
    if a.action == "plan":
        return plan(a)
    if missing := [name for name in NEEDED if not find_spec(name)]:
        print(f"missing packages: {', '.join(missing)}", file=sys.stderr)
        return 2
    if a.action == "pack":
        return pack(a)
    if not a.without_gpu and not finds_gpu():
        print("PyTorch finds no GPU: is its build the one for this GPU, and its driver loaded?", file=sys.stderr)
        return 2
    return run(a)


if __name__ == "__main__":
    sys.exit(main())
