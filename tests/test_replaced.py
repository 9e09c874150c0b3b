"""Replaced tokens: the same replacements however a run is cut, and a discriminator that the commands take for the model."""

import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import Killable, command, pretraining
from safetensors.torch import load_file
from test_distribution import Ranks, same_curve
from test_resume import learned, newest, progress
from torch.utils.flop_counter import FlopCounterMode

from cramming_nb.app.export import NO_WORDS
from cramming_nb.app.records import RunRecord
from cramming_nb.architecture import Architecture, Encoder
from cramming_nb.corpus import Corpus
from cramming_nb.engine.hardware import Hardware
from cramming_nb.glue import encoder_weights
from cramming_nb.objective import ObjectiveConfig
from cramming_nb.recipes import change, load_recipe
from cramming_nb.replaced import (
    MODELS,
    WEIGHT,
    ReplacedTokens,
    generator_of,
    replaced_flops_per_token,
    replacement_draws,
    sample_tokens,
)
from cramming_nb.training import HELDOUT_MASKS, HELDOUT_SEED, Learner, Predictor, heldout_loss, heldout_rows

SMALL = Architecture(
    vocab_size=64, max_length=16, hidden_size=64, num_layers=2, num_heads=4, ffn_size=128, neighbor_mixing=1
)
RTD = {"objective.name": "rtd"}
SET = ["--set", "objective.name=rtd", "training.dtype=float32"]


@pytest.fixture(scope="module")
def home(tiny, tmp_path_factory):
    """Where the whole job was done once with replaced tokens, and what it said."""
    folder = tmp_path_factory.mktemp("replaced")
    said = command("run", *tiny.options(), "--name", "first", *SET, cwd=folder, cache=tiny.cache)
    assert said.code == 0, said.err
    (folder / "said.txt").write_text(said.out)
    return folder


@pytest.fixture(scope="module")
def make(tiny, home):
    """Makes learners of the tiny recipe with some of its fields changed."""
    corpus = Corpus(next(tiny.cache.glob("corpus-*")))

    def learner(compiled: bool = False, **changes) -> Learner:
        r = change(load_recipe(str(tiny.recipe)), RTD | {key.replace("__", "."): v for key, v in changes.items()})
        parts = r.architecture, r.objective, r.optimizer, r.schedule, r.training
        return Learner(corpus, *parts, Hardware.detect(torch.float32), compiled=compiled)

    return learner


def logits_and_draws() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return 3 * torch.randn(3, 5, 64), torch.rand(3, 5)


def test_a_token_is_sampled_where_the_probabilities_add_up_to_its_draw(monkeypatch):
    logits, draws = logits_and_draws()
    found = sample_tokens(logits, draws)
    for row, draw, token in zip(logits.flatten(0, 1), draws.flatten(), found.flatten(), strict=True):
        sums = np.cumsum(np.exp(row.double().numpy()) / np.exp(row.double().numpy()).sum())
        assert token == np.argmax(sums > draw.item())
    monkeypatch.setattr("cramming_nb.engine.hardware.Device.loss_chunk", 128)  # two positions at a time
    assert torch.equal(sample_tokens(logits, draws), found)


def test_extreme_draws_stay_in_the_vocabulary():
    logits = torch.tensor([[[0.0, 1.0, -80.0]] * 2])
    assert sample_tokens(logits, torch.tensor([[0.0, 1.0]])).tolist() in ([[0, 1]], [[0, 2]])


def test_a_sequence_has_its_draws_whatever_is_beside_it():
    rows, epochs = torch.arange(40), torch.arange(40) // 9
    positions = torch.stack([torch.randperm(16)[:4] for _ in rows])
    together = replacement_draws(rows, epochs, 1, positions, 16)
    alone = [replacement_draws(rows[i : i + 1], epochs[i : i + 1], 1, positions[i : i + 1], 16) for i in range(40)]
    assert torch.equal(together, torch.cat(alone))
    assert 0 <= together.min() and together.max() <= 1 and abs(together.mean() - 0.5) < 0.1
    for other in (dict(seed=2), dict(epochs=epochs + 1)):
        given = dict(rows=rows, epochs=epochs, seed=1, positions=positions, length=16) | other
        assert not (replacement_draws(**given) == together).any()


@pytest.mark.parametrize("changed", [{}, dict(document_attention=True), dict(embedding_size=24), dict(tie_embeddings=False)], ids=str)  # fmt: skip
def test_loss_is_that_of_each_token_by_itself(changed):
    torch.manual_seed(0)
    model = ReplacedTokens(replace(SMALL, **changed)).eval()
    ids = torch.randint(4, 64, (3, 16))
    positions = torch.stack([torch.randperm(16)[:4] for _ in ids])
    labels, sampled = ids.gather(1, positions), torch.randint(4, 64, (3, 4))
    sampled[0, 0] = labels[0, 0]  # by chance the right one: it counts as original
    weights = torch.ones(3, 4)
    weights[1, 2] = weights[2] = 0.0  # a position that does not count, and a sequence that fills up
    masked = ids.scatter(1, positions, torch.where(weights > 0, 3, labels))
    found = model.detection_loss(masked, positions, labels, weights, sampled)

    expected = 0.0
    for row in range(2):
        seen = ids[row].clone()
        for position, token, weight in zip(positions[row], sampled[row], weights[row], strict=True):
            seen[position] = token if weight else seen[position]
        chance = model.detect(seen[None], ids[row][None])[0].sigmoid()
        right = torch.where(seen != ids[row], chance, 1 - chance)
        expected += WEIGHT * -right.log().mean() * weights[row].sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_models_share_the_embeddings_and_nothing_else():
    model = ReplacedTokens(SMALL)
    names = dict(model.named_parameters())
    assert model.generator.encoder.embedding.weight is model.encoder.embedding.weight
    assert not any("generator.encoder.embedding.weight" in name for name in names)
    generator = generator_of(SMALL)
    assert (generator.hidden_size, generator.num_heads, generator.ffn_size) == (16, 1, 32)
    assert (generator.num_layers, generator.embedding_size) == (SMALL.num_layers, SMALL.hidden_size)


@pytest.mark.parametrize("changed", [{}, dict(sparse_prediction=False), dict(embedding_size=32)], ids=str)
def test_operations_are_counted(changed):
    arch = replace(SMALL, **changed)
    model, ids = ReplacedTokens(arch), torch.randint(4, 64, (4, 16))
    positions = torch.arange(4).expand(4, 4)
    with FlopCounterMode(display=False) as counted:
        logits = model.logits(model.hidden(ids, positions), positions)
        loss = model.detection_loss(
            ids, positions, ids[:, :4], torch.ones(4, 4), sample_tokens(logits, torch.rand(4, 4))
        )
        (loss + logits.sum()).backward()
    assert replaced_flops_per_token(arch, 0.25) * ids.numel() == pytest.approx(counted.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("exact", [True, False])
def test_gradients_do_not_depend_on_micro_batches(make, exact):
    found = []
    for size in (8, 3):
        learner = make(training__micro_batch_size=size, objective__exact=exact)
        learner.gradients.micro_batch_size = size
        learner.gradients.add(*learner.corpus.batch(0, 8, 0), 0.5)
        found.append((learner.optimizer.flat_grads.clone(), learner.gradients.read_loss()))
    (one, loss), (other, same_loss) = found
    assert torch.allclose(one, other, atol=1e-6 * one.abs().max()) and loss == pytest.approx(same_loss, rel=1e-5)


def test_held_out_loss_is_that_of_the_generator(make):
    learner = make()
    corpus = learner.corpus
    numbers = heldout_rows(corpus, learner.training.heldout_rows)
    alone = Predictor(learner.model.generator, HELDOUT_MASKS, learner.predictor.vocab_size, learner.hardware)
    rows = corpus.heldout[numbers].astype(np.int64), numbers, np.zeros_like(numbers)
    loss, _, _, weights = alone(rows, HELDOUT_SEED, learner.length, ObjectiveConfig())
    assert heldout_loss(learner) == pytest.approx((loss / weights.sum()).item(), rel=1e-5)


@pytest.mark.parametrize("by", ["model", "block"])
def test_compiled_models_have_the_same_loss_and_gradients(make, by):
    found = []
    for compiled in (False, True):
        learner = make(compiled, training__compile_by=by, architecture__num_layers=2)
        learner.gradients.set_micro_batch(8)
        learner.gradients.add(*learner.corpus.batch(0, 5, 0), 0.5)  # three sequences fill up
        found.append((learner.optimizer.flat_grads.clone(), learner.gradients.read_loss(), heldout_loss(learner)))
        assert learner.predictor.compiled == compiled
    (one, *losses), (other, *others) = found
    assert torch.allclose(one, other, atol=1e-4 * one.abs().max()) and losses == pytest.approx(others, rel=1e-4)


def test_killed_run_ends_in_the_same_bits(tiny, tmp_path):
    asked = ["pretrain", *tiny.options("12ktok"), "--name", "run", *SET, "training.checkpoint_fraction=0.1"]
    runs = tmp_path / "whole", tmp_path / "killed"
    for folder in runs:
        folder.mkdir()
    assert Killable(*asked, cwd=runs[0], cache=tiny.cache).end() == 0
    whole, killed = (folder / "runs" / "run" for folder in runs)
    run = Killable(*asked, cwd=runs[1], cache=tiny.cache)
    run.wait_for(lambda: len(list((killed / "checkpoints").glob("step-*"))) > 1 and progress(killed) > 1000)
    assert run.send(signal.SIGKILL) == -signal.SIGKILL and not pretraining(killed)
    assert Killable(*asked, cwd=runs[1], cache=tiny.cache).end() == 0
    assert learned(killed) == learned(whole)
    assert "held-out loss of the generator" in (runs[0] / "output.txt").read_text()


def test_two_processes_have_the_losses_of_one(tiny, tmp_path):
    asked = ["pretrain", *tiny.options("40step"), "--name", "run", *SET]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert command(*asked, cwd=tmp_path / "one", cache=tiny.cache).code == 0
    job = Ranks(*asked, cwd=tmp_path / "two", cache=tiny.cache)
    assert job.end() == [0, 0], job.output.read_text()
    same_curve(tmp_path / "two" / "runs" / "run", tmp_path / "one" / "runs" / "run")


def test_the_whole_job(home):
    """A run is labelled Open, says whose loss it tells, counts both models, and its report asks for no words."""
    folder, said = home / "runs" / "first", (home / "said.txt").read_text()
    record = RunRecord.read(folder / "record.json")
    assert record.provenance["rules"] == "Open" and record.provenance["breaches"] == ["no masked-language modeling"]
    assert "(generator)" in said and "| Open |" in said
    assert record.samples == [] and {"pretrained", "random"} < {result["init"] for result in record.results}
    report = (folder / "report.md").read_text()
    assert "cram predict" not in report and "cram finetune" in report and "find replaced tokens" in report
    card = (folder / "export" / "README.md").read_text()
    assert "(generator)" in card and "AutoModel.from" in card and "fill-mask" not in card
    spent = record.pretraining["spent"]
    arch = Architecture(**record.recipe["architecture"] | dict(max_length=32))  # that of its sequences
    assert spent["flops"] == pytest.approx(spent["tokens"] * replaced_flops_per_token(arch, 0.25))


def test_a_budget_in_flops_counts_both_models(tiny, tmp_path):
    arch = replace(load_recipe(str(tiny.recipe)).architecture, max_length=32)
    flops = 64 * 32 * replaced_flops_per_token(arch, 0.25)  # of 64 sequences
    asked = ["pretrain", *tiny.options(f"{flops - 1:.1f}flop"), "--name", "run", *SET]
    assert command(*asked, cwd=tmp_path, cache=tiny.cache).code == 0
    assert pretraining(tmp_path / "runs" / "run")["spent"]["tokens"] == 64 * 32


def test_the_discriminator_is_exported_and_fine_tuned(home):
    folder = home / "runs" / "first"
    trained = load_file(newest(folder) / "tensors.safetensors")
    expected = {n.removeprefix("master."): w for n, w in trained.items() if n.startswith("master.encoder.")}
    tuned = encoder_weights(folder / "checkpoints")
    exported = load_file(folder / "export" / "model.safetensors")
    arch = RunRecord.read(folder / "record.json").recipe["architecture"]
    assert {f"encoder.{name}" for name in tuned} == expected.keys() and tuned.keys() == dict(Encoder(Architecture(**arch)).named_parameters()).keys()  # fmt: skip
    assert exported.keys() == {f"model.{name}" for name in expected}
    for name, weight in expected.items():
        assert weight.equal(tuned[name.removeprefix("encoder.")]) and weight.equal(exported[f"model.{name}"])


def test_others_load_the_discriminator(home):
    transformers = pytest.importorskip("transformers")
    import cramming_nb.app.hf  # noqa: F401

    folder = home / "runs" / "first"
    arch = Architecture(**RunRecord.read(folder / "record.json").recipe["architecture"])
    encoder = Encoder(arch).eval()
    encoder.load_state_dict(encoder_weights(folder / "checkpoints"))
    theirs, report = transformers.AutoModel.from_pretrained(folder / "export", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    ids = torch.randint(5, 64, (2, 9))
    assert torch.allclose(theirs.eval()(ids).last_hidden_state, encoder(ids), atol=1e-5)


def test_the_discriminator_may_be_sent_and_a_damaged_one_may_not(home, tmp_path):
    call = ["export", tmp_path / "export", "--push-to", "somebody/thimble", "--dry-run"]
    shutil.copytree(home / "runs" / "first" / "export", tmp_path / "export")
    said = command(*call, cwd=home)
    assert said.code == 0 and "model.safetensors" in said.out, said.err
    (tmp_path / "export" / "model.safetensors").write_bytes(b"")
    said = command(*call, cwd=home)
    assert said.code == 2 and "model.safetensors" in said.err and not said.out


@pytest.mark.parametrize("where", ["first", "runs/first/export"])
def test_no_words_are_predicted(home, where):
    said = command("predict", where, "The [MASK] is late.", cwd=home)
    assert said.code == 2 and NO_WORDS in said.err and len(said.err.strip().splitlines()) == 1 and not said.out


def test_no_words_are_predicted_before_the_export(home, tmp_path):
    shutil.copytree(home / "runs" / "first", tmp_path / "runs" / "first", ignore=shutil.ignore_patterns("export"))
    said = command("predict", "first", "The [MASK] is late.", cwd=tmp_path)
    assert said.code == 2 and NO_WORDS in said.err and len(said.err.strip().splitlines()) == 1


def test_export_and_report_of_the_finished_run(home, tmp_path):
    assert command("report", "first", cwd=home).code == 0
    to = tmp_path / "elsewhere"
    assert command("export", "first", "--to", to, cwd=home).code == 0 and (to / "model.safetensors").exists()


def test_own_labels_are_learned_from_the_discriminator(home, tmp_path):
    table = tmp_path / "letters.csv"
    rows = [f"the {'old' if i % 2 else 'quiet'} garden {i},{'a' if i % 2 else 'b'}" for i in range(60)]
    table.write_text("\n".join(["text,label", *rows]) + "\n")
    said = command("finetune", "first", table, "--epochs", "1", cwd=home)
    assert said.code == 0, said.err
    assert command("predict", "runs/first/letters", "the old garden", cwd=home).code == 0


def test_a_plan_predicts_no_loss_of_it(tiny, tmp_path):
    said = command("run", "auto", "--source", f"files:{tiny.text}", "--budget", "1Mtok", *SET[:2], cwd=tmp_path, cache=tiny.cache)  # fmt: skip
    assert said.code == 2 and "objective.name" in said.err and len(said.err.strip().splitlines()) == 1


def test_a_generator_that_cannot_be_built_is_refused(tiny, tmp_path):
    set_ = [*SET, "architecture.hidden_size=36", "architecture.num_heads=6", "architecture.position=rotary"]
    said = command("pretrain", *tiny.options(), *set_, cwd=tmp_path, cache=tiny.cache)
    assert said.code == 2 and "generator" in said.err and len(said.err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_every_objective_is_a_choice():
    assert set(MODELS) == set(ObjectiveConfig.__dataclass_fields__["name"].metadata["choices"])
