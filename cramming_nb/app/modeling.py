"""The models of chapter 5 as model classes of `transformers` (the export page)."""

from collections.abc import Callable
from functools import partial
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint
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

def is_recorded() -> bool:
    "Whether the model is compiled, exported or traced, so that nothing may depend on values."
    return torch.compiler.is_compiling() or torch.jit.is_tracing()

def token_mask(attention_mask: Tensor | None) -> Tensor | None:
    """True at tokens and False at padding, bool [B, S].

    None where nothing is padded, since attention is fastest without a mask.
    """
    if attention_mask is None:
        return None
    return attention_mask.bool() if is_recorded() or not attention_mask.all() else None

class EncoderAlone(nn.Module):
    "Hidden states [B, S, H] of an encoder, under the name that it has in models with a head."
    def __init__(self, encoder: Encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.encoder(ids, attention_mask=attention_mask)

class CrammingModel(PreTrainedModel):
    """The encoder without a head: one vector for each token. The classes with heads extend it.

    Each `forward` also takes what `compute` explains.
    """
    config_class = CrammingConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = False  # of the Trainer
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # PyTorch's fused attention

    def __init__(self, config: CrammingConfig):
        super().__init__(config)
        arch = Architecture(**config.architecture)
        kernel = "explicit" if config._attn_implementation == "eager" else "sdpa"
        self.model = self.build(arch, kernel)
        self.post_init()

    def build(self, arch: Architecture, kernel: str) -> nn.Module:
        "The module of chapter 5 that this class wraps; its encoder is always named `encoder`."
        return EncoderAlone(Encoder(arch, kernel))

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

    def _set_gradient_checkpointing(
            self,
            enable: bool = True,
            gradient_checkpointing_func: Callable = checkpoint,  # calls a block with its inputs
            every_n_layers: int = 1):
        "Let each n-th block compute again, in the backward pass, what it would else remember."
        for number, block in enumerate(self.model.encoder.blocks):
            forward = type(block).forward.__get__(block)
            block.gradient_checkpointing = enable and number % every_n_layers == 0
            if block.gradient_checkpointing:
                forward = partial(gradient_checkpointing_func, forward)
            block.forward = forward

    def get_input_embeddings(self) -> nn.Module:
        "The table with a vector for each token of the vocabulary."
        return self.model.encoder.embedding

    def set_input_embeddings(self, value: nn.Module):
        self.model.encoder.embedding = value

    def compute(
            self,
            input_ids: Tensor | None,             # token ids, int64 [B, S]
            attention_mask: Tensor | None,        # 1 at tokens, 0 at padding [B, S]
            inputs_embeds: Tensor | None = None,  # in the place of token ids [B, S, E]
            position_ids: Tensor | None = None,   # checked: each row is 0, 1, ... [B, S]
            output_hidden_states: bool | None = None,
            output_attentions: bool | None = None,  # refused
            **others: object,  # that other models take: None or False
            ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """What the wrapped module gives, and hidden states [B, S, H] if they are asked for.

        The states are those before each block, and those that the encoder gives.
        """
        for name, value in others.items():
            if value is not None and value is not False:
                raise TypeError(f"this model has no input {name}; leave it out")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hooks, states, encoder = [], [], self.model.encoder
        if inputs_embeds is not None:
            input_ids = inputs_embeds.new_zeros(inputs_embeds.shape[:2], dtype=torch.int64)
            hooks.append(encoder.embedding.register_forward_hook(lambda *_: inputs_embeds))
        self.check_inputs(input_ids, position_ids, output_attentions)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_hidden_states:
            for block in encoder.blocks:
                hooks.append(block.register_forward_pre_hook(lambda _, x: states.append(x[0])))
            hooks.append(encoder.register_forward_hook(lambda *call: states.append(call[-1])))
        try:
            output = self.model(input_ids, attention_mask=token_mask(attention_mask))
        finally:
            for hook in hooks:
                hook.remove()
        return output, tuple(states) or None

    def check_inputs(
            self,
            input_ids: Tensor,             # [B, S]
            position_ids: Tensor | None,   # [B, S]
            output_attentions: bool | None):
        "Say in one line what these models cannot do."
        if is_recorded():
            return
        length, most = input_ids.shape[1], self.config.max_position_embeddings
        if length > most:
            raise ValueError(f"the text has {length} tokens, and this model reads {most}; cut it "
                             "with tokenizer(text, truncation=True)")
        in_order = torch.arange(length, device=input_ids.device)
        if position_ids is not None and (position_ids != in_order).any():
            raise ValueError("this model counts positions from the first token of each row; leave "
                             "position_ids out")
        if output_attentions or self.config.output_attentions:
            raise ValueError("this model does not keep the weights of its attention; leave "
                             "output_attentions out")

    @can_return_tuple
    def forward(
            self,
            input_ids: Tensor | None = None,        # token ids, int64 [B, S]
            attention_mask: Tensor | None = None,   # 1 at tokens, 0 at padding [B, S]
            token_type_ids: Tensor | None = None,   # ignored: our models have no token types
            **usual: object) -> BaseModelOutput:
        hidden, states = self.compute(input_ids, attention_mask, **usual)
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=states)

class CrammingModelWithLogits(CrammingModel):
    "What the three heads below share: logits, and a loss if labels are given."
    output_class: type[ModelOutput]  # what `forward` returns

    @can_return_tuple
    def forward(
            self,
            input_ids: Tensor | None = None,        # token ids, int64 [B, S]
            attention_mask: Tensor | None = None,   # 1 at tokens, 0 at padding [B, S]
            token_type_ids: Tensor | None = None,   # ignored: our models have no token types
            labels: Tensor | None = None,           # of texts [B] or tokens [B, S]; -100 is ignored
            **usual: object) -> ModelOutput:
        logits, states = self.compute(input_ids, attention_mask, **usual)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                pooled_logits=logits,  # the name that the loss of sequence classification expects
                labels=labels,
                vocab_size=logits.shape[-1],
                config=self.config)
        return self.output_class(loss=loss, logits=logits, hidden_states=states)

class CrammingForMaskedLM(CrammingModelWithLogits):
    "Logits over the vocabulary for each token."
    output_class = MaskedLMOutput

    def build(self, arch: Architecture, kernel: str) -> nn.Module:
        return MaskedLM(arch, kernel)

    def resize_token_embeddings(self, *sizes: int | None, **options: object) -> nn.Module:
        "As in `transformers`; the output has a row for each token, too, zeros for new ones."
        embedding = super().resize_token_embeddings(*sizes, **options)
        for name in ("bias", "decoder"):
            old = getattr(self.model, name)
            if old is not None:
                new = old.new_zeros(len(embedding.weight), *old.shape[1:])
                kept = min(len(old), len(new))
                new[:kept] = old.detach()[:kept]
                setattr(self.model, name, nn.Parameter(new))
        return embedding

class CrammingForSequenceClassification(CrammingModelWithLogits):
    "Logits over the labels for each text; a single label is a regression."
    output_class = SequenceClassifierOutput

    def build(self, arch: Architecture, kernel: str) -> nn.Module:
        return SequenceClassifier(Encoder(arch, kernel), self.config.num_labels)

class CrammingForTokenClassification(CrammingModelWithLogits):
    "Logits over the labels for each token."
    output_class = TokenClassifierOutput

    def build(self, arch: Architecture, kernel: str) -> nn.Module:
        return TokenClassifier(Encoder(arch, kernel), self.config.num_labels)

class CrammingForQuestionAnswering(CrammingModel):
    "Logits over the tokens for the first and for the last token of an answer."
    def build(self, arch: Architecture, kernel: str) -> nn.Module:
        return QuestionAnswerer(Encoder(arch, kernel))

    @can_return_tuple
    def forward(
            self,
            input_ids: Tensor | None = None,        # token ids, int64 [B, S]
            attention_mask: Tensor | None = None,   # 1 at tokens, 0 at padding [B, S]
            token_type_ids: Tensor | None = None,   # ignored: our models have no token types
            start_positions: Tensor | None = None,  # first token of each answer [B]
            end_positions: Tensor | None = None,    # last token of each answer [B]
            **usual: object) -> QuestionAnsweringModelOutput:
        logits, states = self.compute(input_ids, attention_mask, **usual)  # [B, 2, S]
        start_logits, end_logits = logits.unbind(1)
        loss = None
        if start_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        return QuestionAnsweringModelOutput(loss, start_logits, end_logits, states)
