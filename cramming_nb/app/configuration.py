"""The configuration class of the model type `cramming_nb` in `transformers` (the export page)."""

from dataclasses import asdict
from transformers import PretrainedConfig
from ..architecture import Architecture
from .export import SCHEMA, read_architecture

def of_architecture(field: str) -> property:
    "An attribute of a configuration that is a field of its architecture."
    return property(lambda config: config.architecture[field],
                    lambda config, value: config.architecture.update({field: value}))

class CrammingConfig(PretrainedConfig):
    "The fields of an `Architecture`, and the attributes that `transformers` reads from any model."
    model_type = "cramming_nb"
    vocab_size = of_architecture("vocab_size")
    hidden_size = of_architecture("hidden_size")
    num_hidden_layers = of_architecture("num_layers")
    num_attention_heads = of_architecture("num_heads")
    max_position_embeddings = of_architecture("max_length")
    initializer_range = of_architecture("init_std")

    def __init__(self, architecture: dict | None = None, schema: int | None = None, **other):
        arch = Architecture()
        if architecture is not None:
            arch = read_architecture(dict(architecture=architecture, schema=schema))
        self.architecture, self.schema = asdict(arch), SCHEMA
        defaults = dict(pad_token_id=0, tie_word_embeddings=False)
        super().__init__(**defaults | other)
