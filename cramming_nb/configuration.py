"""The configuration of our model type in `transformers` (chapter 14)."""

from transformers import PreTrainedConfig


class CrammingConfig(PreTrainedConfig):
    "The switches of an architecture, and what `transformers` asks of every model."

    model_type = "cramming_nb"

    def __init__(self, architecture: dict | None = None, **other):
        from .modeling import all_fields  # puts the models into the tables; who makes a configuration is about to use them

        self.architecture = all_fields(architecture)
        super().__init__(**dict(pad_token_id=0, tie_word_embeddings=False) | other)

    vocab_size = property(lambda self: self.architecture["vocab_size"])
    hidden_size = property(lambda self: self.architecture["hidden_size"])
    num_hidden_layers = property(lambda self: self.architecture["num_layers"])
    num_attention_heads = property(lambda self: self.architecture["num_heads"])
    max_position_embeddings = property(lambda self: self.architecture["max_length"])
    initializer_range = property(lambda self: self.architecture["init_std"])
