"""The loss against its plain formula: values, gradients, and what it holds in float32."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cramming_nb.architecture import Architecture, MaskedLM
from cramming_nb.engine.hardware import Device
from cramming_nb.objective import (
    CrossEntropy,
    ObjectiveConfig,
    TokenScores,
    apply_weights,
    loss_with_probabilities,
    mask_rows,
    masked_loss,
)
from cramming_nb.tokenizer import SPECIAL_TOKENS

B, K, V = 3, 5, 97


def data(dtype=torch.float32, seed=0):
    """Logits of very different sizes, labels at both ends of the vocabulary, some zero weights."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, K, V, generator=generator) * torch.logspace(-2, 1.5, K)[None, :, None]
    labels = torch.randint(0, V, (B, K), generator=generator)
    labels[0, :2] = torch.tensor([0, V - 1])
    weights = (torch.rand(B, K, generator=generator) < 0.7).float()
    weights[0, :2] = 1
    return logits.to(dtype), labels, weights


def plain(logits, labels, weights, z_loss=0.0):
    """The formula in float64."""
    logits = logits.double().flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    losses = losses + z_loss * logits.logsumexp(-1) ** 2
    return (losses * weights.flatten()).sum()


def with_gradient(loss, logits, *rest, factor=1.0):
    logits = logits.clone().requires_grad_()
    value = loss(logits, *rest)
    (factor * value).backward()
    return value.item(), logits.grad


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.01, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype, rtol", TOLERANCES.items())
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [0, 1, 4, 15, 100])
def test_loss_and_gradient_are_those_of_the_formula(chunk, z_loss, dtype, rtol):
    logits, labels, weights = data(dtype)

    def in_chunks(x):
        flat = x.flatten(0, 1), labels.flatten(), weights.flatten()
        return CrossEntropy.apply(*flat, z_loss, chunk)[0]

    rest = (labels, weights, z_loss)
    expected, slope = with_gradient(plain, logits.float(), *rest, factor=0.125)
    value, gradient = with_gradient(in_chunks, logits, factor=0.125)
    assert value == pytest.approx(expected, rel=1e-5) and gradient.dtype == dtype
    torch.testing.assert_close(gradient.float(), slope, rtol=rtol, atol=1e-6)
    assert not gradient[weights == 0].any()


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_a_compiled_loss_is_the_same(z_loss):
    torch.compiler.reset()
    logits, labels, weights = data(torch.bfloat16)
    compiled = torch.compile(masked_loss, backend="aot_eager", fullgraph=True)
    expected, slope = with_gradient(masked_loss, logits, labels, weights, z_loss)
    value, gradient = with_gradient(compiled, logits, labels, weights, z_loss)
    assert value == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient, slope, rtol=0.01, atol=1e-7)


class Watch(TorchDispatchMode):
    """Records all operations, and the size of the largest float32 tensor that one of them makes."""

    def __init__(self):
        super().__init__()
        self.largest, self.operations = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations.add(function.overloadpacket)
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("positions", [1, 2, 7])
def test_float32_is_never_larger_than_a_chunk(monkeypatch, positions):
    monkeypatch.setattr(Device, "loss_chunk", positions * V)
    logits, labels, weights = data(torch.bfloat16)
    with Watch() as watch:
        with_gradient(masked_loss, logits, labels, weights)
    assert watch.largest <= max(positions * V, B * K)


def test_a_compiler_gets_no_scatter():
    """A scatter cannot be part of a loop: the whole gradient would have to exist in float32."""
    from functorch.compile import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified

    torch.compiler.reset()
    found = []

    def keep(graph, inputs):
        found.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        return aot_module_simplified(graph, inputs, fw_compiler=keep, bw_compiler=keep)

    logits, labels, weights = data(torch.bfloat16)
    with_gradient(torch.compile(masked_loss, backend=backend), logits, labels, weights)
    names = {str(target) for targets in found for target in targets}
    assert len(found) == 2 and any("exp" in name for name in names)
    assert not [name for name in names if "scatter" in name or "index_put" in name]


# Masks that adapt


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_probabilities_are_those_of_the_labels(z_loss):
    logits, labels, weights = data()
    loss, probabilities = loss_with_probabilities(logits.requires_grad_(), labels, weights, z_loss)
    expected = logits.softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(probabilities, expected.detach())
    assert loss == masked_loss(logits, labels, weights, z_loss) and not probabilities.requires_grad


def test_positions_are_chosen_in_proportion_to_their_weights():
    """Drawn one after the other without replacement, as torch.multinomial draws, here by enumeration."""
    given = torch.tensor([1.0, 0.6, 0.3, 0.1])
    first = given / given.sum()
    second = sum(first[i] * given / (given.sum() - given[i]) * (torch.arange(4) != i) for i in range(4))
    numbers = torch.randint(0, 2**32, (40_000, 4), generator=torch.Generator().manual_seed(0))
    order = apply_weights(numbers, given.expand_as(numbers)).argsort(1)
    for place, expected in enumerate((first, second)):
        found = order[:, place].bincount(minlength=4) / len(order)
        torch.testing.assert_close(found, expected, rtol=0, atol=0.012)  # five deviations


def test_weighted_numbers_stay_in_their_range():
    numbers = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    for weight in (1.0, 0.5, TokenScores.LEAST):
        found = apply_weights(numbers, torch.full((5,), weight))
        assert found.min() >= 0 and found.max() < 2**32 and (found.diff() >= 0).all()


@pytest.mark.parametrize("exact", [True, False])
def test_special_tokens_are_never_masked_whatever_the_weights(exact):
    ids = torch.randint(0, V, (50, 64), generator=torch.Generator().manual_seed(0))
    token_weights = torch.full((V,), TokenScores.LEAST)
    token_weights[: len(SPECIAL_TOKENS)] = 1
    config, numbers = ObjectiveConfig(exact=exact), torch.arange(50)
    masked, positions, labels, weights = mask_rows(ids, numbers, 0 * numbers, 0, config, V, token_weights)
    assert (labels[weights > 0] >= len(SPECIAL_TOKENS)).all()
    assert masked.scatter(1, positions, labels).equal(ids)


def test_a_token_that_is_known_is_masked_less_often():
    ids = torch.randint(len(SPECIAL_TOKENS), V, (4000, 64), generator=torch.Generator().manual_seed(0))
    scores, numbers = TokenScores(V, "cpu"), torch.arange(4000)
    known = V - 1
    for _ in range(300):
        labels = torch.full((1, 8), known)
        scores.add(labels, torch.full((1, 8), 0.75), torch.ones(1, 8))
        scores.step()
    weights = scores.token_weights()
    assert weights[known].item() == pytest.approx(0.25, abs=0.01)
    assert (weights[:known] == 1).all()
    config = ObjectiveConfig()
    counts = [
        (mask_rows(ids, numbers, 0 * numbers, 0, config, V, w)[2] == known).sum().item() for w in (None, weights)
    ]
    assert 0.23 * counts[0] < counts[1] < 0.35 * counts[0]


def test_what_is_added_up_does_not_depend_on_the_order():
    generator = torch.Generator().manual_seed(0)
    labels, given = torch.randint(0, V, (64, 5), generator=generator), torch.rand(64, 5, generator=generator)
    counted = (torch.rand(64, 5, generator=generator) < 0.7).float()
    found = []
    for order in (torch.arange(64), torch.arange(64).flip(0)):
        scores = TokenScores(V, "cpu")
        for part in order.split(7):
            scores.add(labels[part], given[part], counted[part])
        scores.step()
        found.append(scores.sums)
    assert found[0].equal(found[1]) and found[0][1].sum() == counted.sum()


def test_a_loss_that_is_not_finite_leaves_no_trace():
    scores = TokenScores(V, "cpu")
    scores.add(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[float("nan"), 0.5]]), torch.ones(1, 2))
    scores.step()
    assert scores.sums.isfinite().all() and scores.sums[0, 0] == 0.5


def test_what_is_shown_does_not_depend_on_the_weights():
    """Of the predictions of well-known tokens as many are kept, or replaced, as of others."""
    ids = torch.randint(len(SPECIAL_TOKENS), V, (4000, 64), generator=torch.Generator().manual_seed(0))
    numbers, known = torch.arange(4000), torch.arange(V) % 2 == 0
    token_weights = torch.where(known, TokenScores.LEAST, 1.0)
    masked, positions, labels, _ = mask_rows(ids, numbers, 0 * numbers, 0, ObjectiveConfig(), V, token_weights)
    kept = masked.gather(1, positions) == labels
    of_known, of_others = (kept[known[labels] == which].float().mean().item() for which in (True, False))
    assert of_known == pytest.approx(of_others, abs=0.02)
    assert kept.float().mean().item() == pytest.approx(1 / 16, abs=0.005)  # 13 of 16 masked, 2 replaced, 1 kept


BY_CHANCE = ObjectiveConfig(mlm_probability=0.15, exact=False)
SHAPES = [(ObjectiveConfig(), 8, 64), (BY_CHANCE, 8, 64), (ObjectiveConfig(0.5), 8, 64), (ObjectiveConfig(), 8, 32)]


def test_one_graph_for_each_rate_and_length_whatever_the_sequences():
    """The number of predictions is fixed by both, also where masks are drawn by chance, so nothing is compiled twice."""
    torch.compiler.reset()
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    arch = Architecture(vocab_size=V, max_length=64, hidden_size=16, num_layers=2, num_heads=2, ffn_size=16)
    compiled = torch.compile(MaskedLM(arch).eval(), backend=keep, dynamic=False, fullgraph=True)
    for turn, (config, count, length) in enumerate(SHAPES * 3):
        rows = torch.arange(count) + 8 * turn
        ids = torch.randint(5, V, (count, length), generator=torch.Generator().manual_seed(turn))
        seen, positions, *_ = mask_rows(ids, rows, torch.zeros_like(rows), turn, config, V)
        compiled(seen, positions)
    assert len(graphs) == len(SHAPES)


@pytest.mark.parametrize("config", [ObjectiveConfig(), BY_CHANCE, ObjectiveConfig(keep_random=False)])
def test_special_tokens_are_never_predicted(config):
    ids = torch.randint(0, V, (64, 32), generator=torch.Generator().manual_seed(0))
    ids[0] = 3
    rows = torch.arange(64)
    *_, labels, weights = mask_rows(ids, rows, torch.zeros_like(rows), 0, config, V)
    assert (labels[weights > 0] >= len(SPECIAL_TOKENS)).all() and not weights[0].any() and weights[1:].any()


def test_masks_by_chance_follow_the_shares():
    """Of 200,000 positions 15 %, of which 80 % are masked, 10 % another token and 10 % left."""
    ids = torch.randint(5, V, (1600, 128), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(1600)
    masked, positions, labels, weights = mask_rows(ids, rows, torch.zeros_like(rows), 0, BY_CHANCE, V)
    counted, shown = weights > 0, masked.gather(1, positions)
    assert counted.float().sum().item() / ids.numel() == pytest.approx(0.15, abs=0.003)
    assert (shown == 4)[counted].float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert (shown == labels)[counted].float().mean().item() == pytest.approx(0.1 + 0.1 / (V - 5), abs=0.01)
    assert torch.equal(masked.scatter(1, positions, labels), ids)
