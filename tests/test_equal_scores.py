"""Plain fine-tuning beside ours: what makes it plain, and what is kept of both."""

import json

import numpy as np
import pytest
import torch
from equal_scores import fine_tuner, main
from tokenizers import Tokenizer

from cramming_nb.app.run import load_run
from cramming_nb.engine.hardware import Hardware
from cramming_nb.glue import encoder_weights, finetune_task, load_glue


def given(finished, glue):
    recipe, tokenizer = load_run(finished.folder).recipe, finished.folder / "export" / "tokenizer.json"
    weights = encoder_weights(finished.folder / "checkpoints")
    return recipe.architecture, weights, Tokenizer.from_file(str(tokenizer)), load_glue(glue)["rte"], recipe.protocol


def test_plain_is_plain(finished, glue):
    tuner = fine_tuner("plain", *given(finished, glue), seed=1)
    assert {w.dtype for w in tuner.model.parameters()} == {torch.float32}
    epochs = np.split(np.concatenate(tuner.batches), tuner.protocol.epochs)
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)  # shuffled anew


def test_scores_are_kept_and_not_made_again(finished, glue, tmp_path):
    call = [str(tmp_path / "out.json"), str(finished.folder), "--glue-dir", str(glue), "--tasks", "rte"]
    main([*call, "--seeds", "1", "--jobs", "1"])
    first = json.loads((tmp_path / "out.json").read_text())["scores"]
    assert [(f["how"], f["seed"]) for f in first] == [("ours", 0), ("plain", 0)]
    assert first[0]["score"] == finetune_task(*given(finished, glue), 0, Hardware.detect())["scores"]["rte"]
    main([*call, "--seeds", "2", "--jobs", "1"])
    both = json.loads((tmp_path / "out.json").read_text())["scores"]
    assert both[:2] == first and [f["seed"] for f in both] == [0, 0, 1, 1]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out.json"), str(finished.home), "--glue-dir", str(glue)])
