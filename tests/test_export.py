"""Exported folders load elsewhere: as a BERT where that fits, else after `import cramming_nb.app.hf`."""

import io
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import command, contents
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import cramming_nb.app.hf  # noqa: F401
from cramming_nb.app.export import (
    DEMO,
    classify,
    fill_mask,
    is_bert,
    is_classifier,
    load_model,
    model_card,
    write_classifier,
    write_model,
    write_onnx,
)
from cramming_nb.app.records import RunRecord
from cramming_nb.architecture import (
    Architecture,
    Encoder,
    MaskedLM,
    SequenceClassifier,
    make_attention_mask,
    mean_pooling,
)
from cramming_nb.engine.errors import UserError
from cramming_nb.tokenizer import MASK, train_tokenizer

WORDS = "the old garden follows a quiet river and nobody paints the bridge".split()
SMALL = dict(vocab_size=64, max_length=32, hidden_size=32, num_layers=2, num_heads=2, ffn_size=64, classifier_size=32)
BERT = dict(
    activation="gelu", position="learned", norm_placement="post", final_norm=False, qkv_bias=True, linear_bias=True
) | dict(decoder_bias=True, head_transform="bert", pooling="first")
ARCHITECTURES = {
    "bert": Architecture(**SMALL, **BERT),
    "bert without sparse prediction": Architecture(**SMALL, **BERT, sparse_prediction=False),
    "gated bert": Architecture(**SMALL, **BERT | dict(activation="gelu_glu")),
    "crammed": Architecture(**SMALL),
    "pocket": Architecture(**SMALL, position="rotary", neighbor_mixing=2),
    "documents": Architecture(**SMALL, document_attention=True, block_mixing=1, qk_norm=True),
    "fourier": Architecture(**SMALL, token_mixing="fourier", norm="rms_norm"),
    "untied": Architecture(**SMALL, tie_embeddings=False, embedding_size=16, head_transform="linear"),
    "output bias": Architecture(**SMALL, decoder_bias=True),
    "sandwich": Architecture(**SMALL, norm_placement="sandwich", position="sinusoidal", embedding_norm=False),
}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer([" ".join(WORDS[i % 5 :]) + "." for i in range(50)], vocab_size=64)


def model(arch: Architecture) -> MaskedLM:
    """A model with random numbers in every weight, so that no bias is zero and no norm is one."""
    torch.manual_seed(0)
    random_model = MaskedLM(arch)
    for weight in random_model.parameters():
        weight.data.add_(0.1 * torch.randn_like(weight))
    return random_model.eval()


@pytest.fixture(scope="session")
def exported(tokenizer, tmp_path_factory):
    """Makes the folder of an exported model with random weights."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("exported")
        write_model(model(ARCHITECTURES[name]).state_dict(), tokenizer, ARCHITECTURES[name], "", folder)
        return folder

    return make


def padded(lengths: tuple = (32, 20, 3)) -> dict:
    """A batch of random tokens, padded to the longest of the lengths."""
    attention_mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 64, attention_mask.shape, generator=generator)
    return dict(input_ids=tokens.masked_fill(~attention_mask, 0), attention_mask=attention_mask.long())


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_logits_are_ours(name, exported):
    folder, batch = exported(name), padded()
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    as_bert = is_bert(ARCHITECTURES[name])
    assert as_bert == name.startswith("bert")
    assert type(theirs).__name__ == ("BertForMaskedLM" if as_bert else "CrammingForMaskedLM")
    assert type(theirs).__module__.split(".")[0] == ("transformers" if as_bert else "cramming_nb")
    mask = batch["attention_mask"].bool()
    original = model(ARCHITECTURES[name])
    loaded, _ = load_model(folder)
    ours = original(batch["input_ids"], attention_mask=mask)
    assert (ours - theirs(**batch).logits)[mask].abs().max() < 1e-4
    assert (ours - loaded(batch["input_ids"], attention_mask=mask))[mask].abs().max() < 1e-4
    unpadded = batch["input_ids"][:1]  # without padding, and without a mask
    assert (original(unpadded) - theirs(input_ids=unpadded).logits).abs().max() < 1e-4
    alone = theirs(input_ids=batch["input_ids"][2:, :3]).logits  # what stands in the padding changes nothing
    assert (alone - theirs(**batch).logits[2:, :3]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["bert", "crammed"])
def test_pipeline_fills_masks_as_we_do(name, exported):
    folder = exported(name)
    pipe = transformers.pipeline("fill-mask", model=str(folder))
    found = pipe("the old [MASK] follows", top_k=3)
    ours, tokenizer = load_model(folder)
    ids = torch.tensor([tokenizer.encode("the old [MASK] follows").ids])  # as the pipeline frames it
    with torch.no_grad():
        chances, pieces = ours(ids)[0][ids[0] == MASK][0].softmax(-1).topk(3)
    assert [guess["token"] for guess in found] == pieces.tolist()
    assert [guess["score"] for guess in found] == pytest.approx(chances.tolist(), abs=1e-5)
    both = pipe(["the old [MASK] follows", "a [MASK]"], batch_size=2, top_k=3)
    assert [guess["token"] for guess in both[0]] == pieces.tolist()
    assert len(fill_mask(ours, tokenizer, "the [MASK] and [MASK]", 2)) == 2


@pytest.mark.parametrize("name", ["bert", "crammed"])
def test_a_model_with_more_rows_than_the_tokenizer_has_pieces(name, tokenizer, tmp_path):
    arch = replace(ARCHITECTURES[name], vocab_size=96)
    write_model(model(arch).state_dict(), tokenizer, arch, "", tmp_path)
    pipe = transformers.pipeline("fill-mask", model=str(tmp_path))
    assert pipe.model.config.vocab_size == 96
    assert len(pipe("the old [MASK] follows", top_k=96)) == 96
    ours, read = load_model(tmp_path)
    (guesses,) = fill_mask(ours, read, "the old [MASK] follows", top=64)
    assert {word for word, _ in guesses} == set(tokenizer.get_vocab())
    with pytest.raises(UserError, match="from 1 to 64"):
        fill_mask(ours, read, "the old [MASK] follows", top=65)


@pytest.mark.parametrize("name", ["bert", "crammed", "pocket"])
def test_other_tasks_learn_from_the_folder(name, exported, tmp_path):
    """A few steps each, by nothing but transformers; and what was learned is saved and loaded by it."""
    folder, batch = exported(name), padded((12, 12, 5, 9))
    labels = torch.tensor([0, 1, 1, 0])
    tasks = {
        "SequenceClassification": (dict(num_labels=2), dict(labels=labels)),
        "TokenClassification": (dict(num_labels=3), dict(labels=batch["input_ids"] % 3)),
        "QuestionAnswering": ({}, dict(start_positions=labels, end_positions=labels + 2)),
    }
    for task, (options, wanted) in tasks.items():
        auto = getattr(transformers, f"AutoModelFor{task}")
        torch.manual_seed(0)
        tuned = auto.from_pretrained(folder, **options).train()
        key = next(k for k in tuned.state_dict() if "embedding" in k and k.endswith("weight"))
        before = tuned.state_dict()[key].clone()
        optimizer = torch.optim.AdamW(tuned.parameters(), 5e-3)
        losses = []
        for _ in range(15):
            losses.append(tuned(**batch, **wanted).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < 0.8 * losses[0], task
        assert not torch.equal(before, tuned.state_dict()[key]), task
        tuned.eval().save_pretrained(tmp_path / task)
        again = auto.from_pretrained(tmp_path / task).eval()
        with torch.no_grad():
            first, second = (one(**batch)[0] for one in (tuned, again))
        assert torch.allclose(first, second, atol=1e-5), task


def test_encoder_alone(exported):
    folder, batch = exported("crammed"), padded()
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    ours, mask = model(ARCHITECTURES["crammed"]).encoder, batch["attention_mask"].bool()
    with torch.no_grad():
        gap = theirs(**batch).last_hidden_state - ours(batch["input_ids"], attention_mask=mask)
    assert gap[mask].abs().max() < 1e-5
    assert theirs.get_input_embeddings().weight.shape == (64, 32)


@pytest.mark.parametrize("name", ["pocket", "documents", "fourier"])
@torch.no_grad()
def test_no_mask_where_nothing_is_padded(name, exported, monkeypatch):
    """Attention has a faster path without a mask, whatever the head."""
    given = []

    def watch(padding_mask, *more):
        given.append(padding_mask)
        return make_attention_mask(padding_mask, *more)

    monkeypatch.setattr("cramming_nb.architecture.make_attention_mask", watch)
    folder, batch, full = exported(name), padded(), padded((32, 32))
    mask = full["attention_mask"].bool()
    ours = model(ARCHITECTURES[name])
    for head in ("MaskedLM", "TokenClassification", "SequenceClassification", "QuestionAnswering"):
        theirs = getattr(transformers, f"AutoModelFor{head}").from_pretrained(folder).eval()
        given.clear()
        without, with_ones = theirs(full["input_ids"])[0], theirs(**full)[0]
        theirs(**batch)
        assert torch.allclose(without, with_ones, atol=1e-6)
        assert [padding is None for padding in given] == [True, True, False]
        if head == "MaskedLM":
            assert torch.allclose(with_ones, ours(full["input_ids"], attention_mask=mask), atol=1e-5)


HEADS = ("", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_usual_interface_of_an_encoder(head, exported):
    """Embeddings in the place of ids, hidden states, positions that say nothing new, and what wrappers pass as None."""
    theirs = getattr(transformers, f"AutoModel{head}").from_pretrained(exported("untied")).eval()
    batch = padded()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    plain = theirs(ids, mask)[0]
    embeds = theirs.get_input_embeddings()(ids)
    assert torch.equal(theirs(inputs_embeds=embeds, attention_mask=mask)[0], plain)
    unused = dict(inputs_embeds=None, position_ids=torch.arange(32)[None], output_attentions=None, head_mask=None, token_type_ids=ids)
    found = theirs(ids, mask, output_hidden_states=True, **unused)
    assert torch.equal(found[0], plain) and theirs(ids, mask).hidden_states is None
    first, *_, last = found.hidden_states
    assert len(found.hidden_states) == 3 and first.shape == last.shape == (3, 32, 32)
    assert torch.equal(last, theirs.model.encoder(ids, attention_mask=mask.bool()))
    assert not theirs.model.encoder.embedding._forward_hooks
    theirs.config.output_hidden_states = True
    assert len(theirs(ids, return_dict=False)[-1]) == 3


@pytest.mark.parametrize("head", HEADS)
def test_what_these_models_cannot_do_is_said(head, exported):
    theirs, ids = getattr(transformers, f"AutoModel{head}").from_pretrained(exported("pocket")), torch.ones(1, 40).long()
    for words, options in {
        "the text has 40 tokens, and this model reads 32; cut it": dict(input_ids=ids),
        "40 tokens": dict(inputs_embeds=torch.ones(1, 40, 32)),
        "leave position_ids out": dict(input_ids=ids[:, :3], position_ids=torch.tensor([[0, 1, 0]])),
        "leave output_attentions out": dict(input_ids=ids[:, :3], output_attentions=True),
        "either input_ids or inputs_embeds": {},
    }.items():
        with pytest.raises(ValueError, match=words):
            theirs(**options)
    with pytest.raises(TypeError, match="segment_ids"):
        theirs(ids[:, :3], segment_ids=ids[:, :3])
    with pytest.raises(TypeError, match="no input head_mask; leave it out"):
        theirs(ids[:, :3], head_mask=torch.ones(1))


@pytest.mark.parametrize("size", [70, 60])
@pytest.mark.parametrize("name", ["pocket", "untied", "output bias"])
@torch.no_grad()
def test_vocabulary_of_another_size(name, size, exported, tmp_path):
    theirs, ids = transformers.AutoModelForMaskedLM.from_pretrained(exported(name)).eval(), padded()["input_ids"] % 50
    before = theirs(ids).logits
    theirs.resize_token_embeddings(size, mean_resizing=False)
    after = theirs(ids).logits
    assert after.shape[-1] == theirs.config.vocab_size == theirs.get_input_embeddings().num_embeddings == size
    assert torch.allclose(after[..., :60], before[..., :60], atol=1e-5)
    theirs.save_pretrained(tmp_path)
    assert torch.equal(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()(ids).logits, after)


@pytest.mark.parametrize("schema", [None, 1, 3])
def test_what_another_version_exported_is_refused_in_one_line(schema, exported):
    """Its rotary positions pair other features, so the same weights would be another model."""
    folder = exported("pocket")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("schema") == 2
    (folder / "config.json").write_text(json.dumps(config | (dict(schema=schema) if schema else {})))
    with pytest.raises(UserError, match="another version of cramming_nb exported it"):
        load_model(folder)
    with pytest.raises(UserError, match="another version of cramming_nb exported it"):
        transformers.AutoModelForMaskedLM.from_pretrained(folder)


@torch.no_grad()
def test_bert_that_transformers_saved_is_read(exported, tokenizer, tmp_path):
    """After training in `transformers`, its token types are no longer zero; it may be saved in half the precision."""
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(exported("bert")).eval()
    theirs.bert.embeddings.token_type_embeddings.weight.normal_()
    theirs.save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    batch = padded()
    mask = batch["attention_mask"].bool()
    gap = theirs(**batch).logits - load_model(tmp_path)[0](batch["input_ids"], attention_mask=mask)
    assert gap[mask].abs().max() < 1e-4
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    assert {weight.dtype for weight in load_model(tmp_path)[0].parameters()} == {torch.float32}


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification"])
def test_other_heads_are_left_to_transformers(head, exported, tokenizer, tmp_path):
    """What was fine-tuned there has no mask to fill in, and does not say how our classifiers read."""
    tuned = getattr(transformers, f"AutoModelFor{head}").from_pretrained(exported("crammed"), num_labels=2)
    tuned.save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert not is_classifier(tmp_path)
    with pytest.raises(UserError, match="no exported model"):
        load_model(tmp_path)


@pytest.fixture
def classifier(tokenizer, tmp_path) -> Path:
    """A classifier that learned from sequences of 8 tokens; its encoder has positions for 32."""
    torch.manual_seed(0)
    arch = ARCHITECTURES["bert"]
    weights = SequenceClassifier(Encoder(arch), 2).state_dict()
    write_classifier(weights, tokenizer, arch, 8, ("no", "yes"), False, "", tmp_path)
    return tmp_path


def pipeline(folder: Path) -> transformers.Pipeline:
    """What `transformers` makes of the classifier in a folder."""
    return transformers.pipeline("text-classification", model=str(folder), top_k=None, truncation=True)


def test_classifier_is_asked_for_no_more_than_it_learned_from(classifier):
    beginning, text = "the old garden follows a quiet", "the old garden follows a quiet river and nobody"
    answer, cut = classify(classifier, [text, beginning])
    short = classify(classifier, ["the old"])
    assert answer == cut and [answer] != short
    assert json.loads((classifier / "config.json").read_text())["learned_length"] == 8
    (theirs,) = pipeline(classifier)([text])
    assert [found["label"] for found in theirs] == [label for label, _ in answer]
    assert [found["score"] for found in theirs] == pytest.approx([score for _, score in answer], abs=1e-5)


def test_special_token_within_a_text_is_text_for_both(classifier, tokenizer):
    """[MASK] is cut into pieces, so that it is not the token of pretraining."""
    text = "old [MASK]"
    (ours,) = classify(classifier, [text])
    (theirs,) = pipeline(classifier)([text])
    assert [found["score"] for found in theirs] == pytest.approx([score for _, score in ours], abs=1e-5)
    read = transformers.AutoTokenizer.from_pretrained(classifier)
    assert MASK not in read(text)["input_ids"] and MASK in tokenizer.encode(text).ids


def test_card_is_utf8_in_any_locale(classifier):
    """An ASCII locale has no dash between two numbers of an interval."""
    code = r"""if True:
        import sys
        from pathlib import Path
        from cramming_nb.app.export import files_to_send, load_classifier, write_files
        assert sys.flags.utf8_mode == 0
        folder = Path(sys.argv[1])
        model, tokenizer, config = load_classifier(folder)
        write_files(config, model.state_dict(), tokenizer, 8, "1\u20132 in THIS FOLDER", folder)
        card = files_to_send(folder, "a/b")["README.md"]
        assert card.decode() == "1\u20132 in a/b", card
        """
    ascii_locale = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = subprocess.run(
        [sys.executable, "-c", code, str(classifier)], env=os.environ | ascii_locale, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_configuration_of_ours_goes_round(exported, tmp_path):
    config = transformers.AutoConfig.from_pretrained(exported("documents"))
    config.save_pretrained(tmp_path)
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert Architecture(**again.architecture) == ARCHITECTURES["documents"]
    assert (again.hidden_size, again.num_hidden_layers, again.pad_token_id) == (32, 2, 0)
    fresh = transformers.AutoModelForMaskedLM.from_config(again)
    assert fresh.model.encoder.mixing is not None and fresh.num_parameters() == sum(
        p.numel() for p in MaskedLM(ARCHITECTURES["documents"]).parameters()
    )


BOTH_ORDERS = {
    "ours first": "import cramming_nb.app.hf, transformers",
    "theirs first": "import transformers, cramming_nb.app.hf",
    "theirs used first": "from transformers import AutoConfig, AutoModelForMaskedLM, pipeline; import transformers, cramming_nb.app.hf",
    "the package first": "import cramming_nb, cramming_nb.budget; import transformers; import cramming_nb.app.hf",
}


@pytest.mark.parametrize("imports", BOTH_ORDERS.values(), ids=BOTH_ORDERS)
def test_either_import_order(imports, exported, run_python):
    code = f"""{imports}
folder = {str(exported("crammed"))!r}
print(type(transformers.AutoTokenizer.from_pretrained(folder)("the [MASK]")["input_ids"]).__name__)
print(type(transformers.AutoConfig.from_pretrained(folder)).__name__)
print(type(transformers.AutoModel.from_pretrained(folder)).__name__)
for task in ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"):
    print(type(getattr(transformers, "AutoModelFor" + task).from_pretrained(folder)).__name__)
print(transformers.pipeline("fill-mask", model=folder)("the [MASK]")[0]["token_str"])"""
    done = run_python(code)
    assert done.code == 0, done.err
    tasks = "MaskedLM SequenceClassification TokenClassification QuestionAnswering".split()
    classes = ["list", "CrammingConfig", "CrammingModel", *(f"CrammingFor{task}" for task in tasks)]
    assert done.out.split()[:7] == classes
    assert "trust_remote_code" not in done.err


def test_model_type_is_unknown_without_the_import(exported, run_python):
    """`import cramming_nb` alone changes nothing in transformers, whichever is imported first."""
    done = run_python(f"""import cramming_nb, transformers, cramming_nb.budget
try:
    transformers.AutoConfig.from_pretrained({str(exported("crammed"))!r})
except ValueError as error:
    print(error)""")
    assert done.code == 0, done.err
    assert "model type `cramming_nb`" in done.out


def test_import_without_transformers_names_the_extra(run_python):
    done = run_python("import sys; sys.modules['transformers'] = None; import cramming_nb.app.hf")
    assert done.code == 1
    assert done.err.splitlines()[-1].endswith("needs transformers: pip install 'cramming_nb[hf]'")


def test_pickled_model_loads_in_a_new_process(exported, tmp_path, run_python):
    """As a process of transformers' Trainer gets it: without any import of ours."""
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(transformers.AutoModelForMaskedLM.from_pretrained(exported("crammed"))))
    done = run_python(f"""import pickle
with open({str(path)!r}, "rb") as file:
    model = pickle.load(file)
print(type(model).__name__, type(model.config).__name__, model.config.hidden_size)""")
    assert done.code == 0, done.err
    assert done.out.split() == ["CrammingForMaskedLM", "CrammingConfig", "32"]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077], ids=oct)
@pytest.mark.parametrize("name", ["bert", "crammed"])
def test_files_have_the_permissions_of_new_files(name, umask, tokenizer, tmp_path):
    before = os.umask(umask)
    try:
        write_model(model(ARCHITECTURES[name]).state_dict(), tokenizer, ARCHITECTURES[name], "", tmp_path)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files}
    assert modes == dict.fromkeys(modes, oct(0o666 & ~umask)) and "model.safetensors" in modes


def test_export_of_a_run_is_readable_by_others(finished):
    folder = finished.folder / "export"
    usual = stat.S_IMODE((folder / "config.json").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {usual}


def test_bert_needs_nothing_of_ours(exported, run_python):
    code = f"""import sys, transformers
folder = {str(exported("bert"))!r}
print(type(transformers.AutoModelForMaskedLM.from_pretrained(folder)).__name__)
assert transformers.pipeline("fill-mask", model=folder)("the [MASK]")[0]["token_str"]
print("cramming_nb" in sys.modules)"""
    done = run_python(code)
    assert done.code == 0, done.err
    assert done.out.split() == ["BertForMaskedLM", "False"]


DAMAGE = {
    "no configuration": lambda f: (f / "config.json").unlink(),
    "no type": lambda f: (f / "config.json").write_text("{}"),
    "another type": lambda f: (f / "config.json").write_text('{"model_type": "t5"}'),
    "no object": lambda f: (f / "config.json").write_text("[]"),
    "another width": lambda f: (f / "config.json").write_text(
        json.dumps(json.loads((f / "config.json").read_text()) | dict(hidden_size=64, architecture=dict(num_layers=1)))
    ),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "weights cut": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:99]),
    "weights of something else": lambda f: save_file({"a": torch.zeros(2)}, f / "model.safetensors"),
    "no tokenizer": lambda f: (f / "tokenizer.json").unlink(),
    "tokenizer cut": lambda f: (f / "tokenizer.json").write_text('{"version": "1.0", '),
}


@pytest.mark.parametrize("name", ["bert", "crammed"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_folder_is_refused_in_one_line(damage, name, exported):
    folder = exported(name)
    damage(folder)
    with pytest.raises(UserError, match="no exported model") as error:
        load_model(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_card_fits_the_kind_and_says_the_rules():
    record = RunRecord.read(Path(__file__).parents[1] / "records" / "cram" / "machine-3m-0.json")
    ours, bert = (model_card(record, 5, as_bert) for as_bert in (False, True))
    assert "import cramming_nb.app.hf" in ours and "cramming_nb" not in bert.split("## Use")[1]
    for card in (ours, bert):
        assert "| the paper's rules | none is broken |" in card and 'pipeline("fill-mask"' in card and record.key in card
        assert 'AutoModelForMaskedLM.from_pretrained("THIS FOLDER")' in card
    opened = replace(record, provenance=dict(rules="Open", breaches=["a pretrained filter"]))
    assert "| the paper's rules | a pretrained filter |" in model_card(opened, 5, False)


def test_snippet_of_the_card_runs(finished, run_python):
    """The card of a run, as its reader would use it."""
    card = (finished.folder / "export" / "README.md").read_text()
    for snippet in re.findall(r"```python\n(.*?)```", card, re.S):
        code = snippet.replace("THIS FOLDER", str(finished.folder / "export"))
        code += "\nfrom transformers import AutoModelForMaskedLM\n"
        code += f"AutoModelForMaskedLM.from_pretrained({str(finished.folder / 'export')!r})"
        done = run_python(code)
        assert done.code == 0, done.err


def test_the_tokenizer_is_the_one_of_the_rows(a_copy, monkeypatch):
    monkeypatch.setattr("cramming_nb.app.run.get_corpus", lambda *a, **k: pytest.fail("the corpus is built again"))
    assert a_copy.command("export", "first", "--to", a_copy.home / "out").code == 0
    ours, theirs = (
        (folder / "tokenizer.json").read_text() for folder in (a_copy.folder / "export", a_copy.home / "out")
    )
    assert ours == theirs
    shutil.rmtree(a_copy.folder / "export")
    assert a_copy.command("predict", "first", "the [MASK] is").code == 0


def test_run_of_a_bert(tiny, tmp_path):
    """A run whose recipe is BERT's is exported as BERT, reports what it fills in, and predicts."""
    changes = [f"architecture.{key}={json.dumps(value)}" for key, value in BERT.items()]
    argv = ["run", *tiny.options("2ktok"), "--name", "first", "--finetune-seeds", "0", "--set", *changes]
    said = command(*argv, cwd=tmp_path, cache=tiny.cache)
    folder = tmp_path / "runs" / "first" / "export"
    assert said.code == 0, said.err
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    assert type(transformers.AutoModelForMaskedLM.from_pretrained(folder)).__name__ == "BertForMaskedLM"
    assert command("predict", "first", "the old [MASK]", cwd=tmp_path).code == 0


LONG = "the old garden follows a quiet river and nobody paints the bridge " * 20  # over 32 tokens


def test_tokenizer_cuts_for_those_who_read_nothing_else(exported, classifier):
    """`transformers` still cuts only where it is asked to, and `fill_mask` refuses what is too long."""
    folder = exported("pocket")
    cut = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(LONG)
    assert len(cut.ids) == 32 and cut.tokens[-1] == "[SEP]"
    assert len(Tokenizer.from_file(str(classifier / "tokenizer.json")).encode(LONG).ids) == 8
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(theirs(LONG)["input_ids"]) > 200 and theirs(LONG, truncation=True)["input_ids"] == cut.ids
    with pytest.raises(UserError, match="this model reads 32"):
        fill_mask(*load_model(folder), f"[MASK] {LONG}")


TEXTS = ["the old garden", "nobody paints the bridge and a quiet river", LONG]


@pytest.mark.parametrize("name", ["bert", "crammed", "pocket"])
@torch.no_grad()
def test_sentence_transformers_takes_the_mean(name, exported):
    st = pytest.importorskip("sentence_transformers")
    folder = exported(name)
    theirs = st.SentenceTransformer(str(folder), device="cpu")
    assert theirs.max_seq_length == 32
    vectors = torch.from_numpy(theirs.encode(TEXTS))
    encoder, reader = model(ARCHITECTURES[name]).encoder, Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = torch.tensor([reader.encode(text).ids])
        assert (mean_pooling(encoder(ids), None)[0] - vector).abs().max() < 1e-5


@pytest.fixture(scope="session")
def with_onnx(exported):
    """The folder of an exported model with model.onnx, which takes seconds to write; what there was is unchanged."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    @cache
    def make(name: str) -> Path:
        folder = exported(name)
        before = contents(folder)
        write_onnx(folder)
        assert {file: digest for file, digest in contents(folder).items() if file != "model.onnx"} == before
        return folder

    return make


@pytest.mark.parametrize("name", ["bert", "pocket", "documents"])
@torch.no_grad()
def test_onnx_computes_what_torch_does(name, with_onnx):
    from onnxruntime import InferenceSession

    folder = with_onnx(name)
    for place in (str(Path(__file__).parents[1]), sys.prefix, "site-packages"):
        assert place.encode() not in (folder / "model.onnx").read_bytes()
    session, ours = InferenceSession(folder / "model.onnx"), model(ARCHITECTURES[name])
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    for batch in (padded(), padded((5,)), padded((1, 9))):
        mask = batch["attention_mask"].bool()
        logits, hidden = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
        expected = theirs(**batch, output_hidden_states=True)
        for found, wanted in ((logits, expected.logits), (hidden, expected.hidden_states[-1])):
            assert (torch.from_numpy(found) - wanted)[mask].abs().max() < 1e-4
        assert (torch.from_numpy(logits) - ours(batch["input_ids"], attention_mask=mask))[mask].abs().max() < 1e-4
    too_long = np.ones((1, 40), np.int64)
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        session.run(None, dict(input_ids=too_long, attention_mask=too_long))


def test_onnx_of_a_classifier(classifier):
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    said = command("export", classifier, "--onnx")
    assert said.code == 0 and said.out.strip() == str(classifier / "model.onnx"), said.err
    read = Tokenizer.from_file(str(classifier / "tokenizer.json"))
    session = ort.InferenceSession(classifier / "model.onnx")
    for text in TEXTS:
        ids = np.array([read.encode(text).ids])
        logits, _ = session.run(None, dict(input_ids=ids, attention_mask=np.ones_like(ids)))
        (answer,) = classify(classifier, [text])
        assert torch.from_numpy(logits)[0].softmax(-1).max().item() == pytest.approx(answer[0][1], abs=1e-5)


def test_onnx_that_computes_something_else_is_not_written(with_onnx, exported, monkeypatch):
    """It is the program of the same model with other weights."""
    program = (with_onnx("pocket") / "model.onnx").read_bytes()
    folder = exported("pocket")
    weights = load_file(folder / "model.safetensors")
    save_file({name: 1.1 * weight for name, weight in weights.items()}, folder / "model.safetensors")
    monkeypatch.setattr("cramming_nb.app.export.to_onnx", lambda module: program)
    before = contents(folder)
    with pytest.raises(UserError, match="would differ from the model"):
        write_onnx(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("missing", ["onnxruntime", "onnxscript"])
def test_onnx_without_its_packages_is_one_line_and_nothing_is_written(missing, a_copy, monkeypatch):
    shutil.rmtree(a_copy.folder / "export")
    monkeypatch.setitem(sys.modules, missing, None)
    said = a_copy.command("export", "first", "--onnx")
    assert said.code == 2 and said.err.count("\n") == 1, said.err
    assert "pip install 'cramming_nb[onnx]'" in said.err and not (a_copy.folder / "export").exists()


def test_onnx_of_other_weights_does_not_outlive_them(a_copy):
    path = a_copy.folder / "export" / "model.onnx"
    path.write_bytes(b"of another checkpoint")
    assert a_copy.command("export", "first").code == 0
    assert not path.exists()


STOCK = """import sys
_, folder, *texts = sys.argv
import numpy as np, transformers
from onnxruntime import InferenceSession
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
assert type(transformers.AutoModelForMaskedLM.from_pretrained(folder)).__module__.startswith("transformers.")
theirs = SentenceTransformer(folder, device="cpu").encode(texts)
tokenizer, session = Tokenizer.from_file(folder + "/tokenizer.json"), InferenceSession(folder + "/model.onnx")
for text, vector in zip(texts, theirs, strict=True):
    ids = np.array([tokenizer.encode(text).ids])
    _, hidden = session.run(None, dict(input_ids=ids, attention_mask=np.ones_like(ids)))
    assert abs(hidden[0].mean(0) - vector).max() < 1e-4
assert not [name for name in sys.modules if name.startswith("cramming")]
"""


def test_bert_is_read_by_three_libraries_without_this_package(with_onnx, tmp_path):
    pytest.importorskip("sentence_transformers")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    call = [sys.executable, "-c", STOCK, str(with_onnx("bert")), *TEXTS]
    done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def snippets(page: str) -> list[str]:
    """The Python of a guide that readers copy."""
    cells = json.loads((Path(__file__).parents[1] / "nbs" / "guides" / page).read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.findall(r"```python\n(.*?)```", text, re.S)


def test_vectors_of_the_guide(exported, run_python):
    pytest.importorskip("sentence_transformers")
    (snippet,) = [code for code in snippets("own_text.ipynb") if "sentence_transformers" in code]
    done = run_python(snippet.replace("runs/russian/export", str(exported("pocket"))) + "\nprint(vectors.shape)")
    assert done.code == 0 and done.out.strip().endswith("(2, 32)"), done.err


@torch.no_grad()
def test_onnx_of_the_guide(with_onnx, run_python):
    (snippet,) = [code for code in snippets("own_text.ipynb") if "onnxruntime" in code]
    snippet = re.sub(r'encode\("[^"]*"\)', 'encode("the old [MASK] follows")', snippet)
    done = run_python(snippet.replace("runs/russian/export", str(with_onnx("pocket"))) + "\nprint([word])")
    assert done.code == 0, done.err
    ours, tokenizer = load_model(with_onnx("pocket"))
    ids = torch.tensor([tokenizer.encode("the old [MASK] follows").ids])
    assert done.out.strip().endswith(str([tokenizer.decode(ours(ids)[ids == MASK].argmax(-1).tolist())]))


BORN = "He was born in the United [MASK]."


def demo_files() -> dict[str, bytes]:
    return {str(path.relative_to(DEMO)): path.read_bytes() for path in DEMO.rglob("*") if path.is_file()}


def test_model_to_try_is_small_and_says_where_it_comes_from():
    files = demo_files()
    assert sum(map(len, files.values())) < 10e6
    assert {weight.dtype for weight in load_file(DEMO / "model.safetensors").values()} == {torch.float16}
    record, card = RunRecord.read(DEMO / "record.json"), files["README.md"].decode()
    assert record.recipe["name"] == "pocket" and record.key in card and "CC BY-SA" in card
    for number in (record.pretraining["heldout_loss"], record.pretraining["unigram_entropy"]):
        assert f"{number:.3f}" in card
    for name, content in files.items():
        assert not re.search(rb"/(tmp|home|root|work|Users|mnt)/", content), name


def test_model_to_try_fills_masks():
    ours, tokenizer = load_model(DEMO)
    (guesses,) = fill_mask(ours, tokenizer, BORN)
    assert guesses[0][0] == "states"
    theirs = transformers.pipeline("fill-mask", model=str(DEMO))
    assert theirs(BORN)[0]["token_str"] == "states"
    assert theirs.model.dtype == torch.float32


@pytest.mark.parametrize("argv", [("--demo", BORN), (BORN, "--demo"), ("--demo",)], ids=["first", "last", "from stdin"])
def test_demo_needs_no_run(argv, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{BORN}\n"))
    said = command("predict", *argv, "--top", "1", cwd=tmp_path)
    assert said.code == 0 and said.out.splitlines()[0] == BORN, said.err
    assert said.out.splitlines()[1].split()[0] == "states" and not list(tmp_path.iterdir())


def test_demo_takes_all_words_as_texts(tmp_path):
    said = command("predict", "--demo", "./a//[MASK]/", "one [MASK]", cwd=tmp_path)
    assert said.code == 0 and said.out.splitlines()[0] == "./a//[MASK]/" and "one [MASK]" in said.out.splitlines()
