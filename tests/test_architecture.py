"""What every switch of the model does: none is ignored, none leaks, all are counted.

On the CPU, and on a GPU where there is one.
"""

import itertools
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from cramming_nb import architecture
from cramming_nb.architecture import (
    ACTIVATIONS,
    ATTENTIONS,
    BLOCKS,
    HEAD_TRANSFORMS,
    INITS,
    NORMS,
    POOLINGS,
    POSITIONS,
    TOKEN_MIXERS,
    Architecture,
    Encoder,
    MaskedLM,
    QuestionAnswerer,
    SequenceClassifier,
    TokenClassifier,
    attention_operation,
    check,
    document_ids,
    flops_by_part,
    flops_per_token,
    masked_lookup,
    num_parameters,
    parameters_by_part,
    rotary_table,
    rotate,
    select_positions,
)
from cramming_nb.engine.errors import UserError
from cramming_nb.recipes import RECIPES, change, field_help, flat
from cramming_nb.tokenizer import MASK, SEP

SMALL = Architecture(
    vocab_size=64,
    max_length=24,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    ffn_size=48,
    init_std=0.2,
)
POST = dict(norm_placement="post", final_norm=False)
FOURIER = dict(token_mixing="fourier")
ALL_LOGITS = dict(sparse_prediction=False, sparse_head=False)
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]

NUMBERS = dict(
    vocab_size=80,
    max_length=30,
    hidden_size=40,
    num_layers=3,
    num_heads=2,
    ffn_size=96,
    norm_eps=0.5,
    neighbor_mixing=1,
)
NUMBERS |= dict(dropout=0.5, classifier_size=64, init_std=0.1, block_mixing=1, embedding_size=16)
NAMES = dict(
    activation=ACTIVATIONS,
    position=POSITIONS,
    norm_placement=BLOCKS,
    head_transform=HEAD_TRANSFORMS,
    pooling=POOLINGS,
    norm=NORMS,
    token_mixing=TOKEN_MIXERS,
    init=[name for name in INITS if name != "counts"],  # it needs text, see test_counts
)
FLAGS = [name for name, value in asdict(SMALL).items() if isinstance(value, bool)]


def flipped() -> list[dict]:
    """One change for each value of each switch that is not the value of SMALL."""
    changes = []
    for field, names in NAMES.items():
        changes += [{field: name} for name in names if name != getattr(SMALL, field)]
    changes += [{field: value} for field, value in NUMBERS.items()]
    changes += [{flag: not getattr(SMALL, flag)} for flag in FLAGS]
    together = {"norm_placement=post": POST, "sparse_head=False": ALL_LOGITS}  # not possible alone
    return [together.get(label(change), change) for change in changes]


def label(change: dict) -> str:
    """The name of a changed architecture in the list of tests."""
    return " ".join(f"{field}={value}" for field, value in change.items()) or "plain"


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of three documents, and a quarter of their positions."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 64, (4, 24), generator=generator)
    ids[:, [7, 15]] = SEP
    return ids, torch.rand(4, 24, generator=generator).argsort(1)[:, :6]


def behaviour(arch: Architecture) -> dict[str, object]:
    """Everything by which two models can be told apart."""
    (ids, positions), seen = sequences(), {}
    attention_mask = torch.arange(24) < torch.tensor([[24], [20], [9], [5]])
    for training in (False, True):
        torch.manual_seed(0)
        model, classifier = MaskedLM(arch), SequenceClassifier(Encoder(arch), 2)
        with FlopCounterMode(display=False) as counter:
            seen[f"logits {training}"] = model.train(training)(ids, positions)
        seen[f"classes {training}"] = classifier.train(training)(ids, attention_mask)
    seen["work"] = counter.get_total_flops()
    seen["shapes"] = []
    for module in (model, classifier):
        tensors = itertools.chain(module.parameters(), module.buffers())
        seen["shapes"] += [tensor.shape for tensor in tensors]
    return seen


def same(a: object, b: object) -> bool:
    """Whether two results of `behaviour` are equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)  # False where the shapes differ
    return a == b


@pytest.fixture(scope="module")
def plain() -> dict[str, object]:
    return behaviour(SMALL)


def test_every_switch_is_flipped_below():
    changed = {field for change in flipped() for field in change}
    assert changed == {field.name for field in fields(Architecture)}


def test_behaviour_is_a_function_of_the_architecture(plain):
    assert all(same(plain[name], value) for name, value in behaviour(SMALL).items())


@pytest.mark.parametrize("changed", flipped(), ids=label)
def test_no_switch_is_ignored(changed, plain):
    seen = behaviour(replace(SMALL, **changed))
    assert not all(same(plain[name], value) for name, value in seen.items())


CHOICES = {f.name: f.metadata["choices"] for f in fields(Architecture) if f.metadata["choices"]}


@pytest.mark.parametrize("field", CHOICES)
def test_every_name_is_offered_and_others_refused(field):
    assert set(CHOICES[field]) - {"counts"} == set(NAMES[field])
    with pytest.raises(UserError, match=f"{field} 'x': choose one of"):
        check(replace(SMALL, **{field: "x"}))


def test_names_are_offered_for_all_named_switches():
    assert set(NAMES) <= set(CHOICES)


def test_every_switch_is_explained():
    explained = field_help(RECIPES["pocket"])
    keys = {key for key in flat(RECIPES["pocket"]) if key.startswith("architecture.")}
    assert keys and keys <= set(explained)


OUT_OF_RANGE = dict(
    num_heads=0,
    num_layers=0,
    ffn_size=0,
    dropout=1.0,
    embedding_size=-1,
    block_mixing=-1,
    norm_eps=-1.0,
)


@pytest.mark.parametrize("field, value", OUT_OF_RANGE.items())
def test_numbers_out_of_range_are_refused(field, value):
    with pytest.raises(UserError, match=field):
        change(RECIPES["pocket"], {f"architecture.{field}": value})


IMPOSSIBLE = [
    dict(norm_placement="post"),
    dict(POST, first_norm=False),
    dict(activation="gelu", gate_compensation=True),
    dict(FOURIER, qk_norm=True),
]
IMPOSSIBLE += [
    dict(FOURIER, qkv_bias=True),
    dict(FOURIER, position="rotary"),
    dict(position="rotary", num_heads=32),
    dict(num_heads=5),
    dict(sparse_head=False),
]


@pytest.mark.parametrize("changed", IMPOSSIBLE, ids=str)
def test_impossible_combinations_are_refused_with_a_reason(changed):
    with pytest.raises(UserError) as refusal:
        MaskedLM(replace(SMALL, **changed))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) > 20


VARIANTS = [
    {},
    dict(position="rotary"),
    dict(position="rotary", qk_norm=True),
    FOURIER,
    POST,
    dict(norm_placement="sandwich", norm="rms_norm", first_norm=False),
]
VARIANTS += [
    dict(neighbor_mixing=2, block_mixing=1),
    dict(qkv_bias=True, linear_bias=True, decoder_bias=True, head_transform="bert"),
]
VARIANTS += [
    dict(embedding_size=16, tie_embeddings=False, activation="relu_squared"),
    dict(position="learned", neighbor_mixing=2),
]
variants = pytest.mark.parametrize("changed", VARIANTS, ids=label)
devices = pytest.mark.parametrize("device", DEVICES)
kernels = pytest.mark.parametrize("kernel", ["explicit", "sdpa"])  # the others ask for a GPU


def biased(model: torch.nn.Module, device: str) -> torch.nn.Module:
    """A model in which no weight is zero, so that a leak cannot be hidden by a zero."""
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.data.add_(0.05 * torch.randn_like(weight))
    return model.to(device).eval()


@devices
@kernels
@variants
def test_documents_leak_nothing(changed, kernel, device):
    model = biased(MaskedLM(replace(SMALL, document_attention=True, **changed), kernel), device)
    ids, positions = (x.to(device) for x in sequences())
    owner = document_ids(ids)
    with torch.no_grad():
        before = model(ids, positions)
        for document in range(3):
            other = torch.where((owner == document) & (ids != SEP), ids % 50 + 9, ids)
            moved = (model(other, positions) - before).abs().amax(-1)
            inside = select_positions(owner[..., None], positions)[..., 0] == document
            assert moved[~inside].max() < 1e-5 < moved[inside].max()


@devices
@kernels
@variants
def test_padding_changes_nothing_at_real_positions(changed, kernel, device):
    encoder = Encoder(replace(SMALL, **changed), kernel)
    ids = sequences()[0].to(device)
    mask = (torch.arange(24) < 15).expand(4, -1).to(device)
    for model in (
        SequenceClassifier(encoder, 3),
        TokenClassifier(encoder, 3),
        QuestionAnswerer(encoder),
    ):
        biased(model, device)
        with torch.no_grad():
            alone, filled = model(ids[:, :15], mask[:, :15]), model(ids, mask)
        if isinstance(model, QuestionAnswerer):
            assert (filled[..., 15:] < -9000).all()
            alone, filled = alone.mT, filled.mT
        if not isinstance(model, SequenceClassifier):
            filled = filled[:, :15]
        assert torch.allclose(alone, filled, atol=1e-4)


@devices
@kernels
@variants
@pytest.mark.parametrize("bounded", [False, True])
def test_sparse_prediction_changes_nothing_at_masked_positions(changed, kernel, device, bounded):
    arch = replace(SMALL, document_attention=bounded, **changed)
    sparse = biased(MaskedLM(arch, kernel), device)
    ids, positions = (x.to(device) for x in sequences())
    for choice in (dict(sparse_prediction=False), ALL_LOGITS):
        dense = MaskedLM(replace(arch, **choice), kernel).to(device).eval()
        dense.load_state_dict(sparse.state_dict())
        assert torch.allclose(sparse(ids, positions), dense(ids, positions), atol=1e-4)


@devices
def test_rotary_scores_depend_on_the_distance_only(device):
    encoder = biased(Encoder(replace(SMALL, position="rotary", num_layers=1)), device)
    ids = torch.randint(5, 64, (1, 12), generator=torch.Generator().manual_seed(2)).to(device)
    shifted = torch.cat([torch.full((1, 7), 5, device=device), ids], 1)
    documents = torch.cat([torch.zeros(1, 7), torch.ones(1, 12)], 1).long().to(device)
    with torch.no_grad():
        assert torch.allclose(encoder(ids), encoder(shifted, documents=documents)[:, 7:], atol=1e-5)
        learned = biased(Encoder(replace(SMALL, position="learned", num_layers=1)), device)
        moved = learned(shifted, documents=documents)[:, 7:]
        assert not torch.allclose(learned(ids), moved, atol=1e-2)
        backwards = encoder(ids.flip(1)).flip(1)
        assert not torch.allclose(backwards, encoder(ids), atol=1e-2)  # order does count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_rotated_as_in_transformers(dtype):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 4, 16, 8, dtype=dtype)
    cos, sin = rotary_table(16, 8).to(dtype).unbind(1)
    whole = [torch.cat([part, part], -1)[None] for part in (cos, sin)]
    for ours, theirs in zip((rotate(x, cos, sin) for x in (q, k)), llama.apply_rotary_pos_emb(q, k, *whole), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6 if dtype == torch.float32 else 0.05)


def test_the_gradient_of_a_rotation_is_the_rotation_back():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = rotary_table(6, 8).double().unbind(1)
    assert torch.autograd.gradcheck(lambda x: architecture.Rotation.apply(x, cos, sin), x)


def allocated(work) -> int:
    """Bytes that `work` takes from the memory of the CPU, given back or not."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    return sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")


def rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The plain form for interleaved pairs: features 2i and 2i + 1 of x [B, heads, S, d]; cos and sin [S, d / 2]."""
    partners = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    signed = torch.stack([-sin, sin], -1).flatten(1)
    return x * cos.repeat_interleave(2, -1) + partners * signed


def test_rotating_takes_the_memory_of_its_result_and_of_its_gradient():
    """In units of the queries, on paper: two, one forward and one backward.

    An interleaved rotation takes seven: two products, a flipped copy and a sum forward; two products and a flipped
    copy backward.
    """
    arch = replace(SMALL, position="rotary", max_length=128, hidden_size=128)
    rotary = architecture.Rotary(arch)
    q = torch.randn(8, 4, 128, 32, requires_grad=True)
    upstream, table = torch.randn_like(q), rotary.table.unbind(1)
    forms = {"ours": lambda: rotary(q), "interleaved": lambda: rotate_interleaved(q, *table)}
    taken = {}
    for name, form in forms.items():
        taken[name] = allocated(lambda form=form: torch.autograd.grad(form(), q, upstream))
    bytes_of_q = q.numel() * q.element_size()
    assert taken["ours"] < 2.5 * bytes_of_q
    assert taken["interleaved"] > 6.5 * bytes_of_q
    assert taken["ours"] <= taken["interleaved"] / 2


@pytest.mark.parametrize("document_attention", [False, True])
def test_pretraining_builds_a_mask_only_for_documents(document_attention, monkeypatch):
    given = []

    def watch(q, k, v, mask, dropout=0.0):
        given.append(mask)
        return architecture.explicit_attention(q, k, v, mask, dropout)

    monkeypatch.setitem(ATTENTIONS, "explicit", watch)
    MaskedLM(replace(SMALL, document_attention=document_attention))(*sequences())
    assert [mask is not None for mask in given] == [document_attention] * 2


def test_the_operation_of_a_kernel_is_named_and_a_missing_one_refused():
    assert attention_operation("explicit", SMALL, torch.float32, "cpu") == "bmm"
    assert "attention" in attention_operation("sdpa", SMALL, torch.float32, "cpu")
    assert attention_operation("sdpa", replace(SMALL, **FOURIER), torch.float32, "cpu") == "none"
    with pytest.raises(UserError, match="choose sdpa or explicit"):
        attention_operation("cudnn", SMALL, torch.float32, "cpu")


SPARSE = dict(block={}, head=dict(sparse_prediction=False), none=ALL_LOGITS)


@pytest.mark.parametrize("sparse", SPARSE.values(), ids=SPARSE)
@variants
def test_operations_are_counted_within_two_percent(changed, sparse):
    arch = replace(SMALL, **sparse, **changed)
    model, (ids, positions) = MaskedLM(arch), sequences()
    with FlopCounterMode(display=False) as forward:
        logits = model(ids, positions)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    stated = np.sum(list(flops_by_part(arch, 0.25).values()), 0) * ids.numel()
    counted = [forward.get_total_flops(), backward.get_total_flops()]
    assert stated == pytest.approx(counted, rel=0.02)
    assert flops_per_token(arch, 0.25) * ids.numel() == pytest.approx(stated.sum())


def test_the_head_is_counted_where_it_is_computed():
    """At 128 tokens, a quarter masked, BERT costs more than crammed-v2 only with all logits."""
    bert = replace(RECIPES["bert-original-reference"].architecture, max_length=128)
    gathered = replace(bert, sparse_head=True)
    crammed = flops_per_token(RECIPES["crammed-v2"].architecture, 0.25) / 1e6
    assert [round(flops_per_token(arch, 0.25) / 1e6) for arch in (bert, gathered)] == [678, 562]
    assert round(crammed) == 601
    assert flops_by_part(bert, 0.25)["head"][0] == 4 * flops_by_part(gathered, 0.25)["head"][0]


SIZES = {
    "crammed-v2": 119_589_889,
    "crammed-v1": 120_179_713,
    "bert-original": 109.5,
    "bert-original-reference": 111.2,
    "bert-original-stopped": 111.2,
    "bert-24h": 110.9,
    "crammed-minimal-training": 119_589_889,
    "crammed-minimal-architecture": 110.9,
    "izsak": 337.1,
    "pocket": 3_411_968,
    "crammed-nb": 119_592_960,
    "sprint": 119_592_960,
}


@pytest.mark.parametrize("name", RECIPES)
def test_presets_have_the_right_sizes(name):
    parts = parameters_by_part(RECIPES[name].architecture)
    with torch.device("meta"):
        assert sum(parts.values()) == num_parameters(MaskedLM(RECIPES[name].architecture))
    assert SIZES[name] in (sum(parts.values()), round(sum(parts.values()) / 1e6, 1))


@variants
def test_all_parts_are_counted_where_they_belong(changed):
    parts = parameters_by_part(replace(SMALL, **changed))
    mixed = changed.get("neighbor_mixing") or changed.get("block_mixing")
    assert (parts["neighbours"] > 0) == bool(mixed)
    assert (parts["head"] > 0) == any(
        changed.get(field) for field in ("decoder_bias", "head_transform", "embedding_size")
    )
    assert (parts["attention"] > 0) == (changed.get("token_mixing") != "fourier")
    assert parts["norms"] and parts["embedding"] and parts["feed-forward"]


@devices
def test_masked_lookup_is_the_embedding(device):
    """Both lookups give the same vectors, and the same gradients up to rounding."""
    torch.manual_seed(0)
    weight = torch.randn(48, 16, device=device, requires_grad=True)
    ids = torch.randint(0, 48, (8, 24), device=device)
    ids[:, ::4] = MASK
    upstream = torch.randn(8, 24, 16, device=device)
    plain, apart = torch.nn.functional.embedding(ids, weight), masked_lookup(ids, weight)
    assert torch.equal(plain, apart)
    expected, found = (torch.autograd.grad(out, weight, upstream)[0] for out in (plain, apart))
    assert torch.allclose(expected, found, atol=1e-5)
    assert expected[MASK].abs().max() > 1 and torch.equal(expected[MASK + 1 :], found[MASK + 1 :])


EMBEDDINGS = [{}, dict(embedding_size=16), dict(tie_embeddings=False)]


@pytest.mark.parametrize("changed", EMBEDDINGS, ids=label)
def test_a_model_trains_alike_with_the_masks_row_apart(changed, monkeypatch):
    """Gradients of all weights and their names are the same, whichever lookup a device uses."""
    ids, positions = sequences()
    ids, results = ids.scatter(1, positions, MASK), []
    for apart in (False, True):
        monkeypatch.setattr(architecture, "adds_atomically", lambda weight, apart=apart: apart)
        torch.manual_seed(0)
        model = MaskedLM(replace(SMALL, **changed)).eval()
        model(ids, positions).square().sum().backward()
        results.append({name: weight.grad for name, weight in model.named_parameters()})
    assert "encoder.embedding.weight" in model.state_dict()
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        assert torch.allclose(results[0][name], results[1][name], rtol=1e-4, atol=1e-4), name


def test_an_embedding_may_be_replaced(monkeypatch):
    """Fine-tuning uses a smaller plain embedding, in which MASK is another token's row or none."""
    monkeypatch.setattr(architecture, "adds_atomically", lambda weight: True)
    encoder, ids = Encoder(SMALL).eval(), sequences()[0]
    used, renumbered = ids.unique(return_inverse=True)
    expected = encoder(ids)
    part = encoder.embedding.weight.detach()[used]
    encoder.embedding = torch.nn.Embedding.from_pretrained(part, freeze=False)
    assert torch.equal(encoder(renumbered), expected)


def test_the_masks_row_is_kept_apart_in_compiled_code_for_gpus_only():
    assert not architecture.adds_atomically(torch.zeros(1))
