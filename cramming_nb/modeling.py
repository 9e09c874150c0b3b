"""Our models as classes of `transformers`, entered into the tables of its `Auto` classes (chapter 14)."""

import torch
import torch.nn as nn
import transformers
from torch import Tensor
from transformers import modeling_outputs as outputs
from transformers.utils.generic import can_return_tuple
from .architecture import Architecture, Encoder, MaskedLM, QuestionAnswerer, SequenceClassifier, TokenClassifier
from .configuration import CrammingConfig

class CrammingModel(transformers.PreTrainedModel):
    "An encoder of ours in `transformers`; its heads are the classes below."
    config_class, base_model_prefix, main_input_name, _supports_sdpa = CrammingConfig, "model", "input_ids", True

    def __init__(self, config: CrammingConfig):
        super().__init__(config)
        self.model = self.build(Architecture(**config.architecture), "explicit" if config._attn_implementation == "eager" else "sdpa")
        self.post_init()

    def build(self, arch: Architecture, kernel: str) -> nn.Module: return nn.ModuleDict(dict(encoder=Encoder(arch, kernel)))

    def init_weights(self): pass  # our modules draw their own

    def _init_weights(self, module: nn.Module):
        "What a file has no weights for: a new head, and tables that are never saved."
        super()._init_weights(module)
        for name in module._non_persistent_buffers_set: getattr(module, name).copy_(getattr(type(module)(Architecture(**self.config.architecture)), name))

    def get_input_embeddings(self) -> nn.Module: return self.get_submodule("model.encoder.embedding")

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None):
        return outputs.BaseModelOutput(self.model["encoder"](input_ids, attention_mask=real(input_ids, attention_mask)))

def real(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    "Where rows hold text and no padding [B, S]."
    return torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()

class Labelled(CrammingModel):
    "A head that gives logits, and a loss if it is given labels; we have no token types, and refuse no tokenizer that sends some."
    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None, labels: Tensor | None = None):
        logits = self.model(input_ids, attention_mask=real(input_ids, attention_mask))
        if labels is None: return self.output(logits=logits)
        return self.output(self.loss_function(logits=logits, pooled_logits=logits, labels=labels, vocab_size=logits.shape[-1], config=self.config), logits)

class CrammingForMaskedLM(Labelled):
    "A piece of the vocabulary for each token."
    output = outputs.MaskedLMOutput
    def build(self, arch: Architecture, kernel: str) -> nn.Module: return MaskedLM(arch, kernel)

class CrammingForSequenceClassification(Labelled):
    "A class for each text, or a number."
    output = outputs.SequenceClassifierOutput
    def build(self, arch: Architecture, kernel: str) -> nn.Module: return SequenceClassifier(Encoder(arch, kernel), self.config.num_labels)

class CrammingForTokenClassification(Labelled):
    "A class for each token."
    output = outputs.TokenClassifierOutput
    def build(self, arch: Architecture, kernel: str) -> nn.Module: return TokenClassifier(Encoder(arch, kernel), self.config.num_labels)

class CrammingForQuestionAnswering(CrammingModel):
    "Where an answer begins and ends."
    def build(self, arch: Architecture, kernel: str) -> nn.Module: return QuestionAnswerer(Encoder(arch, kernel))

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None, start_positions: Tensor | None = None, end_positions: Tensor | None = None):
        begin, end = self.model(input_ids, real(input_ids, attention_mask)).unbind(1)
        loss = None if start_positions is None else self.loss_function(begin, end, start_positions, end_positions)
        return outputs.QuestionAnsweringModelOutput(loss, begin, end)

transformers.AutoModel.register(CrammingConfig, CrammingModel, exist_ok=True)
for ours in (CrammingForMaskedLM, CrammingForSequenceClassification, CrammingForTokenClassification, CrammingForQuestionAnswering):
    getattr(transformers, ours.__name__.replace("Cramming", "AutoModel")).register(CrammingConfig, ours, exist_ok=True)
