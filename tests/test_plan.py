"""The law finds what was put in, a plan follows its budget, and `cram run auto` keeps to its plan."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import command, lines
from make_sizes import SIZES, rows, to_json

from cramming_nb.app.records import RunRecord
from cramming_nb.app.run import read_run
from cramming_nb.budget import Budget
from cramming_nb.engine import hardware
from cramming_nb.engine.errors import UserError
from cramming_nb.lab import bench
from cramming_nb.lab import plan as planning
from cramming_nb.lab.bench import Turn
from cramming_nb.lab.plan import (
    FAMILIES,
    Family,
    ScalingLaw,
    Speed,
    fit_law,
    known_tokens,
    long_enough,
    make_plan,
    measured_law,
    measured_runs,
    sized,
    token_flops,
)
from cramming_nb.recipes import load_recipe

LAW = ScalingLaw(1.4, 0.5, 0.4, 3.2, 0.34, error=0.05, smallest_size=3e5, largest_size=1e7, most_tokens=3e7)
SPEED = Speed(per_token=2e-6, per_flop=1e-11, spread=0.02)


def test_sizes_are_those_of_the_records():
    assert SIZES.read_text() == to_json(rows()), "write it again: python experiments/make_sizes.py"
    assert measured_runs() == rows()


def test_the_ladder_is_measured_like_the_records():
    """A record's size and parameters are those of the recipe that the ladder has for it."""
    for run in measured_runs():
        recipe = sized(run["layers"], run["width"])
        assert round(token_flops(recipe) / 6) == run["size"]
        assert planning.parameter_count(recipe) == run["parameters"]


@pytest.mark.parametrize("powers", [(0.4, 0.34), (0.25, 0.55), (0.7, 0.4)])
def test_law_is_recovered(powers):
    alpha, beta = powers
    true = ScalingLaw(1.4, 0.5, alpha, 3.2, beta)
    runs = list(itertools.product((3e5, 1e6, 3e6, 1e7), (1e6, 4e6, 16e6, 64e6)))
    rng = np.random.default_rng(0)
    found = fit_law(*zip(*runs, strict=True), [true.loss(*run) + rng.normal(0, 0.005) for run in runs])
    assert found.error < 0.02
    for run in [*runs, (2e6, 8e6), (5e6, 32e6)]:
        assert found.loss(*run) == pytest.approx(true.loss(*run), abs=0.03)


def test_error_is_that_of_runs_left_out():
    """One run that does not fit makes the error larger than its residual in the fit of all."""
    runs = list(itertools.product((3e5, 1e6, 3e6, 1e7), (2e6, 4e6, 8e6, 16e6)))
    losses = [LAW.loss(*run) for run in runs]
    losses[-1] += 0.5
    found = fit_law(*zip(*runs, strict=True), losses)
    residuals = [found.loss(*run) - loss for run, loss in zip(runs, losses, strict=True)]
    assert found.error > math.sqrt(np.mean(np.square(residuals)))


def test_measured_law_falls_with_size_and_tokens():
    law = measured_law()
    assert 0 < law.error < 1
    assert law.loss(1e6, 4e6) > law.loss(1e6, 8e6) > law.floor > 0
    assert law.loss(1e6, 4e6) > law.loss(2e6, 4e6)


@pytest.mark.parametrize(
    "budgets",
    [["1m", "10m", "1h", "24h"], ["2Mtok", "8Mtok", "32Mtok"], ["1e13flop", "1e15flop", "1e17flop"]],
    ids=["time", "tokens", "flops"],
)
def test_plan_grows_with_its_budget(budgets):
    plans = [make_plan(text, LAW, SPEED) for text in budgets]
    sizes = [plan.recommended.parameters for plan in plans]
    losses = [plan.recommended.loss for plan in plans]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("text", ["1m", "10m", "8Mtok", "1e15flop", "3000step", "10m@20000tok/s"])
def test_recommended_size_is_the_best_that_gets_enough_tokens(text):
    plan = make_plan(text, LAW, SPEED)
    best = plan.recommended
    assert long_enough(token_flops(plan.recipe()) / 6, best.tokens)
    for other in plan.candidates:
        if other.enough:
            assert best.loss <= other.loss + 0.005


def test_tokens_of_each_kind_of_budget():
    recipe = sized(2, 256)
    expected = {
        "5Mtok": 5e6,
        "100step": 100 * 32 * 128,
        "10s@2000tok/s": 20_000,
        "1e12flop": 1e12 / token_flops(recipe),
        "10s": 10 / (2e-6 + 1e-11 * token_flops(recipe)),
    }
    for text, tokens in expected.items():
        assert planning.tokens_of(Budget.parse(text), recipe, SPEED) == pytest.approx(tokens)


def test_doubts_are_told():
    steady = make_plan("10m", LAW, SPEED)
    assert len(steady.notes) == 2 and "first or last" in steady.notes[1]
    swinging = Speed(2e-6, 1e-11, spread=0.4)
    assert "±40%" in make_plan("10m", LAW, swinging).notes[1]
    assert "read 2.0 times" in make_plan("10m", LAW, SPEED, steady.recommended.tokens / 2).notes[1]
    assert "guess" in make_plan("1e20flop", LAW).notes[1]
    assert "too few tokens" in make_plan("1ktok", LAW).notes[1]
    assert "first or last" in make_plan("1ktok", LAW).notes[-1]


def test_no_loss_is_predicted_above_that_of_a_uniform_guess():
    for plan in (make_plan(f"{thousands}ktok", LAW) for thousands in (30, 100, 300, 1000, 3000)):
        shown = [one.loss < math.log(one.recipe.architecture.vocab_size) for one in plan.candidates if one.enough]
        assert all(shown) and (shown or "too few tokens" in plan.line())


def test_line_through_three_timings():
    flops = np.array([1e6, 1e7, 1e8])
    assert planning.line_through(flops, 1e-6 + 1e-12 * flops) == pytest.approx((1e-6, 1e-12))
    assert min(planning.line_through(flops, 1e-12 * flops**1.1)) >= 0


@pytest.mark.parametrize(
    "argv, words",
    [
        (["plan", "5s"], "too short to plan"),
        (["plan", "much"], "give a positive number"),
        (["plan", "8Mtok", "--source", "files:nosuch/*.txt"], "nosuch"),
        (["run", "auto", "--budget", "5s"], "too short to plan"),
        (["run", "auto", "--set", "architecture.num_layers=3"], "the recipe auto chooses it"),
        (["run", "auto", "--set", "schedule.batch_size=256"], "schedule.batch_size: the recipe auto predicts"),
        (["run", "auto", "--set", "corpus.vocab_size=32768"], "predicts losses for 8192 only"),
        (["run", "auto", "--set", "corpus.seq_length=64"], "predicts losses for 128 only"),
        (["run", "auto", "--set", "optimizer.name=muon"], "predicts losses for adamw only"),
        (["run", "auto", "--set", "training.dropout=true"], "predicts losses for False only"),
        (["run", "auto", "--name", "a/b"], "without slashes"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_planned_is_refused(argv, words, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "machine_speed", None)  # refused before the machine is measured
    result = command(*argv, cwd=tmp_path, cache=tmp_path / "cache")
    assert result.code == 2 and words in lines(result.err)[0]
    assert not (tmp_path / "runs").exists()


def test_auto_is_for_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = command("pretrain", "auto", "--budget", "8Mtok", cwd=tmp_path, cache=tmp_path / "cache")
    assert result.code == 2 and "one process" in lines(result.err)[0]


def test_plan_through_the_command(tmp_path):
    result = command("plan", "2Mtok", "--data-dir", tmp_path, cwd=tmp_path)
    table = [line for line in result.out.splitlines() if line.startswith("|")]
    assert result.code == 0 and len(table) == 2 + len(FAMILIES["cpu"].ladder)
    assert sum("→" in line for line in table) == 1
    assert result.out.splitlines()[-1].startswith("plan for 2Mtok: ")


def test_plan_of_a_time_measures_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "machine_speed", lambda family, progress, changes: SPEED)
    result = command("plan", "10m", "--data-dir", tmp_path, cwd=tmp_path)
    (chosen,) = [line for line in result.out.splitlines() if line.startswith("| →")]
    plan = make_plan("10m", measured_law(), SPEED)
    assert f"{plan.recommended.tokens_per_second:,.0f}" in chosen


@pytest.fixture
def tiny_ladder(tiny, monkeypatch):
    """Two sizes of the tiny recipe, so that a planned run takes seconds."""
    recipe = load_recipe(str(tiny.recipe))
    monkeypatch.setattr(planning, "load_recipe", lambda name: recipe)
    sizes = ((1, 64), (2, 64))
    monkeypatch.setitem(FAMILIES, "cpu", Family("pocket", sizes, timed=sizes, shortest=60))


def test_run_auto_keeps_to_its_plan(tiny, tiny_ladder, tmp_path, monkeypatch):
    argv = ["run", "auto", *tiny.options("60ktok")[1:], "--finetune-seeds", "0", "--name", "planned"]
    said = command(*argv, cwd=tmp_path, cache=tiny.cache)
    assert said.code == 0, said.err
    folder = tmp_path / "runs" / "planned"
    plan, record = read_run(folder)["plan"], RunRecord.read(folder / "record.json")
    assert said.out.startswith(plan["line"]) and record.recipe == plan["recipe"]
    assert record.provenance["plan"] == dict(predicted=plan["predicted"], error=plan["error"])
    reached = f"reached {record.pretraining['heldout_loss']:.2f}"
    for text in (said.out, (folder / "report.html").read_text(), (folder / "report.md").read_text()):
        assert f"predicted {plan['predicted']:.2f} ± {plan['error']:.2f}, {reached}" in text

    # A machine that is measured anew would recommend something else; the run keeps its plan.
    monkeypatch.setattr(planning, "plan_for", None)
    for name in ("record.json", "report.html"):
        (folder / name).unlink()
    again = command(*argv, cwd=tmp_path, cache=tiny.cache)
    assert again.code == 0, again.err
    assert again.out.splitlines()[0] == plan["line"]
    assert json.loads((folder / "record.json").read_text())["recipe"] == record.recipe

    kept = read_run(folder) | dict(plan=None)
    (folder / "run.json").write_text(json.dumps(kept))
    other = command(*argv, cwd=tmp_path, cache=tiny.cache)
    assert other.code == 2 and "without a plan" in lines(other.err)[0]


def test_tokens_of_a_text_are_known_once_its_corpus_is_built(tiny, tiny_ladder, tmp_path):
    source = f"files:{tiny.text}"
    config = load_recipe(str(tiny.recipe)).corpus
    assert known_tokens(source, config, tmp_path) == math.inf
    assert known_tokens("hub:some/text", config, tmp_path) == math.inf
    built = command("data", "build", tiny.recipe, "--source", source, "--data-dir", tmp_path, cwd=tmp_path)
    assert built.code == 0, built.err
    tokens = known_tokens(source, config, tmp_path)
    assert 1000 < tokens < 1e6
    plan = planning.plan_for(f"{4 * tokens:.0f}tok", source, tmp_path)
    assert any("read 4.0 times" in note for note in plan.notes)


def test_a_plan_is_made_for_the_changed_recipe(monkeypatch):
    """The speed is measured, and the corpus looked up, with the settings of the run."""
    timed, looked_up = [], []

    def take_turn(make, recipe, hardware, compiled):
        timed.append((recipe.training.micro_batch_size, hardware.dtype, compiled))
        return Turn(1.0, 0)

    monkeypatch.setattr(bench, "take_turn", take_turn)
    monkeypatch.setattr(planning, "corpus_key", lambda identity, config: looked_up.append(config.dedup) or "none")
    changes = {"training.micro_batch_size": 4, "training.dtype": "bfloat16", "corpus.dedup": 75}
    planning.plan_for("10m", "machine:python", progress=False, changes=changes)
    assert timed == [(4, torch.bfloat16, False)] * 9 and looked_up == [75]
    with pytest.raises(UserError, match="batch_size: the recipe auto predicts losses for 32 only"):
        planning.plan_for("10m", "machine:python", progress=False, changes={"schedule.batch_size": 64})
    planning.check_changes({"schedule.batch_size": 32})  # as it is


def test_sizes_that_other_laws_recommend():
    flat, steep = (ScalingLaw(1.4, 0.5, power, 3.2, 0.34) for power in (0.1, 0.9))
    plan = make_plan("10h", LAW, SPEED, laws=[flat, steep])
    alone = [make_plan("10h", law, SPEED).recommended.size_name() for law in (LAW, flat, steep)]
    assert {one.size_name() for one in plan.possible} == set(alone)
    assert len(set(alone)) > 1 and any(plan.possible[-1].size_name() in note for note in plan.notes)
    alone = make_plan("10h", LAW, SPEED)
    assert alone.possible == [alone.recommended]


def test_error_of_a_prediction_counts_what_similar_laws_say():
    """Two laws, 0.3 nats above and below, widen the interval; without others it is that of the law's error."""
    others = [replace(LAW, floor=LAW.floor + difference) for difference in (-0.3, 0.3)]
    assert planning.prediction_error(LAW, [], 1e6, 1e7) == pytest.approx(1.96 * LAW.error)
    expected = 1.96 * math.hypot(LAW.error, 0.3)
    assert planning.prediction_error(LAW, others, 1e6, 1e7) == pytest.approx(expected)
    plan = make_plan("10h", LAW, SPEED, laws=others)
    assert plan.recommended.error == pytest.approx(expected)
    assert f"± {expected:.2f}" in plan.line() and f"± {expected:.2f}" in plan._repr_markdown_()


def test_similar_laws_describe_the_runs():
    law = measured_law()
    size, tokens, loss = planning.usable_runs()

    def miss(law):
        return math.sqrt(np.mean((law.loss(size, tokens) - loss) ** 2))

    laws = planning.similar_laws()
    assert laws and max(map(miss, laws)) <= planning.SIMILAR * miss(law)


def test_the_interval_far_from_the_runs_holds_what_laws_of_other_powers_say():
    law, laws = measured_law(), planning.similar_laws()
    assert {2, 3} <= {other.power for other in laws}
    far = token_flops(sized(12, 768)) / 6, 12.5e9  # a day on a GPU
    interval = planning.prediction_error(law, laws, *far)
    for power in (3, 4):
        assert abs(planning.best_law(*planning.usable_runs(), power).loss(*far) - law.loss(*far)) < interval


@pytest.fixture
def gpu(monkeypatch):
    """A made-up GPU, on which a step of each size takes as long as its FLOPs at 10¹⁴ a second, and some for each token."""

    class GPU(hardware.Device):
        kind = "cuda"

    found = replace(hardware.Hardware.detect(), device=GPU(), dtype=torch.bfloat16)
    timed = []

    def take_turn(make, recipe, hardware, compiled):
        timed.append((recipe.architecture.num_layers, recipe.architecture.hidden_size, compiled))
        tokens = 8 * recipe.schedule.batch_size * recipe.corpus.seq_length
        return Turn(tokens * (1e-7 + token_flops(recipe) / 1e14), 0)

    monkeypatch.setattr(hardware.Hardware, "detect", lambda *_: found)
    monkeypatch.setattr(bench, "take_turn", take_turn)
    return timed


def test_on_a_gpu_two_sizes_of_sprint_are_timed_and_the_losses_are_called_extrapolated(gpu, tmp_path):
    plan = planning.plan_for("10m", "machine:python", tmp_path, progress=False)
    assert set(gpu) == {(8, 512, True), (16, 768, True)} and len(gpu) == 6
    sprint = load_recipe("sprint")
    (whole,) = [one for one in plan.candidates if one.size_name() == "16 × 768"]
    assert whole.tokens_per_second == pytest.approx(1 / (1e-7 + token_flops(sprint) / 1e14))
    assert whole.parameters == planning.parameter_count(sprint)
    assert "No law has been fitted to runs of this family" in plan.notes[0]
    assert any("a guess, not a prediction" in note for note in plan.notes)
    recipe = plan.recipe()
    assert recipe.corpus == sprint.corpus and recipe.schedule == sprint.schedule
    with pytest.raises(UserError, match="too short to plan; give at least 300s"):
        planning.plan_for("2m", progress=False)
    with pytest.raises(UserError, match="batch_size: the recipe auto predicts losses for 512 only"):
        planning.check_changes({"schedule.batch_size": 32})


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_size_of_a_family_is_its_recipe_where_it_has_the_same_shape(kind):
    family = FAMILIES[kind]
    base = load_recipe(family.recipe)
    shape = base.architecture.num_layers, base.architecture.hidden_size
    assert shape in family.ladder and set(family.timed) <= set(family.ladder)
    assert replace(sized(*shape, recipe=family.recipe), name=base.name) == base
    flops = [token_flops(sized(*size, recipe=family.recipe)) for size in family.ladder]
    assert flops == sorted(flops)
