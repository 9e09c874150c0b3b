"""The configuration class of the model type `cramming_nb` in `transformers` (the export page)."""

from dataclasses import asdict
from transformers import PreTrainedConfig
from ..architecture import Architecture

class CrammingConfig(PreTrainedConfig):
    "The fields of an `Architecture`, and the attributes that `transformers` reads from any model."
    model_type = "cramming_nb"

    def __init__(self, architecture: dict | None = None, **other):
        self.architecture = asdict(Architecture(**architecture or {}))
        defaults = dict(pad_token_id=0, tie_word_embeddings=False)
        super().__init__(**defaults | other)

    @property
    def vocab_size(self) -> int:
        return self.architecture["vocab_size"]

    @property
    def hidden_size(self) -> int:
        return self.architecture["hidden_size"]

    @property
    def num_hidden_layers(self) -> int:
        return self.architecture["num_layers"]

    @property
    def num_attention_heads(self) -> int:
        return self.architecture["num_heads"]

    @property
    def max_position_embeddings(self) -> int:
        return self.architecture["max_length"]

    @property
    def initializer_range(self) -> float:
        return self.architecture["init_std"]
