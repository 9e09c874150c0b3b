"""The models of chapter 5 as model classes of `transformers` (the export page)."""

import torch
import torch.nn as nn
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    ModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple
from ..architecture import (
    Architecture,
    Encoder,
    MaskedLM,
    QuestionAnswerer,
    SequenceClassifier,
    TokenClassifier,
)
from .configuration import CrammingConfig

class CrammingModel(PreTrainedModel):
    "The encoder without a head: one vector for each token. The classes with heads extend it."
    config_class = CrammingConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_sdpa = True  # PyTorch's fused attention
    head_reads_mask = False  # whether the head needs a mask even where nothing is padded

    def __init__(self, config: CrammingConfig):
        super().__init__(config)
        arch = Architecture(**config.architecture)
        kernel = "explicit" if config._attn_implementation == "eager" else "sdpa"
        self.model = self.build(arch, kernel)
        self.post_init()

    def build(self, arch: Architecture, kernel: str) -> nn.Module:
        "The module of chapter 5 that this class wraps; its encoder is always named `encoder`."
        return nn.ModuleDict({"encoder": Encoder(arch, kernel)})

    def init_weights(self):
        "Nothing to do: the modules of chapter 5 initialise their weights when they are built."

    def _init_weights(self, module: nn.Module):
        """Initialise what a loaded file has no values for: a new head, and tables of positions.

        `from_pretrained` first builds the model without memory for its values. A table is never
        saved, so it is computed by a new module of the same class, and copied.
        """
        super()._init_weights(module)
        arch = Architecture(**self.config.architecture)
        for name in module._non_persistent_buffers_set:
            new_module = type(module)(arch)
            table = getattr(module, name)
            table.copy_(getattr(new_module, name))

    def get_input_embeddings(self) -> nn.Module:
        "The table with a vector for each token of the vocabulary."
        return self.model.get_submodule("encoder.embedding")

    def token_mask(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """True at tokens and False at padding, bool [B, S].

        None where nothing is padded, since attention is fastest without a mask.
        """
        if attention_mask is None:
            return torch.ones_like(input_ids, dtype=torch.bool) if self.head_reads_mask else None
        is_fixed = self.head_reads_mask or torch.compiler.is_compiling()
        return attention_mask.bool() if is_fixed or not attention_mask.all() else None

    @can_return_tuple
    def forward(
            self,
            input_ids: Tensor,                      # token ids, int64 [B, S]
            attention_mask: Tensor | None = None,   # 1 at tokens, 0 at padding [B, S]
            token_type_ids: Tensor | None = None,   # ignored: our models have no token types
            ) -> BaseModelOutput:
        mask = self.token_mask(input_ids, attention_mask)
        hidden = self.model["encoder"](input_ids, attention_mask=mask)
        return BaseModelOutput(last_hidden_state=hidden)

class CrammingModelWithLogits(CrammingModel):
    "What the three heads below share: logits, and a loss if labels are given."
    output_class: type[ModelOutput]  # what `forward` returns

    @can_return_tuple
    def forward(
            self,
            input_ids: Tensor,                      # token ids, int64 [B, S]
            attention_mask: Tensor | None = None,   # 1 at tokens, 0 at padding [B, S]
            token_type_ids: Tensor | None = None,   # ignored: our models have no token types
            labels: Tensor | None = None,           # of texts [B] or tokens [B, S]; -100 is ignored
            ) -> ModelOutput:
        mask = self.token_mask(input_ids, attention_mask)
        logits = self.model(input_ids, attention_mask=mask)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                pooled_logits=logits,  # the name that the loss of sequence classification expects
                labels=labels,
                vocab_size=logits.shape[-1],
                config=self.config)
        return self.output_class(loss=loss, logits=logits)

class CrammingForMaskedLM(CrammingModelWithLogits):
    "Logits over the vocabulary for each token."
    output_class = MaskedLMOutput

    def build(self, arch: Architecture, kernel: str) -> nn.Module:
        return MaskedLM(arch, kernel)

class CrammingForSequenceClassification(CrammingModelWithLogits):
    "Logits over the labels for each text; a single label is a regression."
    output_class = SequenceClassifierOutput
    head_reads_mask = True  # for the mean over tokens

    def build(self, arch: Architecture, kernel: str) -> nn.Module:
        return SequenceClassifier(Encoder(arch, kernel), self.config.num_labels)

class CrammingForTokenClassification(CrammingModelWithLogits):
    "Logits over the labels for each token."
    output_class = TokenClassifierOutput

    def build(self, arch: Architecture, kernel: str) -> nn.Module:
        return TokenClassifier(Encoder(arch, kernel), self.config.num_labels)

class CrammingForQuestionAnswering(CrammingModel):
    "Logits over the tokens for the first and for the last token of an answer."
    head_reads_mask = True  # an answer does not begin in padding

    def build(self, arch: Architecture, kernel: str) -> nn.Module:
        return QuestionAnswerer(Encoder(arch, kernel))

    @can_return_tuple
    def forward(
            self,
            input_ids: Tensor,                      # token ids, int64 [B, S]
            attention_mask: Tensor | None = None,   # 1 at tokens, 0 at padding [B, S]
            token_type_ids: Tensor | None = None,   # ignored: our models have no token types
            start_positions: Tensor | None = None,  # first token of each answer [B]
            end_positions: Tensor | None = None,    # last token of each answer [B]
            ) -> QuestionAnsweringModelOutput:
        logits = self.model(input_ids, self.token_mask(input_ids, attention_mask))  # [B, 2, S]
        start_logits, end_logits = logits.unbind(1)
        loss = None
        if start_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        return QuestionAnsweringModelOutput(loss, start_logits, end_logits)
