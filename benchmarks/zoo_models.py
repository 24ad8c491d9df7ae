"""The models of the zoo benchmark: timm, transformers and diffusers, with random weights and no download.

Each case has a Job at full size and a tiny one of the same architecture (about two layers) that a CPU can run. The batches are
random and of the right shapes. Dropout rates are those of the libraries' configurations, the same for all rows of a model; only
what would make the work itself vary between steps (layer drop, SpecAugment) is off. `without_dropout` removes the rest where
gradients are compared.

`HELD_BACK` are models that nothing was tuned on; they run only if they are named or asked for with --held-back.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.jobs.job import Job
from halfstep.jobs.targets import load_target

__all__ = ["CASES", "COMPILED", "HELD_BACK", "Case", "case_of_target", "without_dropout"]

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One model of the zoo: where it comes from, the batch of the measurement, and its job at full size or tiny."""

    name: str
    library: str
    batch: int
    make: Callable[[bool], Job]  # takes whether to build the tiny form
    fp32_buffers: bool = False  # its fp32 buffers make fp32 results in the lean presets; so far in none

    def job(self, *, tiny: bool = False) -> Job:
        """What to train."""
        return self.make(tiny)

    def batch_size(self, *, tiny: bool = False) -> int:
        """Examples per step: that of the measurement, or two."""
        return 2 if tiny else self.batch


def case_of_target(target: str) -> Case:
    """Any model of a library, as `timm:NAME` or `transformers:CONFIG`, with 64 images or 8 sequences in a batch."""
    library = target.partition(":")[0]
    return Case(target, library, 64 if library == "timm" else 8, lambda _: load_target(target).job)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout and drop-path rate set to zero, in modules and configurations alike."""
    for module in model.modules():
        owners = [module, *([module.config] if hasattr(module, "config") else [])]
        for owner in owners:
            for name, value in list(vars(owner).items()):
                is_rate = name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)  # noqa: SLF001
                if isinstance(value, float) and (is_rate or "drop" in name):
                    setattr(owner, name, 0.0)
    return model


def _adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-5)


def _batches(make: Callable[[int], Any]) -> Callable[..., Iterator[Any]]:
    def data(batch_size: int, seed: int = 0) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            batch = make(batch_size)
        yield batch

    return data


# --- timm -----------------------------------------------------------------------------------------------------------


def _classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _timm(
    name: str, batch: int, *, fp32_buffers: bool = False, side: int = 32, tiny_class: str = "", **tiny: Any
) -> Case:
    """A classifier of timm; `tiny` are the arguments of its small form, for images of `side` pixels.

    `tiny_class` is "module:class" in timm.models for a model whose name fixes its sizes.
    """

    def make(is_tiny: bool) -> Job:
        if not is_tiny:
            return load_target(f"timm:{name}").job
        import timm

        module, _, cls = tiny_class.partition(":")
        build = getattr(getattr(timm.models, module), cls) if cls else functools.partial(timm.create_model, name)
        return Job(
            model=lambda: build(num_classes=10, **tiny),
            data=_batches(lambda n: (torch.randn(n, 3, side, side), torch.randint(10, (n,)))),
            loss=_classify,
            optimizer=_adamw,
            name=f"tiny {name}",
        )

    return Case(name, "timm", batch, make, fp32_buffers)


# --- transformers ---------------------------------------------------------------------------------------------------


def _transformers(
    name: str,
    batch: int,
    config: str,
    length: int,
    full: Settings,
    tiny: Settings,
    *,
    tiny_length: int = 16,
    data: Callable[[bool], Any] | None = None,
) -> Case:
    """A configuration class of transformers; `tiny` replaces settings of `full`, and `data` the batches of its target."""

    def make(is_tiny: bool) -> Job:
        import transformers

        from halfstep.jobs.transformers_target import job_from_config

        settings = dict(full) | (dict(tiny) if is_tiny else {})
        experts = settings.pop("experts", None)
        configuration = getattr(transformers, config)(**settings)
        if experts is not None:
            configuration._experts_implementation = experts  # noqa: SLF001 - the public argument is newer than some versions
        job = job_from_config(configuration, length=tiny_length if is_tiny else length, name=name)
        return job if data is None else dataclasses.replace(job, data=data(is_tiny))

    return Case(name, "transformers", batch, make)


def _translations(is_tiny: bool) -> Any:
    """T5's batch: 512 tokens, and 128 as labels."""
    vocab, lengths = (96, (16, 8)) if is_tiny else (32_128, (512, 128))

    def batch(n: int) -> Settings:
        ids, labels = (torch.randint(3, vocab, (n, length)) for length in lengths)
        return {"input_ids": ids, "labels": labels}

    return _batches(batch)


_SMALL_TEXT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SMALL_DECODER = _SMALL_TEXT | {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 32}

# --- diffusers ------------------------------------------------------------------------------------------------------


def _denoise(model: nn.Module, batch: Any) -> Tensor:
    """The mean squared error of the predicted noise, in fp32 as diffusers' training scripts compute it."""
    latents, steps, text, noise = batch
    predicted = model(latents, steps, encoder_hidden_states=text).sample
    return F.mse_loss(predicted.float(), noise.float())


def _unet(is_tiny: bool) -> Job:
    widths, side, text, length = ((32, 64), 8, 32, 4) if is_tiny else ((320, 640, 1280), 64, 768, 77)
    levels = len(widths)

    def model() -> nn.Module:
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel(
            sample_size=side,
            block_out_channels=widths,
            layers_per_block=1 if is_tiny else 2,
            down_block_types=("CrossAttnDownBlock2D",) * (levels - 1) + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (levels - 1),
            cross_attention_dim=text,
            attention_head_dim=8,
        )

    def batch(n: int) -> Any:
        shape = (n, 4, side, side)
        return torch.randn(shape), torch.randint(1000, (n,)), torch.randn(n, length, text), torch.randn(shape)

    return Job(model=model, data=_batches(batch), loss=_denoise, optimizer=_adamw, name="unet_sd15")


# --- the zoo --------------------------------------------------------------------------------------------------------

_VIT = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}
_SWIN = {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}

_ZOO = (
    _timm("vit_large_patch16_224", 128, **_VIT),
    _timm("deit3_base_patch16_224", 128, **_VIT),
    _timm("convnext_base", 128, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    _timm("swin_base_patch4_window7_224", 128, side=56, **(_SWIN | {"img_size": 56})),
    _timm("eva02_base_patch16_clip_224", 128, **_VIT),
    _timm("mixer_b16_224", 128, tiny_class="mlp_mixer:MlpMixer", img_size=32, embed_dim=32, num_blocks=2),
    _timm("resnet50", 256, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), stem_width=8),
    _transformers(
        "gpt2_medium", 8, "GPT2Config", 1024,
        {"n_embd": 1024, "n_layer": 24, "n_head": 16},
        {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    _transformers(
        "llama_gqa", 4, "LlamaConfig", 2048,
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4},
        _SMALL_DECODER,
    ),
    _transformers("bert_base", 32, "BertConfig", 512, {}, _SMALL_TEXT | {"intermediate_size": 64}),
    _transformers(
        "t5_base", 16, "T5Config", 512,
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
        {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        data=_translations,
    ),
    _transformers(
        "whisper_small", 16, "WhisperConfig", 128,
        {
            "d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
        },
        {
            "vocab_size": 96, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 16,
            "max_target_positions": 16,
        },
        tiny_length=8,
    ),
    # The loop over the experts rather than grouped products, which not every row's dtypes can use in every version.
    _transformers(
        "mixtral_small", 4, "MixtralConfig", 1024,
        {
            "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 12,
            "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "experts": "eager",
        },
        _SMALL_DECODER | {"num_local_experts": 4},
    ),
    Case("unet_sd15", "diffusers", 8, _unet),
)  # fmt: skip

_OTHERS = (
    _timm("swinv2_base_window8_256", 64, side=32, **_SWIN),
    _timm("coatnet_1_rw_224", 64, side=64, img_size=64, embed_dim=(32, 32, 32, 32), depths=(1, 1, 1, 1), stem_width=(8, 8)),
    _timm("vit_so400m_patch14_siglip_224", 64, side=28, **(_VIT | {"img_size": 28})),
    _transformers(
        "modernbert_base", 32, "ModernBertConfig", 512, {},
        _SMALL_TEXT | {"intermediate_size": 64},
    ),
    _transformers(
        "qwen3_small", 4, "Qwen3Config", 2048,
        {
            "vocab_size": 64_000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128,
        },
        _SMALL_DECODER | {"head_dim": 8},
    ),
    _transformers(
        "opt_350m", 8, "OPTConfig", 1024,
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096, "layerdrop": 0.0},
        _SMALL_TEXT | {"ffn_dim": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32},
    ),
    _transformers(
        "wav2vec2_base", 16, "Wav2Vec2Config", 160_000,
        {"layerdrop": 0.0, "apply_spec_augment": False, "ctc_loss_reduction": "mean", "ctc_zero_infinity": True},
        _SMALL_TEXT | {
            "intermediate_size": 64, "conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 3), "conv_stride": (5, 4, 4),
            "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
        },
        tiny_length=2000,
    ),
)  # fmt: skip

CASES: dict[str, Case] = {case.name: case for case in _ZOO}
HELD_BACK: dict[str, Case] = {case.name: case for case in _OTHERS}
COMPILED = ("vit_large_patch16_224", "convnext_base", "gpt2_medium", "llama_gqa")  # those with compiled rows
