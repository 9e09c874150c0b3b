"""What the bench compares with: the paper's code as we read it, and two models of `transformers`.

The paper's code draws masks by sorting random numbers on the host. It computes in float32 on a CPU
and in float16 with loss scaling on a GPU, and spells attention out. Its last block computes all
positions, two checks of the loss wait for the result, and its AdamW leaves the kernel to torch.

The BERT and the ModernBERT of `transformers` have our shape, our number format by autocast, the
attention kernel that is fast on the device, a fused AdamW and no dropout. They are spared random
words and the clipping of gradients. BERT predicts at all positions and has no gates: its inner
width is the mean of our two, so its layers have as many weights as ours.
"""
import itertools, tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
import numpy as np
import torch
import torch.nn.functional as F
from ..architecture import Architecture, MaskedLM, ffn_widths
from ..engine.hardware import Hardware
from ..tokenizer import SEP, paper_normalizer, wordpiece

def random_ids(arch: Architecture, rows: int) -> np.ndarray:
    "Token ids to step on, int64 [rows, max_length]."
    return np.random.default_rng(0).integers(5, arch.vocab_size, (rows, arch.max_length))

def reference_masks(ids: torch.Tensor, vocab_size: int, rng: np.random.Generator) -> tuple:
    "Masked ids [B, S], positions [B, k] and labels [B, k], drawn on the host by sorting."
    rows, length = ids.shape
    k = length // 4
    order = rng.integers(0, length, (rows, length)).argsort(1)
    positions = torch.from_numpy(order[:, :k].copy())
    random_words = torch.from_numpy(rng.integers(0, vocab_size, (rows, k)))
    hidden, swapped = round(0.8 * k), round(0.9 * k)
    masked = ids.scatter(1, positions[:, :hidden], 4)
    masked = masked.scatter(1, positions[:, hidden:swapped], random_words)
    return masked, positions, ids.gather(1, positions)

def reference_step(arch: Architecture, rows: int, hardware: Hardware,
                   compiled: bool = True) -> Callable[[], None]:
    "One step as the paper's code takes it on this device."
    model = MaskedLM(replace(arch, sparse_prediction=False), "explicit").to(hardware.kind)
    model.eval()  # no dropout
    forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, (0.9, 0.98), 1e-12, 0.01)
    mixed_precision = hardware.kind != "cpu"  # as that code: float32 on a CPU
    scaler = torch.amp.GradScaler(enabled=mixed_precision)
    rng, ids = np.random.default_rng(0), torch.from_numpy(random_ids(arch, rows))
    def step():
        batch = reference_masks(ids, arch.vocab_size, rng)
        masked, positions, labels = (t.to(hardware.kind) for t in batch)
        with torch.autocast(hardware.kind, torch.float16, enabled=mixed_precision):
            logits = forward(masked, positions)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if not loss.isfinite():
            raise FloatingPointError(loss)
        scaler.scale(loss).backward()
        if not loss.isfinite():
            raise FloatingPointError(loss)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return step

def transformers_step(model: torch.nn.Module, loss_of: Callable, arch: Architecture, rows: int,
                      hardware: Hardware, compiled: bool) -> Callable[[], None]:
    "One step of a model of `transformers`; loss_of(model, masked, positions, labels) is compiled."
    model = model.to(hardware.kind).train()
    forward = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    ids = torch.from_numpy(random_ids(arch, rows)).to(hardware.kind)
    low_precision = hardware.dtype != torch.float32
    def step():
        order = torch.rand(ids.shape, device=ids.device).argsort(1)
        positions = order[:, :arch.max_length // 4]
        masked, labels = ids.scatter(1, positions, 4), ids.gather(1, positions)
        with torch.autocast(hardware.kind, hardware.dtype, enabled=low_precision):
            loss = forward(model, masked, positions, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

def shape_of(arch: Architecture, hardware: Hardware) -> dict:
    "The arguments that a BERT and a ModernBERT of `transformers` have in common."
    return dict(
        vocab_size=arch.vocab_size, hidden_size=arch.hidden_size,
        num_hidden_layers=arch.num_layers, num_attention_heads=arch.num_heads,
        max_position_embeddings=arch.max_length,
        attn_implementation="eager" if hardware.attention == "explicit" else "sdpa")

def bert_step(arch: Architecture, rows: int, hardware: Hardware,
              compiled: bool = True) -> Callable[[], None]:
    "One step of the BERT of `transformers`, which predicts at all positions."
    from transformers import BertConfig, BertForMaskedLM
    config = BertConfig(
        intermediate_size=sum(ffn_widths(arch)) // 2, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0, **shape_of(arch, hardware))
    def loss_of(model, masked, positions, labels):
        everywhere = torch.full_like(masked, -100).scatter(1, positions, labels)
        return model(input_ids=masked, labels=everywhere).loss
    return transformers_step(BertForMaskedLM(config), loss_of, arch, rows, hardware, compiled)

def modernbert_step(arch: Architecture, rows: int, hardware: Hardware,
                    compiled: bool = True) -> Callable[[], None]:
    "One step of the ModernBERT of `transformers`, its head at the masked positions only."
    from transformers import ModernBertConfig, ModernBertForMaskedLM
    config = ModernBertConfig(
        intermediate_size=ffn_widths(arch)[1], layer_types=["full_attention"] * arch.num_layers,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        **shape_of(arch, hardware))
    def loss_of(model, masked, positions, labels):
        hidden = model.model(input_ids=masked).last_hidden_state
        index = positions[:, :, None].expand(-1, -1, hidden.shape[2])
        logits = model.decoder(model.head(hidden.gather(1, index)))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    model = ModernBertForMaskedLM(config)
    return transformers_step(model, loss_of, arch, rows, hardware, compiled)

STEPS = {"reference": reference_step, "transformers": bert_step, "modernbert": modernbert_step}

def reference_rows(text: Path, vocab_size: int, processes: int,
                   length: int = 128) -> Callable[[], None]:
    "Sequences as the paper's code makes them: trained, filtered, tokenized, packed and ordered."
    import datasets
    datasets.disable_progress_bars()
    maps = dict(batched=True, batch_size=1024, num_proc=processes)
    tokenizer, trainer = wordpiece(vocab_size)
    tokenizer.normalizer = paper_normalizer()
    def tokens(batch: dict) -> list[list[int]]:
        return [e.ids + [SEP] for e in tokenizer.encode_batch(batch["text"])]
    def compresses_well(batch: dict) -> list[bool]:
        return [len(ids) < 0.3 * len(t) for ids, t in zip(tokens(batch), batch["text"])]
    def tokenize(batch: dict) -> dict:
        return dict(input_ids=tokens(batch))
    def pack(batch: dict) -> dict:
        ids = list(itertools.chain(*batch["input_ids"]))
        starts = range(0, len(ids) // length * length, length)
        return dict(input_ids=[ids[i:i + length] for i in starts])
    def count_stops(batch: dict) -> dict:
        stop = tokenizer.token_to_id(".")
        return dict(stops=[row.count(stop) for row in batch["input_ids"]])
    def work():
        with tempfile.TemporaryDirectory(dir=text.parent) as folder:
            data = datasets.load_dataset(
                "json", data_files=str(text), split="train", cache_dir=folder).shuffle(seed=89)
            tokenizer.train_from_iterator((batch["text"] for batch in data.iter(4096)), trainer)
            data = data.filter(compresses_well, **maps)
            data = data.map(tokenize, remove_columns=["text"], **maps).map(pack, **maps)
            counted = data.map(count_stops, remove_columns=data.column_names, **maps)
            stops = list(counted["stops"])
            order = sorted(range(len(data)), key=stops.__getitem__, reverse=True)
            data.select(order).flatten_indices().save_to_disk(f"{folder}/rows")
    return work
