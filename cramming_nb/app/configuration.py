"""The configuration class of the model type `cramming_nb` in `transformers` (the export page)."""

from dataclasses import asdict
from transformers import PretrainedConfig
from ..architecture import Architecture
from .export import SCHEMA, read_architecture

class CrammingConfig(PretrainedConfig):
    "The fields of an `Architecture`, and the attributes that `transformers` reads from any model."
    model_type = "cramming_nb"

    def __init__(self, architecture: dict | None = None, schema: int | None = None, **other):
        arch = Architecture()
        if architecture is not None:
            arch = read_architecture(dict(architecture=architecture, schema=schema))
        self.architecture, self.schema = asdict(arch), SCHEMA
        defaults = dict(pad_token_id=0, tie_word_embeddings=False)
        super().__init__(**defaults | other)

    @property
    def vocab_size(self) -> int:
        return self.architecture["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, value: int):
        self.architecture["vocab_size"] = value

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
