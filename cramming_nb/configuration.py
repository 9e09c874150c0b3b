"""The configuration of our model type in `transformers` (chapter 14)."""

from transformers import PreTrainedConfig

class CrammingConfig(PreTrainedConfig):
    "The switches of an architecture, and what `transformers` asks of every model."
    model_type = "cramming_nb"

    def __init__(self, architecture: dict | None = None, **other):
        from .modeling import Architecture  # puts the models into the tables; who makes a configuration is about to use them
        self.architecture = vars(Architecture(**architecture or {})).copy()
        super().__init__(**dict(pad_token_id=0, tie_word_embeddings=False) | other)

for theirs, ours in dict(vocab_size="vocab_size", hidden_size="hidden_size", num_hidden_layers="num_layers", num_attention_heads="num_heads",
                         max_position_embeddings="max_length", initializer_range="init_std").items():
    setattr(CrammingConfig, theirs, property(lambda self, ours=ours: self.architecture[ours]))
