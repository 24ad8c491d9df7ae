"""Which modules of a model are its repeated blocks."""

import pytest
import torch
from torch import nn

from halfstep.engine.repeats import repeated_blocks


class Layer(nn.Module):
    """A small residual block."""

    def __init__(self, width=8, parts=0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(parts))


class Tower(nn.Module):
    """Layers in a list."""

    def __init__(self, num_layers=3, width=8):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))


class Named(nn.Module):
    """Modules under given names, as attributes."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def names(model):
    """The stacks of a model as {name: names of its blocks}."""
    stacks = repeated_blocks(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for stack in stacks:
        assert len(stack.blocks) > 1
        for name, block in stack.blocks:
            assert modules[name] is block
    return {stack.name: [name.removeprefix(stack.name).lstrip(".") for name, _ in stack.blocks] for stack in stacks}


def test_layers_in_every_kind_of_list_are_blocks():
    """ModuleList, Sequential, ModuleDict and attributes alike."""
    layers = [Layer() for _ in range(3)]
    assert names(Named(a=nn.ModuleList(layers))) == {"a": ["0", "1", "2"]}
    assert names(nn.Sequential(*layers)) == {"": ["0", "1", "2"]}
    assert names(Named(a=nn.ModuleDict({"x": layers[0], "y": layers[1]}))) == {"a": ["x", "y"]}
    assert names(Named(x=layers[0], head=nn.Linear(8, 2), y=layers[1])) == {"": ["x", "y"]}


def test_the_outermost_repeats_of_a_list_count():
    """The parts of a block are not blocks, also if they repeat."""
    assert names(nn.Sequential(Layer(parts=2), Layer(parts=2))) == {"": ["0", "1"]}
    assert names(nn.Sequential(nn.Linear(8, 8), Layer(parts=2))) == {"1.parts": ["0", "1"]}


def test_equal_towers_are_two_stacks_of_layers():
    """Two equal networks as attributes are lists of layers, not two blocks; two that repeat nothing are blocks."""
    assert names(Named(actor=Tower(), critic=Tower())) == {
        "actor.layers": ["0", "1", "2"],
        "critic.layers": ["0", "1", "2"],
    }
    mlp = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    assert names(Named(q1=mlp[0], q2=mlp[1])) == {"": ["q1", "q2"]}


def test_stages_of_different_width_are_looked_into():
    """Stages of one class and different shapes are not blocks; the blocks inside each of them are."""
    model = nn.Sequential(Tower(2, 8), Tower(3, 16), Tower(1, 4))
    assert names(model) == {"0.layers": ["0", "1"], "1.layers": ["0", "1", "2"]}


def test_relatives_belong_to_a_stack_where_half_of_it_repeats():
    """A first block with more parameters is of the stack; in a list where few repeat, the others are not."""
    model = nn.ModuleList([Layer(parts=1), Layer(), Layer()])
    assert names(model) == {"": ["0", "1", "2"]}
    assert repeated_blocks(model)[0].num_structures == 2
    assert names(nn.ModuleList([Layer(2), Layer(4), Layer(6), Layer(), Layer()])) == {"": ["3", "4"]}


def test_single_layers_are_not_blocks():
    """Neither activations, nor norms, nor linear, convolution, embedding and recurrent layers, nor lists of those."""

    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    layers = [nn.GELU, lambda: nn.LayerNorm(4), RMSNorm, lambda: nn.Linear(4, 4), lambda: nn.Conv1d(4, 4, 3)]
    layers += [lambda: nn.Embedding(4, 4), lambda: nn.LSTM(4, 4), lambda: nn.Sequential(nn.Linear(4, 4))]
    layers += [lambda: nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])]
    for make in layers:
        assert names(nn.ModuleList([make(), make(), make()])) == {}
    assert names(nn.Linear(4, 4)) == {}


def test_a_block_of_two_owners_is_listed_once():
    """A layer that occurs twice in a list, or in two lists, is one block."""
    one, two = Layer(), Layer()
    assert names(nn.ModuleList([one, two, one])) == {"": ["0", "1"]}
    assert names(nn.ModuleList([one, one])) == {}
    assert names(Named(a=nn.ModuleList([one, two]), b=nn.ModuleList([one, two]))) == {"a": ["0", "1"]}


def test_the_lists_of_a_unet_level_are_stacks():
    """Residual blocks and attentions of one level are two stacks, and levels of different width are separate."""

    class Attention(Layer):
        """Another class with the same parameters."""

    def level(width):
        return Named(
            resnets=nn.ModuleList(Layer(width) for _ in range(2)),
            attentions=nn.ModuleList(Attention(width) for _ in range(2)),
        )

    model = Named(down_blocks=nn.ModuleList([level(8), level(16)]), mid=Layer(16))
    assert list(names(model)) == [f"down_blocks.{i}.{part}" for i in (0, 1) for part in ("resnets", "attentions")]


def test_the_layers_of_torch_transformers_are_blocks():
    """Encoder and decoder of nn.Transformer."""
    model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    assert names(model) == {"encoder.layers": ["0", "1"], "decoder.layers": ["0", "1", "2"]}


def test_the_blocks_of_timm_models():
    """One stack in a ViT, one for each stage of ConvNeXt and Swin."""
    timm = pytest.importorskip("timm", reason="needs timm and torchvision", exc_type=ImportError)
    with torch.device("meta"):
        assert list(names(timm.create_model("vit_tiny_patch16_224"))) == ["blocks"]
        assert list(names(timm.create_model("convnext_atto"))) == [f"stages.{i}.blocks" for i in range(4)]
        assert list(names(timm.create_model("swin_tiny_patch4_window7_224"))) == [
            f"layers.{i}.blocks" for i in range(4)
        ]


def test_the_blocks_of_transformers_models():
    """GPT-2, Llama, BERT, T5 with its first layers, and Whisper."""
    hf = pytest.importorskip("transformers", reason="needs transformers", exc_type=ImportError)
    with torch.device("meta"):
        assert list(names(hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=3)))) == ["transformer.h"]
        assert list(names(hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=3)))) == ["model.layers"]
        assert list(names(hf.BertModel(hf.BertConfig(num_hidden_layers=3)))) == ["encoder.layer"]
        t5 = repeated_blocks(hf.T5Model(hf.T5Config(num_layers=3)))
        assert [(s.name, len(s.blocks), s.num_structures) for s in t5] == [
            ("encoder.block", 3, 2),
            ("decoder.block", 3, 2),
        ]
        whisper = hf.WhisperModel(hf.WhisperConfig(encoder_layers=2, decoder_layers=2))
        assert list(names(whisper)) == ["encoder.layers", "decoder.layers"]
