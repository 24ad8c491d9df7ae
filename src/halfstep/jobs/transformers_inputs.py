"""The synthetic batches that each kind of model in transformers trains on: named tensors and their labels.

Every function here takes a configuration and a length and returns `Inputs`: a description and the function that draws a
batch. Lengths count tokens for text and for Whisper's transcripts, pixels along a side for images, and samples of audio
for the wav2vec 2.0 family.

Ids that a configuration reserves (`pad_token_id` and the like) are never drawn: a padding token would be left out of the
attention or of the position count by some models and not by others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.jobs.data.loader import mix
from halfstep.jobs.data.synthetic import PATTERN_SIDE, add_patterns
from halfstep.jobs.data.tokens import Draw, MakeBatch, NamedTensors
from halfstep.jobs.transformers_config import reserved_ids

__all__ = [
    "Inputs",
    "MakeInputs",
    "causal",
    "classes_of_images",
    "classes_of_text",
    "masked",
    "seq2seq",
    "speech",
]

LENGTH = 1024  # tokens, unless the configuration has fewer positions
IMAGE_SIZE = 224  # for configurations without one, such as ResNet's
AUDIO_SAMPLES = 80_000  # five seconds at 16 kHz
IGNORED = -100  # a label without a loss
MASKED_SHARE = 0.15  # BERT's
FEWEST_IDS = 4
# These begin to count positions after the padding id, so that many of their positions are never used.
_OFFSET_POSITIONS = (
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """How to draw a batch, the names of its tensors, and what it is, e.g. "causal-lm 1024 of 50257 tokens"."""

    make: MakeBatch
    names: tuple[str, ...]
    kind: str


MakeInputs = Callable[[Any, int | None], Inputs]


def causal(config: Any, length: int | None) -> Inputs:
    """Tokens that are their own labels; the model shifts them."""
    vocabulary, length = _Vocabulary.of(config), _text_length(config, length)

    def make(draw: Draw, rows: int) -> NamedTensors:
        tokens = vocabulary.tokens(draw, rows, length)
        return {"input_ids": tokens, "labels": tokens}

    return Inputs(make, ("input_ids", "labels"), f"causal {length} of {vocabulary.size} tokens")


def masked(config: Any, length: int | None) -> Inputs:
    """Tokens of which 15 % are replaced by one reserved id; only these have labels."""
    vocabulary, length = _Vocabulary.of(config, num_marks=1), _text_length(config, length)

    def make(draw: Draw, rows: int) -> NamedTensors:
        tokens = vocabulary.tokens(draw, rows, length)
        hidden = draw.uniform(rows, length) < MASKED_SHARE
        hidden[:, 0] = True  # a batch without any label has no loss
        return {
            "input_ids": tokens.masked_fill(hidden, vocabulary.mark),
            "labels": tokens.masked_fill(~hidden, IGNORED),
        }

    return Inputs(make, ("input_ids", "labels"), f"masked {length} of {vocabulary.size} tokens")


def seq2seq(config: Any, length: int | None) -> Inputs:
    """Tokens whose labels are the same tokens: a text to be copied."""
    vocabulary, length = _Vocabulary.of(config), _text_length(config, length)

    def make(draw: Draw, rows: int) -> NamedTensors:
        tokens = vocabulary.tokens(draw, rows, length)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return Inputs(make, ("input_ids", "labels"), f"seq2seq {length} of {vocabulary.size} tokens")


def classes_of_text(config: Any, length: int | None) -> Inputs:
    """Tokens whose frequent ids depend on the class."""
    vocabulary, length = _Vocabulary.of(config), _text_length(config, length)
    num_classes = _num_classes(config)
    # BART and T5 read the state of the last end-of-sequence token.
    end = getattr(config, "eos_token_id", None) if getattr(config, "is_encoder_decoder", False) else None

    def make(draw: Draw, rows: int) -> NamedTensors:
        labels = draw.integers(num_classes, rows)
        tokens = vocabulary.tokens(draw, rows, length, shift=labels * max(1, vocabulary.num_drawn // num_classes))
        if isinstance(end, int):
            tokens[:, -1] = end
        return {"input_ids": tokens, "labels": labels}

    kind = f"{num_classes} classes of {length} of {vocabulary.size} tokens"
    return Inputs(make, ("input_ids", "labels"), kind)


def classes_of_images(config: Any, length: int | None) -> Inputs:
    """Square images: noise plus a pattern for each class."""
    size, channels = _image_size(config, length), getattr(config, "num_channels", 3)
    num_classes = _num_classes(config)

    def make(draw: Draw, rows: int) -> NamedTensors:
        labels = draw.integers(num_classes, rows)
        images = draw.normal(rows, channels, size, size)
        patterns = _fixed_draw(draw).normal(num_classes, channels, PATTERN_SIDE, PATTERN_SIDE)
        return {"pixel_values": add_patterns(images, patterns[labels]), "labels": labels}

    kind = f"{num_classes} classes of {channels} x {size} x {size} images"
    return Inputs(make, ("pixel_values", "labels"), kind)


def speech(config: Any, length: int | None) -> Inputs:
    """Whisper's spectrograms with transcripts, or the audio of wav2vec 2.0's family with transcripts for CTC."""
    if getattr(config, "model_type", "") == "whisper":
        return _spectrograms(config, length)
    if getattr(config, "conv_kernel", None) and getattr(config, "conv_stride", None):
        return _audio(config, length)
    raise SettingError(
        f"The model type {getattr(config, 'model_type', '')!r} has inputs that head=speech does not draw; it draws those of Whisper "
        "and of the wav2vec 2.0 family (wav2vec2, hubert, wavlm, ...). Write a job file for it."
    )


def _spectrograms(config: Any, length: int | None) -> Inputs:
    vocabulary, length = _Vocabulary.of(config), _text_length(config, length)
    frames = 2 * config.max_source_positions  # a convolution of stride two halves them

    def make(draw: Draw, rows: int) -> NamedTensors:
        features = draw.normal(rows, config.num_mel_bins, frames)
        return {"input_features": features, "labels": vocabulary.tokens(draw, rows, length)}

    kind = f"{config.num_mel_bins} x {frames} spectrograms with {length} of {vocabulary.size} tokens"
    return Inputs(make, ("input_features", "labels"), kind)


def _audio(config: Any, length: int | None) -> Inputs:
    vocabulary = _Vocabulary.of(config)
    samples = frames = AUDIO_SAMPLES if length is None else length
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        frames = (frames - kernel) // stride + 1
    fewest = max(1, getattr(config, "mask_time_length", 0)) + 1  # a mask must be shorter than the audio
    if frames < fewest:
        raise SettingError(
            f"length={samples} samples of audio become {max(0, frames)} frames, fewer than the {fewest} that this configuration "
            "needs; increase length."
        )
    num_labels = max(1, frames // 4)  # CTC needs up to two frames per label

    def make(draw: Draw, rows: int) -> NamedTensors:
        return {"input_values": draw.normal(rows, samples), "labels": vocabulary.tokens(draw, rows, num_labels)}

    return Inputs(make, ("input_values", "labels"), f"{samples} samples with {num_labels} of {vocabulary.size} tokens")


@dataclass(frozen=True)
class _Vocabulary:
    """The ids that are drawn: all except the reserved ones, and except the last `num_marks` of the others."""

    size: int
    reserved: tuple[int, ...]
    num_drawn: int

    @classmethod
    def of(cls, config: Any, num_marks: int = 0) -> _Vocabulary:
        size = getattr(config, "vocab_size", None)
        if not isinstance(size, int):
            raise SettingError(
                f"{type(config).__name__} has no vocab_size, so no tokens can be drawn for it; use the configuration of its text "
                "model, or write a job file."
            )
        ids = reserved_ids(config.to_dict()).values()
        reserved = tuple(sorted({each for several in ids for each in several if 0 <= each < size}))
        num_drawn = size - len(reserved) - num_marks
        if num_drawn < FEWEST_IDS:
            raise SettingError(
                f"vocab_size={size} leaves {max(0, num_drawn)} ids next to the reserved ones ({', '.join(map(str, reserved)) or 'none'}); "
                f"at least {FEWEST_IDS} are needed. Increase vocab_size."
            )
        return cls(size, reserved, num_drawn)

    def tokens(self, draw: Draw, rows: int, length: int, shift: Tensor | None = None) -> Tensor:
        ids = draw.tokens(self.num_drawn, rows, length, shift)
        for reserved in self.reserved:  # in ascending order
            ids = ids + (ids >= reserved)
        return ids

    @property
    def mark(self) -> int:
        """The id after those that are drawn."""
        mark = self.num_drawn
        for reserved in self.reserved:
            mark += mark >= reserved
        return mark


def _text_length(config: Any, length: int | None) -> int:
    """The requested number of tokens, at most as many as the model has positions; by default 1,024 or fewer."""
    names = ("max_target_positions", "max_position_embeddings", "n_positions")  # Whisper's decoder has its own
    name, most = next(((n, v) for n in names if isinstance(v := getattr(config, n, None), int) and v > 0), ("", None))
    if most is not None and getattr(config, "model_type", "") in _OFFSET_POSITIONS:
        most -= (getattr(config, "pad_token_id", None) or 0) + 1
    if length is None:
        return LENGTH if most is None else min(LENGTH, most)
    if most is not None and length > most:
        raise SettingError(
            f"length={length} is more than the {most} tokens for which {name}={getattr(config, name)} is enough; lower length, or "
            f"set {name} as well."
        )
    return length


def _image_size(config: Any, length: int | None) -> int:
    size = getattr(config, "image_size", None)
    if size is None:
        return IMAGE_SIZE if length is None else length
    if length is not None:
        raise SettingError(f"length={length} has no effect on images, whose size is image_size={size}; set image_size.")
    sides = set(size) if isinstance(size, list | tuple) else {size}
    if len(sides) != 1:
        raise SettingError(f"image_size={size} is not square; the synthetic images are. Set image_size to one number.")
    return int(sides.pop())


def _num_classes(config: Any) -> int:
    problem = getattr(config, "problem_type", None)
    if problem not in {None, "single_label_classification"} or config.num_labels < 2:
        raise SettingError(
            f"num_labels={config.num_labels} with problem_type={problem!r} is not a choice of one class; set num_labels to at least 2 "
            "and problem_type to single_label_classification."
        )
    return int(config.num_labels)


def _fixed_draw(draw: Draw) -> Draw:
    """A draw that returns the same numbers in every batch, for what belongs to a class."""
    if draw.generator is None:
        return draw
    return Draw(torch.Generator(draw.device).manual_seed(mix("patterns")), draw.device)
