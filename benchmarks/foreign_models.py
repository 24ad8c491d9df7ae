"""Tiny models of transformers, with random weights, for injected faults: nobody here wrote their code."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Foreign:
    """How to build one, draw a batch and compute its loss; and where things are in it."""

    build: Callable[[str], nn.Module]  # takes the attention implementation
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Any]
    entries: dict[str, str | None] = field(default_factory=dict)  # where each floating-point tensor of the batch enters
    scores: dict[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # attention module -> what makes its queries and keys
    residuals: dict[str, str] = field(default_factory=dict)  # a block -> the module whose output it adds to its input
    masks: bool = False  # takes a mask of shape (batch, 1, length, length) with -inf in it
    attentions: tuple[str, ...] = ("eager", "sdpa")


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
VOCABULARY, LENGTH = 13, 6


def _text(g: torch.Generator) -> Batch:
    ids = torch.randint(1, VOCABULARY, (3, LENGTH), generator=g)
    return {"input_ids": ids, "labels": ids}


def _embedded(g: torch.Generator) -> Batch:
    ids = torch.randint(1, VOCABULARY, (3, LENGTH), generator=g)
    return {"inputs_embeds": torch.randn(3, LENGTH, 16, generator=g), "labels": ids}


def _scored(g: torch.Generator) -> Batch:
    ids = torch.randint(1, VOCABULARY, (3, LENGTH), generator=g)
    return {"input_ids": ids, "labels": torch.rand(3, 1, generator=g)}


def _inside(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model computes."""
    return model(**batch).loss


def _two(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The model's loss, and one of its hidden states."""
    out = model(**batch, output_hidden_states=True)
    return [out.loss, 0.01 * out.hidden_states[-1].float().square().mean()]


def _outside(model: nn.Module, batch: Batch) -> Tensor:
    """A loss of the loop, from the logits, weighted per example."""
    inputs = {k: v for k, v in batch.items() if k not in {"labels", "weights"}}
    losses = F.cross_entropy(model(**inputs).logits.float(), batch["labels"], reduction="none")
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def _images(g: torch.Generator) -> Batch:
    x = torch.randn(3, 3, 16, 16, generator=g)
    return {
        "pixel_values": x,
        "labels": torch.randint(4, (3,), generator=g),
        "weights": torch.rand(3, generator=g) + 0.5,
    }


def _speech(g: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 16, generator=g), "labels": torch.randint(3, 13, (2, 5), generator=g)}


def _waves(g: torch.Generator) -> Batch:
    return {"input_values": torch.randn(2, 200, generator=g), "labels": torch.randint(1, 8, (2, 2), generator=g)}


def _special() -> dict[str, int]:
    return {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _gpt2(attention: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        n_positions=8,
        vocab_size=VOCABULARY,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._attn_implementation = attention  # noqa: SLF001 - what from_pretrained(attn_implementation=...) sets
    return GPT2LMHeadModel(config)


def _bert(attention: str) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        **SMALL, vocab_size=VOCABULARY, max_position_embeddings=8, num_labels=1, problem_type="regression"
    )
    config._attn_implementation = attention  # noqa: SLF001
    return BertForSequenceClassification(config)


def _t5(attention: str) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
    )
    config._attn_implementation = attention  # noqa: SLF001
    return T5ForConditionalGeneration(config)


def _decoder(name: str, **more: Any) -> Callable[[str], nn.Module]:
    def build(attention: str) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(
            **SMALL,
            num_key_value_heads=1,
            vocab_size=VOCABULARY,
            max_position_embeddings=16,
            use_cache=False,
            **_special(),
            **more,
        )
        config._attn_implementation = attention  # noqa: SLF001
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return build


def _vit(attention: str) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**SMALL, image_size=16, patch_size=8, num_labels=4, hidden_dropout_prob=0.1)
    config._attn_implementation = attention  # noqa: SLF001
    return ViTForImageClassification(config)


def _whisper(attention: str) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {
        f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 1), ("attention_heads", 2))
    }
    config = WhisperConfig(
        **sizes,
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=16,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=8,
        max_target_positions=8,
        decoder_start_token_id=1,
        use_cache=False,
        dropout=0.1,
        **_special(),
    )
    config._attn_implementation = attention  # noqa: SLF001
    return WhisperForConditionalGeneration(config)


def _mobilenet(_: str) -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(
        depth_multiplier=0.05, depth_divisible_by=4, min_depth=4, image_size=16, num_labels=4, tf_padding=False
    )
    return MobileNetV2ForImageClassification(config)


def _frozen_mobilenet(attention: str) -> nn.Module:
    """Batch norm in eval mode, as in fine-tuning."""
    model = _mobilenet(attention)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train = lambda *_, module=module: module  # type: ignore[method-assign, misc]
            module.training = False
    return model


def _convnext(_: str) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        patch_size=2, hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, image_size=16, num_labels=4, drop_path_rate=0.1
    )
    return ConvNextForImageClassification(config)


def _wav2vec2(attention: str) -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        **SMALL,
        vocab_size=9,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_length=2,
        mask_time_prob=0.2,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
        layerdrop=0.1,
        pad_token_id=0,
    )
    config._attn_implementation = attention  # noqa: SLF001
    return Wav2Vec2ForCTC(config)


def _layers(stem: str, attention: str, *projections: str) -> dict[str, tuple[str, ...]]:
    return {f"{stem}.{i}.{attention}": tuple(f"{stem}.{i}.{attention}.{p}" for p in projections) for i in range(2)}


def _residual(stem: str, attention: str) -> dict[str, str]:
    return {f"{stem}.{i}": f"{stem}.{i}.{attention}" for i in range(2)}


_LLAMA = {
    "scores": _layers("model.layers", "self_attn", "q_proj", "k_proj"),
    "residuals": _residual("model.layers", "self_attn"),
    "masks": True,
}

FOREIGN: dict[str, Foreign] = {
    "gpt2": Foreign(
        _gpt2,
        _text,
        _two,
        {},
        _layers("transformer.h", "attn", "c_attn"),
        _residual("transformer.h", "attn"),
        masks=True,
    ),
    "bert": Foreign(
        _bert,
        _scored,
        _inside,
        {"labels": ""},
        _layers("bert.encoder.layer", "attention.self", "query", "key"),
        {},
        masks=True,
    ),
    "t5": Foreign(_t5, _text, _inside),
    "llama": Foreign(_decoder("Llama"), _text, _inside, {}, **_LLAMA),
    "llama-embeds": Foreign(
        _decoder("Llama"), _embedded, _inside, {"inputs_embeds": "model.layers.0.input_layernorm"}, **_LLAMA
    ),
    "qwen2-tied": Foreign(_decoder("Qwen2", tie_word_embeddings=True), _text, _inside, {}, **_LLAMA),
    "mixtral": Foreign(
        _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
        _text,
        _inside,
        {},
        _LLAMA["scores"],
        _LLAMA["residuals"],
    ),
    "vit": Foreign(
        _vit,
        _images,
        _outside,
        {"pixel_values": "vit.embeddings.patch_embeddings.projection", "weights": None},
    ),
    "whisper": Foreign(_whisper, _speech, _inside, {"input_features": "model.encoder.conv1"}),
    "mobilenet": Foreign(
        _mobilenet,
        _images,
        _outside,
        {"pixel_values": "mobilenet_v2.conv_stem.first_conv.convolution", "weights": None},
    ),
    "mobilenet-frozen": Foreign(
        _frozen_mobilenet, _images, _outside, {"pixel_values": "mobilenet_v2.conv_stem.first_conv.convolution"}
    ),
    "convnext": Foreign(
        _convnext, _images, _outside, {"pixel_values": "convnext.embeddings.patch_embeddings", "weights": None}
    ),
    "wav2vec2": Foreign(_wav2vec2, _waves, _inside, {"input_values": "wav2vec2.feature_extractor.conv_layers.0.conv"}),
}
