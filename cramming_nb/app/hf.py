"""Makes exported models known to the `Auto` classes of `transformers` (the export page).

    import cramming_nb.app.hf
    from transformers import AutoModelForMaskedLM
    model = AutoModelForMaskedLM.from_pretrained("runs/first/export")
"""

try:
    import transformers
except ImportError as error:
    message = "cramming_nb.app.hf needs transformers: pip install 'cramming_nb[hf]'"
    raise ImportError(message) from error

from .configuration import CrammingConfig
from .modeling import (
    CrammingForMaskedLM,
    CrammingForQuestionAnswering,
    CrammingForSequenceClassification,
    CrammingForTokenClassification,
    CrammingModel,
)

MODELS = {  # Auto class of transformers -> our class that it builds
    transformers.AutoModel: CrammingModel,
    transformers.AutoModelForMaskedLM: CrammingForMaskedLM,
    transformers.AutoModelForSequenceClassification: CrammingForSequenceClassification,
    transformers.AutoModelForTokenClassification: CrammingForTokenClassification,
    transformers.AutoModelForQuestionAnswering: CrammingForQuestionAnswering,
}

transformers.AutoConfig.register(CrammingConfig.model_type, CrammingConfig, exist_ok=True)
for auto_class, model_class in MODELS.items():
    auto_class.register(CrammingConfig, model_class, exist_ok=True)
