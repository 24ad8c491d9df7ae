from types import SimpleNamespace

import pytest
import torch

from halfstep.errors import SettingError
from halfstep.jobs import transformers_inputs as inputs
from halfstep.jobs.data.tokens import Draw


def config(**settings):
    """A configuration as transformers has them, with these settings."""
    return SimpleNamespace(**settings, to_dict=lambda: settings)


def batch(made, rows=64):
    return made.make(Draw(torch.Generator().manual_seed(0), torch.device("cpu")), rows)


def test_reserved_ids_are_not_drawn():
    """Every other id of the vocabulary is drawn, and no reserved one."""
    made = inputs.causal(config(vocab_size=12, pad_token_id=0, eos_token_id=[5, 11], bos_token_id=None), 64)
    assert set(batch(made)["input_ids"].flatten().tolist()) == set(range(12)) - {0, 5, 11}


def test_causal_labels_are_the_tokens():
    """The labels of a causal model are its tokens; the model shifts them."""
    drawn = batch(inputs.causal(config(vocab_size=20), 16))
    assert torch.equal(drawn["input_ids"], drawn["labels"])
    assert drawn["input_ids"].shape == (64, 16)


def test_masked_models_have_labels_for_the_masked_tokens_only():
    """About 15 % of the tokens are replaced by an id that is never drawn, and exactly these have labels."""
    drawn = batch(inputs.masked(config(vocab_size=20, pad_token_id=19), 64))
    hidden = drawn["labels"] != inputs.IGNORED
    assert 0.13 < hidden.float().mean().item() < 0.19
    assert torch.equal(hidden, drawn["input_ids"] == 18)
    assert drawn["labels"].max() < 18


def test_classes_of_text_differ_in_their_tokens():
    """The most frequent id of each class is its own."""
    drawn = batch(inputs.classes_of_text(config(vocab_size=400, num_labels=4), 64), rows=200)
    modes = [drawn["input_ids"][drawn["labels"] == label].flatten().mode().values.item() // 100 for label in range(4)]
    assert modes == [0, 1, 2, 3]


def test_encoder_decoder_classifiers_get_an_end_token():
    """BART and T5 read the state of the end-of-sequence token, which therefore ends every text, once."""
    settings = {"vocab_size": 20, "num_labels": 2, "eos_token_id": 2, "is_encoder_decoder": True}
    tokens = batch(inputs.classes_of_text(config(**settings), 8))["input_ids"]
    assert torch.equal((tokens == 2).sum(1), torch.ones(64, dtype=torch.long))
    assert set(tokens[:, -1].tolist()) == {2}


def test_images_have_the_patterns_of_their_classes_in_every_batch():
    """The mean images of one class in two batches are alike, and those of two classes are not."""
    made = inputs.classes_of_images(config(image_size=8, num_channels=1, num_labels=2), None)
    means = []
    for seed in (0, 1):
        drawn = made.make(Draw(torch.Generator().manual_seed(seed), torch.device("cpu")), 400)
        means.append([drawn["pixel_values"][drawn["labels"] == label].mean(0).flatten() for label in (0, 1)])
    (a0, b0), (a1, b1) = means
    assert torch.corrcoef(torch.stack([a0, a1]))[0, 1] > 0.9
    assert torch.corrcoef(torch.stack([b0, b1]))[0, 1] > 0.9
    assert torch.corrcoef(torch.stack([a0, b1]))[0, 1] < 0.8


def test_the_length_is_that_of_the_positions_or_1024():
    """Without a length, a model gets as many tokens as it has positions, at most 1,024."""
    assert batch(inputs.causal(config(vocab_size=20, max_position_embeddings=12), None), 1)["input_ids"].shape == (
        1,
        12,
    )
    assert batch(inputs.causal(config(vocab_size=20), None), 1)["input_ids"].shape == (1, 1024)
    roberta = config(vocab_size=20, max_position_embeddings=14, pad_token_id=1, model_type="roberta")
    assert batch(inputs.masked(roberta, None), 1)["input_ids"].shape == (1, 12)
    with pytest.raises(SettingError, match="length=13 is more than the 12 tokens for which max_position_embeddings=14"):
        inputs.masked(roberta, 13)


def test_audio_has_fewer_labels_than_frames():
    """CTC gets a label for every fourth frame; audio that is too short for the masks is rejected."""
    audio = config(vocab_size=20, pad_token_id=0, conv_kernel=[10, 3], conv_stride=[5, 2], mask_time_length=10)
    drawn = batch(inputs.speech(audio, 400), 2)
    assert {name: tuple(value.shape) for name, value in drawn.items()} == {"input_values": (2, 400), "labels": (2, 9)}
    with pytest.raises(SettingError, match="length=50 samples of audio become 4 frames, fewer than the 11"):
        inputs.speech(audio, 50)


@pytest.mark.parametrize(
    ("make", "settings", "length", "message"),
    [
        (inputs.causal, {}, 8, "has no vocab_size"),
        (
            inputs.causal,
            {"vocab_size": 5, "pad_token_id": 0, "eos_token_id": 1},
            8,
            "vocab_size=5 leaves 3 ids next to the reserved",
        ),
        (inputs.classes_of_images, {"image_size": 8, "num_labels": 2}, 16, "length=16 has no effect on images"),
        (inputs.classes_of_images, {"image_size": [8, 16], "num_labels": 2}, None, "is not square"),
        (inputs.classes_of_images, {"image_size": 8, "num_labels": 1}, None, "num_labels=1"),
        (
            inputs.classes_of_text,
            {"vocab_size": 9, "num_labels": 3, "problem_type": "multi_label_classification"},
            8,
            "multi_label_classification",
        ),
        (
            inputs.speech,
            {"vocab_size": 9, "model_type": "speech_to_text"},
            8,
            "'speech_to_text' has inputs that head=speech does not",
        ),
    ],
)
def test_settings_without_inputs_are_rejected(make, settings, length, message):
    """The error names the setting that no synthetic batch fits."""
    with pytest.raises(SettingError, match=message):
        make(config(**settings), length)
