"""Steps of optimizers compared with steps by hand; gradients in one buffer; states in a file."""

import math

import pytest
import torch
from torch import nn

from cramming_nb.architecture import Architecture, MaskedLM
from cramming_nb.engine.checkpoint import load_checkpoint, save_checkpoint
from cramming_nb.engine.hardware import Device
from cramming_nb.optimizer import (
    AVERAGES,
    OPTIMIZERS,
    Muon,
    Optimizer,
    OptimizerConfig,
    evaluation_weights,
    flat_buffer,
)

LR, DECAY = 0.01, 0.1


class Small(nn.Module):
    """A matrix that decays, a bias and a norm that do not, and a matrix inside a block."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 7, bias=False)])
        self.norm = nn.LayerNorm(7)

    def forward(self, x):
        return self.norm(self.blocks[0](self.up(x)))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Small()

    def forward(self, x):
        return self.encoder(x)


def build(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return Nested().to(dtype)


def learn(model, optimizer, steps, micro_batches=2):
    for step in steps:
        for part in range(micro_batches):
            generator = torch.Generator().manual_seed(10 * step + part)
            x = torch.randn(4, 3, generator=generator).to(next(model.parameters()).dtype)
            optimizer.backward((model(x) ** 2)[:, :3].sum())
            optimizer.accumulate()
        optimizer.step(LR, 1 / (4 * micro_batches))


def has_state(optimizer) -> bool:
    """Whether torch's optimizers keep something already, as they do after the first step."""
    return any(kept for inner in optimizer.optimizers for kept in inner.state.values())


def copied(optimizer) -> dict[str, torch.Tensor]:
    """All that it would save, as it is now."""
    return {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}


def same_bits(ours, theirs) -> bool:
    return set(ours) == set(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


def by_hand(kind, w, gradients, decay, betas, eps):
    """The weights after steps of Adam, written as the equations are."""
    m = v = torch.zeros_like(w)
    for n, g in enumerate(gradients, 1):
        if kind == "adam_l2":
            g = g + decay * w
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        corrections = (1, 1) if kind == "bert_adam" else (1 - betas[0] ** n, 1 - betas[1] ** n)
        update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + eps)
        w = w - LR * (update + (0 if kind == "adam_l2" else decay) * w)
    return w


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["adamw", "bert_adam", "adam_l2"])
def test_steps_are_those_of_the_equations(kind, clip):
    betas, eps = (0.9, 0.999), 1e-6
    model = build()
    optimizer = Optimizer(model, OptimizerConfig(kind, LR, betas, eps, DECAY, clip))
    start = {name: w.detach().clone() for name, w in optimizer.named.items()}
    decays = {"encoder.up.weight", "encoder.blocks.0.weight"}
    gradients = {name: [] for name in start}
    for step in range(8):
        torch.manual_seed(step)
        found = {name: torch.randn_like(w) for name, w in start.items()}
        norm = math.sqrt(sum((g**2).sum().item() for g in found.values()))
        assert norm > 1
        for name, w in model.named_parameters():
            w.grad = found[name].clone()
            gradients[name].append(found[name] * (clip / norm if clip else 1))
        optimizer.accumulate()
        assert optimizer.step(LR).item() == pytest.approx(norm, rel=1e-5)
    for name, w in optimizer.named.items():
        decay = DECAY if name in decays else 0.0
        expected = by_hand(kind, start[name], gradients[name], decay, betas, eps)
        assert torch.allclose(w, expected, rtol=1e-4, atol=1e-6), name


CONFIGS = {
    f"{name}, {average}": OptimizerConfig(name, average=average, average_steps=3)
    for name in OPTIMIZERS
    for average in AVERAGES
}
CONFIGS["cautious"] = OptimizerConfig(cautious=True, weight_decay=0.1)


def overflow(optimizer, value=math.inf):
    """A step whose gradient is not finite."""
    optimizer.flat_grads.fill_(1.0)
    optimizer.grads[-1][0] = value
    return optimizer.step(LR, 1.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_that_overflows_leaves_everything_as_it_was(name):
    """Weights, means, counts of steps and averages."""
    model, twin = build(), build()
    optimizer, undisturbed = Optimizer(model, CONFIGS[name]), Optimizer(twin, CONFIGS[name])
    assert not overflow(optimizer).isfinite()  # the very first step
    for steps in (range(3), range(3, 6)):
        learn(model, optimizer, steps)
        learn(twin, undisturbed, steps)
        before, shown = copied(optimizer), [w.clone() for w in optimizer.weights]
        for value in (math.inf, math.nan):
            assert not overflow(optimizer, value).isfinite() and not optimizer.has_gradients
        after = copied(optimizer)
        assert after.pop("skipped") == before.pop("skipped") + 2
        assert same_bits(before, after)
        assert all(torch.equal(a, b) for a, b in zip(shown, optimizer.weights, strict=True))
    found, expected = copied(optimizer), copied(undisturbed)
    assert (found.pop("skipped"), expected.pop("skipped")) == (5, 0)
    assert same_bits(found, expected)


@pytest.mark.parametrize("name", ["adamw", "adam_l2"])
def test_fused_optimizers_skip_on_the_device(name, monkeypatch):
    """Nobody asks whether the norm was finite, since a GPU would have to be waited for."""
    model = build()
    optimizer = Optimizer(model, OptimizerConfig(name))
    learn(model, optimizer, range(2))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: pytest.fail("a flag was read"))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a number was read"))
    overflow(optimizer)
    monkeypatch.undo()
    assert optimizer.skipped == 1 and all(w.isfinite().all() for w in optimizer.masters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_views_of_one_buffer(dtype):
    model = build(dtype=dtype)
    optimizer = Optimizer(model, OptimizerConfig())
    flat, storage = optimizer.flat_grads, optimizer.flat_grads.untyped_storage().data_ptr()
    learn(model, optimizer, range(2))
    generator = torch.Generator().manual_seed(9)
    optimizer.backward(model(torch.randn(4, 3, generator=generator).to(dtype)).square().sum())
    asked = [w.grad.float() for w in optimizer.weights]
    optimizer.accumulate()
    assert optimizer.flat_grads is flat
    for master, grad, expected in zip(optimizer.masters, optimizer.grads, asked, strict=True):
        assert master.grad is grad and grad.untyped_storage().data_ptr() == storage
        assert torch.equal(grad, expected)
    assert flat.sum().item() == pytest.approx(sum(g.sum().item() for g in asked), abs=1e-4)
    flat.zero_()
    assert not any(g.any() for g in optimizer.grads)


def test_views_are_aligned_and_do_not_overlap():
    tensors = [torch.zeros(n) for n in (1, 15, 16, 17, 33)]
    flat, views = flat_buffer(tensors)
    for number, view in enumerate(views, 1):
        view += number
        assert (view.data_ptr() - flat.data_ptr()) % 64 == 0
    assert [view.unique().tolist() for view in views] == [[1], [2], [3], [4], [5]]
    assert flat.sum() == sum(number * t.numel() for number, t in enumerate(tensors, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_state_goes_through_a_file(name, dtype, tmp_path):
    config = CONFIGS[name]
    model, other = build(dtype=dtype), build(seed=1, dtype=dtype)
    optimizer, resumed = Optimizer(model, config), Optimizer(other, config)
    assert not has_state(optimizer)
    learn(model, optimizer, range(12))
    assert has_state(optimizer) and not optimizer.has_gradients
    save_checkpoint(tmp_path, 12, optimizer.state_dict(), {})
    saved, _ = load_checkpoint(tmp_path)
    kinds = {key.removesuffix(".encoder.up.weight") for key in saved if key.endswith(".encoder.up.weight")}
    assert "master" in kinds and len(kinds) > 1  # what the optimizers keep for a weight has its name
    assert ("average" in kinds) == (config.average != "none")
    resumed.load_state_dict(saved)
    assert has_state(resumed) and same_bits(copied(optimizer), copied(resumed))
    learn(model, optimizer, range(13, 26))
    learn(other, resumed, range(13, 26))
    assert same_bits(copied(optimizer), copied(resumed))
    with optimizer.evaluation():
        found = [w.clone() for w in optimizer.weights]
    expected = evaluation_weights(resumed.state_dict())
    for name, weight in zip(optimizer.named, found, strict=True):
        assert torch.equal(weight, expected[name].to(weight.dtype))


@pytest.mark.parametrize("name", CONFIGS)
def test_loading_forgets_what_was_there(name):
    """The means of the optimizer, its average, and the gradients of a step that was not finished."""
    model = build()
    optimizer = Optimizer(model, CONFIGS[name])
    fresh = copied(optimizer)
    learn(model, optimizer, range(3))
    optimizer.backward(model(torch.ones(2, 3)).square().sum())
    optimizer.accumulate()
    assert optimizer.has_gradients
    optimizer.load_state_dict(fresh)
    assert not has_state(optimizer) and not optimizer.has_gradients
    again = build()
    other = Optimizer(again, CONFIGS[name])
    learn(model, optimizer, range(2))
    learn(again, other, range(2))
    assert same_bits(copied(optimizer), copied(other))


@pytest.mark.parametrize(
    "before, now, expected",
    [
        (torch.bfloat16, torch.float16, (2.0**16, 0)),
        (torch.float16, torch.bfloat16, (1.0, 0)),
        (torch.float16, torch.float16, (2.0**9, 7)),
    ],
)
def test_another_number_format_begins_with_its_own_loss_scale(before, now, expected):
    """A run may go on where another format is the fast one."""
    saved = Optimizer(build(dtype=before), OptimizerConfig())
    if before is torch.float16:
        saved.loss_scale.value.fill_(2.0**9)
        saved.loss_scale.finite_steps.fill_(7)
    saved.skipped.fill_(3)
    state = {name: t.clone() for name, t in saved.state_dict().items()}
    resumed = Optimizer(build(dtype=now), OptimizerConfig())
    resumed.load_state_dict(state)
    scale = resumed.loss_scale
    assert (scale.value, scale.finite_steps, resumed.skipped) == (*expected, 3)


def test_a_loss_scale_that_fell_to_one_is_kept():
    saved, resumed = (Optimizer(build(dtype=torch.float16), OptimizerConfig()) for _ in range(2))
    saved.loss_scale.value.fill_(1.0)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.loss_scale.value == 1


def muon(shape, fast, monkeypatch) -> Muon:
    """One for a single matrix of ones, on a device that is fast in a number format."""
    monkeypatch.setattr(Device, "fast_dtype", lambda self: fast)
    return Muon({"matrix": nn.Parameter(torch.ones(shape))}, lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (32, 32)], ids=str)
def test_muon_is_that_of_torch(shape, monkeypatch):
    """To the bit where it multiplies in bfloat16, as torch always does; float32 is close to it."""
    generator = torch.Generator().manual_seed(0)
    twin = nn.Parameter(torch.ones(shape))
    optimizers = [
        muon(shape, torch.bfloat16, monkeypatch),
        muon(shape, torch.float32, monkeypatch),
        torch.optim.Muon([twin], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    ours, exact, theirs = (optimizer.param_groups[0]["params"][0] for optimizer in optimizers)
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator)
        for weight, optimizer in zip((ours, exact, theirs), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
            assert weight.grad.equal(gradient)
    assert torch.equal(ours, theirs) and not torch.equal(exact, theirs)
    torch.testing.assert_close(exact, theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("fast", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_muon_multiplies_in_bfloat16_only_where_that_is_fast(fast, monkeypatch):
    expected = torch.bfloat16 if fast is torch.bfloat16 else torch.float32
    assert muon((4, 4), fast, monkeypatch).dtype is expected


@pytest.mark.parametrize(
    "activation, halves, compensation", [("gelu_glu", 2, False), ("gelu_glu", 2, True), ("gelu", 1, False)]
)
def test_muon_takes_each_matrix_of_a_block_by_itself(activation, halves, compensation):
    """A fused weight moves as its matrices would alone."""
    sizes = {"hidden_size": 24, "num_layers": 2, "num_heads": 2, "ffn_size": 48}
    arch = Architecture(64, **sizes, activation=activation, gate_compensation=compensation)
    torch.manual_seed(0)
    optimizer = Optimizer(MaskedLM(arch), OptimizerConfig("muon", clip=0.0))
    own = optimizer.optimizers[0]
    hidden = optimizer.groups["hidden"]
    kinds = {"qkv": 3, "out": 1, "up": halves, "down": 1}
    assert {name.split(".")[-2]: own.parts[weight] for name, weight in hidden.items()} == kinds
    optimizer.flat_grads.normal_()
    alone = {}
    for name, weight in hidden.items():
        pieces = []
        for part, grad in zip(weight.chunk(own.parts[weight]), weight.grad.chunk(own.parts[weight]), strict=True):
            piece = nn.Parameter(part.detach().clone())
            piece.grad = grad.clone()
            Muon({"matrix": piece}, LR, 0.01).step()
            pieces.append(piece)
        alone[name] = torch.cat([p.detach() for p in pieces])
    optimizer.step(LR)
    assert all(torch.equal(weight, alone[name]) for name, weight in hidden.items())
