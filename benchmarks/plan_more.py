"""More models to measure and predict: architectures of transformers that no rule of the planner was fitted to.

The same form as `plan_models.CASES`. Models are built from configurations, so nothing is downloaded; sizes are those of
published small and base models, or of a published architecture with fewer layers. Training is the usual one: labels are
passed to the model, encoders get an attention mask, dropout is as configured. Only layer dropping is off: a plan counts all
layers, a measurement only those that ran.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from halfstep.jobs.job import Job

__all__ = ["MORE_CASES", "more_cases"]

Batch = dict[str, Any]


def _job(kind: str, batch: Callable[[int], Batch], *, recompute: bool = False, **settings: Any) -> Job:
    """A job of transformers' `NameConfig` and `NameForTask`, written as "Name:ForTask"."""
    import transformers

    name, _, task = kind.partition(":")
    config_name = settings.pop("config_class", f"{name}Config")

    def model() -> Any:
        config = getattr(transformers, config_name)(**settings)
        built = getattr(transformers, name + task)(config)
        if recompute:
            built.gradient_checkpointing_enable()
        return built

    def data(batch_size: int) -> Iterator[Batch]:
        yield batch(batch_size)

    return Job(
        model=model,
        data=data,
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        name=kind.replace(":", ""),
    )


# --- batches --------------------------------------------------------------------------------------------------------


def _text(
    length: int, vocab: int, labels: str = "next", classes: int = 2, *, mask: bool = True
) -> Callable[[int], Batch]:
    """Token ids, a mask of ones, and labels: "next" for each token of the vocabulary, "token" of classes, or "sequence"."""

    def make(n: int) -> Batch:
        batch = {"input_ids": torch.randint(5, vocab, (n, length))}
        if mask:
            batch["attention_mask"] = torch.ones(n, length, dtype=torch.long)
        shape, high = ((n,), classes) if labels == "sequence" else ((n, length), vocab if labels == "next" else classes)
        return {**batch, "labels": torch.randint(high, shape)}

    return make


def _padded(whole: Callable[[int], Batch]) -> Callable[[int], Batch]:
    """The same batches with every second text a third shorter."""

    def make(n: int) -> Batch:
        batch = whole(n)
        batch["attention_mask"][1::2, -batch["attention_mask"].shape[1] // 3 :] = 0
        return batch

    return make


def _pairs(length: int, target: int, vocab: int) -> Callable[[int], Batch]:
    return lambda n: {
        "input_ids": torch.randint(5, vocab, (n, length)),
        "attention_mask": torch.ones(n, length, dtype=torch.long),
        "labels": torch.randint(5, vocab, (n, target)),
    }


def _images(size: int = 224, classes: int = 1000) -> Callable[[int], Batch]:
    return lambda n: {"pixel_values": torch.randn(n, 3, size, size), "labels": torch.randint(classes, (n,))}


def _scenes(size: int, classes: int) -> Callable[[int], Batch]:
    return lambda n: {"pixel_values": torch.randn(n, 3, size, size), "labels": torch.randint(classes, (n, size, size))}


def _captions(size: int, length: int, vocab: int) -> Callable[[int], Batch]:
    return lambda n: {
        "pixel_values": torch.randn(n, 3, size, size),
        "input_ids": torch.randint(5, vocab, (n, length)),
        "attention_mask": torch.ones(n, length, dtype=torch.long),
        "return_loss": True,
    }


def _spectrograms(length: int, vocab: int) -> Callable[[int], Batch]:
    return lambda n: {"input_features": torch.randn(n, 80, 3000), "labels": torch.randint(5, vocab, (n, length))}


def _waves(seconds: int, labels: int, classes: int) -> Callable[[int], Batch]:
    """Sound at 16 kHz with `labels` characters each, or one class."""

    def make(n: int) -> Batch:
        shape = (n, labels) if labels else (n,)
        return {"input_values": torch.randn(n, 16000 * seconds), "labels": torch.randint(1, classes, shape)}

    return make


# --- cases ----------------------------------------------------------------------------------------------------------

_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_DECODER = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}


def _encoders() -> dict[str, tuple[tuple[int, int], Callable[[], Job]]]:
    return {
        "distilbert": ((32, 128), lambda: _job("DistilBert:ForSequenceClassification", _text(256, 30522, "sequence"))),
        "bert_padded": ((16, 64), lambda: _job("Bert:ForSequenceClassification", _padded(_text(384, 30522, "sequence")))),
        "roberta_tokens": (
            (8, 32), lambda: _job("Roberta:ForTokenClassification", _text(512, 50265, "token", 9), vocab_size=50265, max_position_embeddings=514, num_labels=9)
        ),
        "electra_small": ((16, 64), lambda: _job("Electra:ForSequenceClassification", _text(512, 30522, "sequence"))),
        "albert": ((8, 32), lambda: _job("Albert:ForMaskedLM", _text(512, 30000), **_BASE)),
        "deberta_v3": (
            (8, 24),
            lambda: _job(
                "DebertaV2:ForSequenceClassification", _text(256, 128100, "sequence"), **_BASE, vocab_size=128100, type_vocab_size=0,
                relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
                pos_att_type=["p2c", "c2p"], position_biased_input=False, max_relative_positions=-1, pooler_hidden_size=768,
            ),
        ),
        "xlnet": (
            (8, 24),
            lambda: _job("XLNet:ForSequenceClassification", _text(256, 32000, "sequence"), d_model=768, n_layer=12, n_head=12, d_inner=3072),
        ),
        "modernbert": ((8, 32), lambda: _job("ModernBert:ForMaskedLM", _text(512, 50368))),
        "longformer": (
            (2, 6), lambda: _job("Longformer:ForSequenceClassification", _text(2048, 30522, "sequence"), max_position_embeddings=4098)
        ),
    }  # fmt: skip


def _decoders() -> dict[str, tuple[tuple[int, int], Callable[[], Job]]]:
    return {
        "opt": ((4, 12), lambda: _job("OPT:ForCausalLM", _text(1024, 50272))),
        "gpt_neox": (
            (4, 8), lambda: _job("GPTNeoX:ForCausalLM", _text(1024, 50304, mask=False), vocab_size=50304, hidden_size=1024, num_hidden_layers=12,
                                 num_attention_heads=16, intermediate_size=4096),
        ),
        "gptj": (
            (2, 6), lambda: _job("GPTJ:ForCausalLM", _text(1024, 50400), n_embd=1024, n_layer=12, n_head=16),
        ),
        "bloom": ((2, 4), lambda: _job("Bloom:ForCausalLM", _text(1024, 250880), vocab_size=250880, hidden_size=1024, n_layer=12, n_head=16)),
        "falcon": (
            (4, 8), lambda: _job("Falcon:ForCausalLM", _text(1024, 65024), hidden_size=1024, num_hidden_layers=12, num_attention_heads=16),
        ),
        "mistral": ((4, 8), lambda: _job("Mistral:ForCausalLM", _text(1024, 32000), **_DECODER, num_key_value_heads=4, sliding_window=512)),
        "qwen2": (
            (2, 6), lambda: _job("Qwen2:ForCausalLM", _text(1024, 151936), vocab_size=151936, hidden_size=896, intermediate_size=4864,
                                 num_hidden_layers=12, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True),
        ),
        "qwen3_checkpointed": (
            (4, 8), lambda: _job("Qwen3:ForCausalLM", _text(1024, 151936), recompute=True, vocab_size=151936, hidden_size=1024, intermediate_size=3072,
                                 num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True),
        ),
        "gemma3": (
            (2, 6), lambda: _job("Gemma3:ForCausalLM", _text(1024, 262144), config_class="Gemma3TextConfig", vocab_size=262144, hidden_size=640,
                                 intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
                                 sliding_window=512),
        ),
        "gemma2": (
            (2, 4), lambda: _job("Gemma2:ForCausalLM", _text(1024, 256000), hidden_size=1152, intermediate_size=4608, num_hidden_layers=8,
                                 num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=512),
        ),
        "phi3": (
            (4, 8), lambda: _job("Phi3:ForCausalLM", _text(1024, 32064), **_DECODER, num_key_value_heads=16),
        ),
        "llama_classifier": (
            (4, 12), lambda: _job("Llama:ForSequenceClassification", _text(512, 32000, "sequence"), **_DECODER, num_key_value_heads=16, pad_token_id=0),
        ),
        "mixtral": (
            (2, 6), lambda: _job("Mixtral:ForCausalLM", _text(1024, 32000), hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
                                 num_attention_heads=12, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2),
        ),
        "qwen2_moe": (
            (2, 6), lambda: _job("Qwen2Moe:ForCausalLM", _text(1024, 151936), vocab_size=151936, hidden_size=768, intermediate_size=2048,
                                 moe_intermediate_size=512, shared_expert_intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
                                 num_key_value_heads=12, num_experts=16, num_experts_per_tok=4),
        ),
        "mamba": ((4, 8), lambda: _job("Mamba:ForCausalLM", _text(128, 50280, mask=False), vocab_size=50280, hidden_size=768, num_hidden_layers=12)),
        "gpt2_checkpointed": ((8, 24), lambda: _job("GPT2:LMHeadModel", _text(1024, 50257), recompute=True)),
    }  # fmt: skip


def _pairs_and_sound() -> dict[str, tuple[tuple[int, int], Callable[[], Job]]]:
    return {
        "bart": (
            (8, 24), lambda: _job("Bart:ForConditionalGeneration", _pairs(512, 128, 50265), d_model=768, encoder_layers=6, decoder_layers=6,
                                  encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072),
        ),
        "t5_v1_1": (
            (8, 24), lambda: _job("T5:ForConditionalGeneration", _pairs(512, 128, 32128), d_model=768, d_kv=64, d_ff=2048, num_layers=12,
                                  num_heads=12, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
                                  pad_token_id=0),
        ),
        "whisper_small": (
            (4, 12), lambda: _job("Whisper:ForConditionalGeneration", _spectrograms(128, 51865), d_model=768, encoder_layers=12, decoder_layers=12,
                                  encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072),
        ),
        "wav2vec2_ctc": ((4, 12), lambda: _job("Wav2Vec2:ForCTC", _waves(10, 80, 32), layerdrop=0.0)),
        "wav2vec2_classifier": ((4, 12), lambda: _job("Wav2Vec2:ForSequenceClassification", _waves(10, 0, 8), num_labels=8, layerdrop=0.0)),
    }  # fmt: skip


def _vision() -> dict[str, tuple[tuple[int, int], Callable[[], Job]]]:
    return {
        "vit": ((32, 96), lambda: _job("ViT:ForImageClassification", _images(), num_labels=1000)),
        "deit": ((32, 96), lambda: _job("DeiT:ForImageClassification", _images(), num_labels=1000, hidden_dropout_prob=0.1)),
        "swin_tiny": ((32, 96), lambda: _job("Swin:ForImageClassification", _images(), num_labels=1000)),
        "convnext_tiny_hf": ((32, 96), lambda: _job("ConvNext:ForImageClassification", _images(), num_labels=1000, drop_path_rate=0.1)),
        "beit": (
            (32, 96), lambda: _job("Beit:ForImageClassification", _images(), num_labels=1000, use_relative_position_bias=True, layer_scale_init_value=0.1),
        ),
        "dinov2": ((16, 48), lambda: _job("Dinov2:ForImageClassification", _images(), num_labels=1000, image_size=224, patch_size=14)),
        "resnet50_hf": ((32, 96), lambda: _job("ResNet:ForImageClassification", _images(), num_labels=1000)),
        "segformer_b1": (
            (4, 12), lambda: _job("Segformer:ForSemanticSegmentation", _scenes(512, 150), num_labels=150, hidden_sizes=[64, 128, 320, 512]),
        ),
        "clip": ((32, 96), lambda: _job("CLIP:Model", _captions(224, 77, 49408))),
        "vit_mae": ((32, 96), lambda: _job("ViTMAE:ForPreTraining", lambda n: {"pixel_values": torch.randn(n, 3, 224, 224)})),
    }  # fmt: skip


# name -> (needs, the two batch sizes, job)
MORE_CASES: dict[str, tuple[str, tuple[int, int], Callable[[], Job]]] = {
    f"hf_{name}": ("transformers", batches, job)
    for name, (batches, job) in (_encoders() | _decoders() | _pairs_and_sound() | _vision()).items()
}


def more_cases() -> dict[str, tuple[tuple[int, int], Callable[[], Job]]]:
    """The cases whose libraries are installed."""
    return {
        name: (batches, job)
        for name, (needs, batches, job) in MORE_CASES.items()
        if importlib.util.find_spec(needs) is not None
    }
