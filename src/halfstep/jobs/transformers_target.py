"""Jobs from configurations of the transformers library: random weights, synthetic batches, AdamW, the model's own loss.

The head of a model, and with it the inputs and the loss, is the one that the configuration's `architectures` names. A
configuration without any gets the first head of `HEADS` that transformers has for it: BERT is masked, BART a
sequence-to-sequence model, Llama causal.

Nothing is downloaded: models are built by `from_config` while the hub client is offline, and code that comes with a
checkpoint is never run.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from halfstep.errors import MissingError, SettingError, unknown
from halfstep.jobs import transformers_inputs as inputs
from halfstep.jobs.data.loader import Loader
from halfstep.jobs.data.tokens import NamedTensors, SyntheticInputs
from halfstep.jobs.job import Job
from halfstep.jobs.transformers_config import outside_vocabulary

__all__ = ["HEADS", "import_transformers", "job_from_config"]

BATCH, IMAGE_BATCH = 8, 128
LR, DECAY, WARMUP = 3e-4, 0.1, 100


@dataclass(frozen=True)
class Head:
    """One kind of model: its auto classes with the mappings that list their models, its inputs, and its metric."""

    auto: tuple[tuple[str, str], ...]
    make_inputs: inputs.MakeInputs
    batch_size: int = BATCH
    has_accuracy: bool = False


# In the order in which a configuration without architectures is tried. The first two are unambiguous; BART's family is
# also in the mapping of masked models, and BERT's in that of causal ones.
HEADS = {
    "image-classification": Head(
        (("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),),
        inputs.classes_of_images,
        IMAGE_BATCH,
        has_accuracy=True,
    ),
    "speech": Head(
        (
            ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
            ("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING"),
        ),
        inputs.speech,
    ),
    "seq2seq": Head((("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),), inputs.seq2seq),
    "masked-lm": Head((("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),), inputs.masked),
    "causal-lm": Head((("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),), inputs.causal),
    "sequence-classification": Head(
        (("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),),
        inputs.classes_of_text,
        has_accuracy=True,
    ),
}
# Nested configurations that do not bring inputs of another kind: T5Gemma's two stacks, the layers of MPT and DBRX, ESM's
# folding head, which its language models do not have.
_PLAIN_PARTS = {"encoder", "decoder", "attn_config", "ffn_config", "esmfold_config"}
# Others are fetched from the hub when they are first used.
_LOCAL_KERNELS = {
    "_attn_implementation": (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
    "_experts_implementation": (None, "eager", "batched_mm", "grouped_mm"),
}


def import_transformers(target: str) -> Any:
    """The library, or an error with the command that installs it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MissingError(
            f"The target {target} needs transformers, which cannot be imported ({error}). "
            'Install it with: pip install "halfstep[transformers]"'
        ) from error


def job_from_config(config: Any, *, head: str | None = None, length: int | None = None, name: str | None = None) -> Job:
    """A job that trains the model of a transformers configuration from random fp32 weights on synthetic batches.

    Args:
        config: an instance of a configuration class; it is copied.
        head: a name in `HEADS`; by default the one that `config.architectures` names, or else the first that fits.
        length: tokens per example, samples for audio models, or pixels for image models whose configuration has no
            image_size; by default 1,024 tokens or as many as the model has positions.
        name: the job's name in messages.
    """
    name = f"transformers:{config.model_type}" if name is None else name
    library = import_transformers(name)
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 2):
        raise SettingError(f"length={length!r} must be an integer of at least 2.")
    config = copy.deepcopy(config)
    _reject(config)
    head, auto, model_class = _choose(library, config, head)
    _complete(config, head)
    batches = HEADS[head].make_inputs(config, length)
    missing = [each for each in batches.names if each not in inspect.signature(model_class.forward).parameters]
    if missing:
        raise SettingError(
            f"{model_class.__name__} has no input {' or '.join(map(repr, missing))}, so its loss cannot be computed from head={head}; "
            "write a job file for it."
        )

    def build() -> Any:
        with _offline():
            model: Any = getattr(library, auto).from_config(
                copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False
            )
        if head == "causal-lm" and getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # what transformers uses for such names as GPT2LMHeadModel, after a warning
        return model

    def data(
        split: str,
        batch_size: int = HEADS[head].batch_size,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> Loader:
        position = {"seed": seed, "epoch": epoch, "rank": rank, "world_size": world_size}
        return SyntheticInputs(batches.make, batches.kind, split, batch_size, device=device, **position)

    return Job(
        model=build,
        data=data,
        loss=_loss,
        optimizer=_optimizer,
        metric=_accuracy if HEADS[head].has_accuracy else None,
        scheduler=_scheduler,
        shard=_blocks(model_class),
        name=name,
    )


def _reject(config: Any) -> None:
    """Raise for configurations that would need a download, foreign code or inputs of several kinds."""
    kind = type(config).__name__
    if getattr(config, "auto_map", None):
        raise SettingError(
            f"{kind} has an auto_map, so its model is code that comes with the checkpoint, which is never run; write a job file that "
            "imports the model yourself."
        )
    if getattr(config, "quantization_config", None):
        raise SettingError(
            f"{kind} has a quantization_config; a model with random weights has nothing to quantize. Remove it."
        )
    parts = getattr(config, "sub_configs", {})
    if parts.keys() - _PLAIN_PARTS:
        alone = sorted({each.__name__ for each in parts.values()} - {"AutoConfig"})
        advice = f"train one part alone ({', '.join(alone)}), or " if alone else ""
        raise SettingError(
            f"{kind} is made of several configurations ({', '.join(parts)}), and there are no synthetic inputs for such a model; "
            f"{advice}write a job file."
        )
    for setting, known in _LOCAL_KERNELS.items():
        value = getattr(config, setting, None)
        if value not in known:
            raise SettingError(
                f"{setting[1:]}={value!r} may need a download; use one of {', '.join(str(each) for each in known if each)}."
            )


def _choose(library: Any, config: Any, head: str | None) -> tuple[str, str, Any]:
    """The head of a configuration with the auto class that builds it and the class of the model."""
    if head is not None and head not in HEADS:
        raise unknown("head", head, HEADS)
    options = [
        (each, auto, model_class)
        for each in HEADS
        for auto, mapping in HEADS[each].auto
        for model_class in _models(getattr(library, mapping), config)
    ]
    kind, available = type(config).__name__, ", ".join(dict.fromkeys(each for each, _, _ in options))
    if not options:
        raise SettingError(
            f"transformers has no model for {kind} with one of the heads {', '.join(HEADS)}; write a job file for it."
        )
    if head is not None:
        chosen = [option for option in options if option[0] == head]
        if not chosen:
            raise SettingError(f"transformers has no model for {kind} with head={head}; it has {available}.")
        return chosen[0]
    architectures = [each for each in config.architectures or () if "For" in each or "Head" in each]
    if not architectures:  # none, or the name of a model without a head
        return options[0]
    for option in options:
        if option[2].__name__ in architectures:
            return option
    raise SettingError(
        f"The architecture {architectures[0]} of {kind} is not among those with a head that can be trained here; choose one by head=NAME: "
        f"{available}."
    )


def _models(mapping: Any, config: Any) -> tuple[type, ...]:
    """The models of one head for a configuration; transformers lists one class or a few."""
    if type(config) not in mapping:
        return ()
    try:
        models = mapping[type(config)]
    except ImportError as error:
        raise MissingError(
            f"The model of {type(config).__name__} cannot be imported ({error}); install what it needs."
        ) from error
    return models if isinstance(models, tuple) else (models,)


def _complete(config: Any, head: str) -> None:
    """Change the settings that training from random weights needs to be different.

    Ids outside the vocabulary, which a smaller vocab_size leaves, become 0. Models that decode begin with the padding
    id, as T5 does, if no other id is set, and classifiers of text need a padding id to know where a text ends.
    """
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if head == "causal-lm" and getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True  # BERT's family attends in both directions otherwise
    for name in outside_vocabulary(config.to_dict()):
        setattr(config, name, 0)
    if head in {"seq2seq", "sequence-classification"} and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None)


def _blocks(model_class: Any) -> tuple[type, ...]:
    """The repeated modules of a model, by the names that transformers keeps on one device."""
    module = sys.modules[model_class.__module__]
    models = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    names = {name for each in models for name in getattr(each, "_no_split_modules", None) or ()}
    return tuple(each for each in models if each.__name__ in names)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """The hub client raises on every request, whatever the environment allows."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _loss(model: Any, batch: NamedTensors) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _accuracy(model: Any, batch: NamedTensors) -> Tensor:
    logits: Tensor = model(**batch).logits
    return (logits.argmax(-1) == batch["labels"]).float().mean()


def _optimizer(params: list[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=LR, weight_decay=DECAY)


def _scheduler(optimizer: Optimizer) -> LambdaLR:
    """Linear warm-up, then constant, because the length of the run is not known here."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
