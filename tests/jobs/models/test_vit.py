import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.errors import SettingError
from halfstep.jobs import models
from halfstep.jobs.models.vit import SIZES, ViT


def tiny(**options):
    """A ViT small enough for a test, always with the same seed."""
    torch.manual_seed(0)
    return ViT(image_size=8, patch=4, dim=16, depth=2, heads=4, num_classes=5, **options)


def images(number=3):
    """A batch for `tiny`."""
    return torch.randn(number, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("vit_t_16", 5_717_416, 152),
        ("vit_s_16", 22_050_664, 152),
        ("vit_b_16", 86_567_656, 152),
        ("vit_l_16", 304_326_632, 296),
        ("vit_h_14", 632_045_800, 392),
    ],
)
def test_sizes_have_the_published_parameter_counts(name, parameters, tensors):
    """B, L and H have torchvision's parameter counts, T and S DeiT's; built on the meta device."""
    with torch.device("meta"):
        model = getattr(models, name)()
    counts = [p.numel() for p in model.parameters()]
    assert (sum(counts), len(counts)) == (parameters, tensors)
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_every_size_has_its_function():
    """SIZES and the public size functions have the same names."""
    assert set(SIZES) == {name for name in models.__all__ if name.startswith("vit_")}


def test_options_reach_the_model():
    """A size function passes image size, classes and options to the model."""
    with torch.device("meta"):
        model = models.vit_t_16(32, 7, channels=1, activation_checkpointing=True)
    assert model.activation_checkpointing
    assert model(torch.empty(1, 1, 32, 32, device="meta")).shape == (1, 7)


def test_block_is_the_formula_of_the_paper():
    """The fused attention equals softmax(q k^T / sqrt(d)) v written out head by head."""
    block = tiny().blocks[0].eval()
    x = torch.randn(2, 5, 16)
    y = block.norm1(x)
    q, k, v = block.attention.qkv(y).chunk(3, dim=-1)
    heads = []
    for h in range(4):
        part = slice(4 * h, 4 * h + 4)
        weights = (q[..., part] @ k[..., part].transpose(1, 2) / 2).softmax(-1)
        heads.append(weights @ v[..., part])
    z = x + block.attention.proj(torch.cat(heads, dim=-1))
    expected = z + block.mlp.down(F.gelu(block.mlp.up(block.norm2(z))))
    torch.testing.assert_close(block(x), expected)


def test_the_first_step_has_a_gradient_for_every_parameter():
    """No gradient is zero in the first step, because the last layer is not initialized to zero."""
    model = tiny()
    F.cross_entropy(model(images()), torch.tensor([0, 1, 2])).backward()
    # A shift of all keys moves no softmax, so only the key part of the qkv bias has no gradient.
    assert not [name for name, p in model.named_parameters() if not p.grad.abs().max() > 1e-9]


def test_stochastic_depth_leaves_out_blocks_in_training_only():
    """Each part of a block is left out with a rate that grows linearly from 0, and the kept ones are scaled up."""
    model = tiny(drop_path=0.5)
    assert torch.equal(model.eval()(images()), tiny().eval()(images()))
    torch.manual_seed(0)
    scales = model._draw_scales(torch.zeros(4000, 1, 1))
    assert scales.shape == (len(model.blocks), 2, 4000, 1, 1)
    assert torch.equal(scales[0], torch.ones_like(scales[0]))
    assert set(scales[-1].unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(scales.mean((1, 2, 3, 4)), torch.ones(len(model.blocks)), atol=0.05, rtol=0)
    block, x = model.blocks[0], torch.randn(3, 5, 16)
    assert torch.equal(block(x, torch.zeros(2, 3, 1, 1)), x)
    assert torch.equal(block(x, torch.ones(2, 3, 1, 1)), block(x))
    with pytest.raises(SettingError, match="drop_path"):
        tiny(drop_path=1.0)


def test_initial_values_depend_on_the_global_seed_alone():
    """Two models with the same seed are equal, bit for bit."""
    first, second = tiny().state_dict(), tiny().state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert first["class_token"].abs().max() == 0
    assert 0.01 < first["positions"].std() < 0.03
    assert 0.01 < first["head.weight"].std() < 0.02
    assert first["head.weight"].abs().max() <= 0.04


def test_materializing_from_meta_equals_building():
    """A model built on the meta device and reset on a real one equals a model built there."""
    with torch.device("meta"):
        model = tiny()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_runs_under_autocast_and_in_16_bit_weights(dtype):
    """Autocast and 16-bit weights both run forward and backward on fp32 images, with results close to fp32."""
    reference = tiny()(images())
    with torch.autocast("cpu", dtype=dtype):
        mixed = tiny()(images())
    assert mixed.dtype == dtype
    torch.testing.assert_close(mixed.float(), reference, atol=0.05, rtol=0.05)
    lean = tiny().to(dtype)
    logits = lean(images())
    assert logits.dtype == dtype
    logits.float().sum().backward()
    torch.testing.assert_close(logits.float(), reference, atol=0.05, rtol=0.05)
    assert all(p.grad.dtype == dtype for p in lean.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiles_without_graph_breaks(checkpointing):
    """torch.compile traces the model as a single graph, also with activation checkpointing."""
    model = tiny(dropout=0.1, drop_path=0.1, activation_checkpointing=checkpointing)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(images()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    torch._dynamo.reset()


def test_traces_on_fake_tensors():
    """The model runs on fake tensors, so shapes need neither memory nor computation."""
    with FakeTensorMode():
        model = tiny()
        logits = model(torch.randn(3, 3, 8, 8))
        logits.sum().backward()
        assert logits.shape == (3, 5)


def test_activation_checkpointing_changes_no_gradient():
    """Recomputed activations give the same loss and gradients, dropout included."""
    results = []
    for checkpointing in (False, True):
        model = tiny(dropout=0.2, activation_checkpointing=checkpointing)
        torch.manual_seed(3)
        loss = model(images()).square().sum()
        loss.backward()
        results.append((loss, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_dropout_is_off_in_eval():
    """Evaluation is deterministic."""
    model = tiny(dropout=0.5).eval()
    assert torch.equal(model(images()), model(images()))
    assert not torch.equal(model.train()(images()), model(images()))


def test_sizes_that_do_not_divide_are_rejected():
    """image_size must be a multiple of patch and dim of heads; the error has both numbers."""
    with pytest.raises(SettingError, match="image_size=10 is not a multiple of patch=4"):
        ViT(10, 4, 16, 1, 4, 5)
    with pytest.raises(SettingError, match="dim=18 is not a multiple of heads=4"):
        ViT(8, 4, 18, 1, 4, 5)


def test_images_of_another_shape_are_rejected():
    """The error has the actual and the expected shape."""
    for shape in [(2, 3, 8, 12), (2, 1, 8, 8), (3, 8, 8)]:
        with pytest.raises(SettingError, match=r"shape \(batch, 3, 8, 8\), not "):
            tiny()(torch.zeros(shape))
