"""Every recipe that carries somebody's name has the values its sources publish, field by field.

Sources: D = Devlin et al. 2019, section 3 and appendix A.2; DC = the code of that paper (optimization.py,
modeling.py, create_pretraining_data.py); H = the reference code at commit 196c991; T = its tag
Last1.13release; P1 = arXiv:2212.14034v1; G = a guess of ours; here = ours, where the source has no such
thing. A value that a recipe cannot express stands in the comment beside the recipe.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml

from cramming_nb.architecture import MaskedLM, num_parameters
from cramming_nb.recipes import RECIPES, Recipe, diff, flat

OURS = {"pocket", "crammed-nb", "sprint"}

PLAIN_TEXT = {
    "corpus.tokenizer": ("wordpiece", "D 3, P1 4.1"),
    "corpus.normalizer": ("paper", "P1 4.1"),
    "corpus.vocab_size": (32768, "P1 4.1, H data/bookcorpus-wikipedia"),
    "corpus.seq_length": (128, "P1 4.1, D A.2 for nine tenths of the steps"),
    "corpus.filter_threshold": (0.0, "H data/bookcorpus-wikipedia: remove_trash off"),
    "corpus.order": ("random", "H data/bookcorpus-wikipedia: randomized"),
    "corpus.dedup": (0, "H data/bookcorpus-wikipedia: deduplicate off"),
}
THE_PILE = PLAIN_TEXT | {
    "corpus.filter_threshold": (0.25, "H data/the-pile: trash_cutoff"),
    "corpus.order": ("sentence_length", "H data/the-pile: sentence-length-curriculum"),
    "corpus.dedup": (0, "H data/the-pile"),
}
C4 = THE_PILE | {
    "corpus.filter_threshold": (0.25, "T data/c4-subset-processed: trash_cutoff"),
    "corpus.order": ("sentence_length", "T data/c4-subset-processed"),
    "corpus.dedup": (75, "T data/c4-subset-processed: deduplication threshold in bytes"),
}

NOT_IN_THE_SOURCES = {
    "architecture.neighbor_mixing": (0, "here"),
    "architecture.block_mixing": (0, "here"),
    "architecture.qk_norm": (False, "here"),
    "architecture.first_norm": (True, "here"),
    "architecture.document_attention": (False, "H 1.2: rows run across documents"),
    "architecture.gate_compensation": (False, "P1 4.2"),
    "architecture.embedding_size": (0, "P1 4.2"),
    "architecture.tie_embeddings": (True, "P1 4.2, DC modeling.py"),
    "architecture.token_mixing": ("attention", "P1 4.2, D 3"),
    "architecture.norm": ("layer_norm", "P1 4.2, D 3"),
    "objective.keep_random": (True, "D 3.1, P1 4.3"),
    "objective.z_loss": (0.0, "here"),
    "objective.adaptive": (False, "here"),
    "objective.name": ("mlm", "D 3.1, P1 2"),
    "optimizer.cautious": (False, "here"),
    "optimizer.average": ("none", "P1: nothing; H: off"),
    "schedule.cooldown": (0.0, "H: off"),
    "schedule.mask_start": (0.0, "here"),
    "schedule.horizon": (1.0, "P1 4.3: tied to the budget; BERT: run to its end"),
    "schedule.batch_start": (0, "H, T: one effective micro-batch"),
    "schedule.length_start": (0, "H: curriculum off"),
}
BERT_SHAPE = NOT_IN_THE_SOURCES | {
    "architecture.num_layers": (12, "D 3"),
    "architecture.hidden_size": (768, "D 3"),
    "architecture.num_heads": (12, "D 3"),
    "architecture.ffn_size": (3072, "D 3"),
    "architecture.activation": ("gelu", "D A.2"),
    "architecture.norm_placement": ("post", "DC modeling.py"),
    "architecture.norm_eps": (1e-12, "DC modeling.py: contrib layer_norm; H hf-bert-base"),
    "architecture.embedding_norm": (True, "DC modeling.py"),
    "architecture.final_norm": (False, "DC modeling.py"),
    "architecture.position": ("learned", "D 3"),
    "architecture.max_length": (512, "D A.2"),
    "architecture.qkv_bias": (True, "DC modeling.py"),
    "architecture.linear_bias": (True, "DC modeling.py"),
    "architecture.decoder_bias": (True, "DC run_pretraining.py: output_bias"),
    "architecture.head_transform": ("bert", "DC run_pretraining.py: transform"),
    "architecture.pooling": ("first", "D 3"),
    "architecture.dropout": (0.1, "D A.2"),
    "architecture.init": ("normal", "DC modeling.py: truncated, ours is not"),
    "architecture.init_std": (0.02, "DC modeling.py: initializer_range"),
    "architecture.sparse_prediction": (False, "DC: the last block computes all positions"),
    "architecture.sparse_head": (True, "DC run_pretraining.py: gather_indexes before the head"),
}
ALL_LOGITS = BERT_SHAPE | {
    "architecture.sparse_head": (False, "T arch/bert-original: sparse_prediction False"),
}
BERT_BASE_C0 = BERT_SHAPE | {
    "architecture.norm_eps": (1e-6, "T arch/bert-base"),
    "architecture.max_length": (128, "T arch/bert-base"),
    "architecture.sparse_prediction": (True, "T arch/bert-base; here in the last block too"),
}
MINIMAL_SHAPE = BERT_SHAPE | {
    "architecture.norm_placement": ("pre", "H arch/crammed-bert-simple"),
    "architecture.norm_eps": (1e-12, "H arch/crammed-bert-simple"),
    "architecture.final_norm": (True, "here, as pre-norm needs one"),
    "architecture.max_length": (128, "H arch/crammed-bert-simple"),
    "architecture.sparse_prediction": (True, "H arch/crammed-bert-simple; here in the last block too"),
}
IZSAK_SHAPE = MINIMAL_SHAPE | {
    "architecture.num_layers": (24, "H arch/crammed-large-izsak"),
    "architecture.hidden_size": (1024, "H arch/crammed-large-izsak"),
    "architecture.num_heads": (16, "H arch/crammed-large-izsak"),
    "architecture.ffn_size": (4096, "H arch/crammed-large-izsak"),
    "architecture.norm_eps": (1e-6, "H arch/crammed-large-izsak"),
}
CRAMMED_SHAPE = MINIMAL_SHAPE | {
    "architecture.num_layers": (16, "H arch/crammed-bert"),
    "architecture.activation": ("gelu_glu", "H arch/crammed-bert, P1 4.2"),
    "architecture.position": ("scaled_sinusoidal", "H arch/crammed-bert, P1 4.2"),
    "architecture.final_norm": (True, "H arch/crammed-bert, P1 4.2"),
    "architecture.qkv_bias": (False, "H arch/crammed-bert, P1 4.2"),
    "architecture.linear_bias": (False, "H arch/crammed-bert, P1 4.2"),
    "architecture.decoder_bias": (False, "H arch/crammed-bert, P1 4.2"),
    "architecture.head_transform": ("none", "H arch/crammed-bert: skip_head_transform"),
    "architecture.pooling": ("mean", "H arch/crammed-bert: avg"),
    "architecture.classifier_size": (1024, "H arch/crammed-bert"),
}
CRAMMED_SHAPE_V1 = CRAMMED_SHAPE | {
    "architecture.head_transform": ("linear", "T architectures/scriptable_bert.py"),
}

BERNOULLI = {
    "objective.mlm_probability": (0.15, "T train: mlm_probability"),
    "objective.exact": (False, "T: each position by itself"),
}
EXACT = {
    "objective.mlm_probability": (0.15, "H train: mlm_probability"),
    "objective.exact": (True, "H backend/utils.py: 19 of 128"),
}

BERT_TRAINING = {
    "objective.mlm_probability": (0.15, "D 3.1"),
    "objective.exact": (True, "DC create_pretraining_data.py: round(0.15 length) of each text"),
    "optimizer.name": ("bert_adam", "DC optimization.py: decay added after the quotient"),
    "optimizer.lr": (1e-4, "D A.2"),
    "optimizer.betas": ([0.9, 0.999], "D A.2"),
    "optimizer.eps": (1e-6, "DC optimization.py"),
    "optimizer.weight_decay": (0.01, "D A.2"),
    "optimizer.clip": (1.0, "DC optimization.py: clip_by_global_norm"),
    "schedule.lr": ("linear", "D A.2"),
    "schedule.warmup": (10_000 / 1_000_000, "D A.2"),
    "schedule.batch_size": (256, "D A.2"),
    "schedule.batch_ramp": (0.0, "D A.2"),
    "training.dropout": (True, "D A.2"),
}
REFERENCE_BERT_TRAINING = (
    BERT_TRAINING
    | BERNOULLI
    | {
        "optimizer.name": ("adam_l2", "T train/bert-original: Adam, decay in the gradient"),
        "optimizer.lr": (1e-4, "T train/bert-original"),
        "optimizer.betas": ([0.9, 0.999], "T train/bert-original"),
        "optimizer.eps": (1e-8, "T train/bert-original"),
        "optimizer.weight_decay": (0.01, "T train/bert-original"),
        "optimizer.clip": (0.0, "T train/bert-original: none"),
        "schedule.lr": ("linear", "T train/bert-original: polynomial"),
        "schedule.warmup": (80_000 / 8_000_000, "T train/bert-original: micro-batches"),
        "schedule.batch_size": (512, "T train/bert-original"),
        "training.dropout": (True, "T train/bert-original"),
    }
)
STOPPED = {
    "schedule.horizon": (20.0, "G: 8 million micro-batches of 64 on an A4000, estimated; 15 to 33 by GPU"),
}
ADAMW = {
    "optimizer.name": ("adamw", "H train"),
    "optimizer.betas": ([0.9, 0.98], "H train, P1 4.3"),
    "optimizer.eps": (1e-12, "H train, P1 4.3"),
    "optimizer.weight_decay": (0.01, "H train, P1 4.3"),
    "training.dropout": (False, "H train, P1 4.3"),
}
O0 = (
    ADAMW
    | BERNOULLI
    | {
        "optimizer.lr": (5e-4, "T train/bert-base"),
        "optimizer.clip": (0.0, "T train/bert-base: none"),
        "schedule.lr": ("cosine", "T train/bert-base: budget-cosine"),
        "schedule.warmup": (30_000 / 900_000, "T train/bert-base"),
        "schedule.batch_size": (1536, "T train/bert-base"),
        "schedule.batch_ramp": (0.0, "T train/bert-base"),
    }
)
MINIMAL_TRAINING = (
    O0
    | EXACT
    | {
        "schedule.warmup": (0.06, "H scripts/final_story"),
        "schedule.batch_size": (8192, "H scripts/final_story"),
    }
)
O4 = ADAMW | {
    "objective.mlm_probability": (0.25, "H train/bert-o4"),
    "objective.exact": (True, "H backend/utils.py: 32 of 128"),
    "optimizer.lr": (1e-3, "H train/bert-o4, P1 4.3"),
    "optimizer.clip": (0.5, "H train/bert-o4, P1 4.3"),
    "schedule.lr": ("triangle2", "H train/bert-o4: budget-triangle2"),
    "schedule.warmup": (0.0, "H train/bert-o4"),
    "schedule.batch_size": (8192, "H train/bert-o4"),
    "schedule.batch_ramp": (0.6, "H train/bert-o4: 0.60 of the budget"),
}
O3 = (
    O4
    | BERNOULLI
    | {
        "optimizer.lr": (1e-3, "T train/bert-o3"),
        "optimizer.clip": (0.5, "T train/bert-o3"),
        "schedule.lr": ("triangle2", "T train/bert-o3"),
        "schedule.batch_size": (4096, "P1 4.3, command of the model card"),
        "schedule.batch_ramp": (0.5, "G: 300,000 micro-batches, of 600,000 in the plan"),
    }
)
IZSAK_TRAINING = (
    ADAMW
    | EXACT
    | {
        "optimizer.lr": (2e-3, "H train/izsak"),
        "optimizer.eps": (1e-6, "H train/izsak"),
        "optimizer.clip": (0.0, "H train/izsak: none"),
        "schedule.lr": ("linear", "H train/izsak: budget-linear"),
        "schedule.warmup": (0.06, "H train/izsak"),
        "schedule.batch_size": (4096, "H train/izsak"),
        "schedule.batch_ramp": (0.0, "H train/izsak"),
        "training.dropout": (True, "H train/izsak"),
    }
)

BERT_VOCABULARY = {"corpus.vocab_size": (30522, "DC: bert_config.json, uncased")}

PUBLISHED = {
    "bert-original": PLAIN_TEXT | BERT_VOCABULARY | BERT_SHAPE | BERT_TRAINING,
    "bert-original-reference": PLAIN_TEXT | ALL_LOGITS | REFERENCE_BERT_TRAINING,
    "bert-original-stopped": PLAIN_TEXT | ALL_LOGITS | REFERENCE_BERT_TRAINING | STOPPED,
    "bert-24h": PLAIN_TEXT | BERT_BASE_C0 | O0,
    "izsak": PLAIN_TEXT | IZSAK_SHAPE | IZSAK_TRAINING,
    "crammed-minimal-training": THE_PILE | CRAMMED_SHAPE | MINIMAL_TRAINING,
    "crammed-minimal-architecture": THE_PILE | MINIMAL_SHAPE | O4,
    "crammed-v1": C4 | CRAMMED_SHAPE_V1 | O3,
    "crammed-v2": THE_PILE | CRAMMED_SHAPE | O4,
}
CELLS = [(name, field) for name, published in PUBLISHED.items() for field in published]

PARAMETERS = {  # of the masked language model, in millions
    "bert-original": (109.5, "D 3: 110M"),
    "bert-original-reference": (111.2, "computed from T arch/bert-original"),
    "bert-original-stopped": (111.2, "computed from T arch/bert-original"),
    "bert-24h": (110.9, "computed from T arch/bert-base"),
    "izsak": (337.1, "computed from H arch/crammed-large-izsak"),
    "crammed-minimal-training": (119.6, "computed from H arch/crammed-bert"),
    "crammed-minimal-architecture": (110.9, "computed from H arch/crammed-bert-simple"),
    "crammed-v1": (120.2, "computed from T arch/bert-c5"),
    "crammed-v2": (119.6, "computed from H arch/crammed-bert"),
}


def test_every_recipe_has_its_table_or_is_ours():
    assert set(RECIPES) == set(PUBLISHED) | OURS


def test_sprint_is_what_was_run_on_a_gpu():
    path = Path(__file__).parents[1] / "records" / "gpu" / "crammed-nb_batch_512_all_text-330s-0.json"
    measured = json.loads(path.read_text())["recipe"] | {"name": "sprint"}
    measured["protocol"].pop("mnli_first", None)  # a field of a protocol that is gone
    measured["protocol"] |= {"layer_decay": 1.0, "swap": False, "fewest_steps": 0}  # came later, and are off
    measured["training"] |= {"attention": "auto"}  # the device's choice, which had no field then
    measured["objective"] |= {"name": "mlm"}  # the only one there was
    measured["training"] |= {"compile_by": "block"}  # the same step, ready sooner
    assert yaml.safe_load(RECIPES["sprint"].to_yaml()) == measured


@pytest.mark.parametrize("name, field", CELLS, ids=lambda x: x)
def test_field_equals_its_source(name, field):
    value, source = PUBLISHED[name][field]
    assert flat(RECIPES[name])[field] == value, f"{source} has {value}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_nothing_is_changed_without_a_source(name):
    # the architecture takes its vocabulary from the corpus
    changed = {key for key, *_ in diff(Recipe(), RECIPES[name])} - {"architecture.vocab_size"}
    assert changed <= set(PUBLISHED[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_equal_their_source(name):
    with torch.device("meta"):
        count = num_parameters(MaskedLM(RECIPES[name].architecture))
    assert round(count / 1e6, 1) == PARAMETERS[name][0]


def test_minimal_rows_reset_one_group_each():
    whole = RECIPES["crammed-v2"]
    for name, parts in {
        "crammed-minimal-training": {"objective", "optimizer", "schedule"},
        "crammed-minimal-architecture": {"architecture"},
    }.items():
        assert {key.split(".")[0] for key, *_ in diff(whole, RECIPES[name])} == parts
