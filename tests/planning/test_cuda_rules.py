"""CUDA's behaviour on fake CPU tensors, and its complete removal afterwards."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.engine.region import compute_region
from halfstep.kernels.cross_entropy import FEW_LOGITS
from halfstep.planning.attention import kernel_for
from halfstep.planning.cuda_rules import as_on_cuda, autocast_fp32
from halfstep.planning.fakes import new_mode
from halfstep.planning.recurrent import reserve_bytes


@pytest.fixture
def on_cuda():
    """Fake tensors that behave like CUDA tensors."""
    with new_mode(), as_on_cuda():
        yield


def test_layer_norm_returns_fp32_under_autocast(on_cuda):
    """CUDA's autocast computes layer norm, exp and sums in fp32, and linear layers in 16 bits."""
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.LayerNorm(8)(x).dtype is torch.float32
        assert x.exp().dtype is torch.float32
        assert x.sum(0).dtype is torch.float32
        assert nn.Linear(8, 8)(x).dtype is torch.bfloat16


def test_cross_entropy_computes_in_fp32(on_cuda):
    """Cross-entropy copies the logits to fp32 and computes in fp32, like an Engine region on CUDA."""
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(x, torch.zeros(4, dtype=torch.long))
    assert loss.dtype is torch.float32
    log_softmax = loss.grad_fn.next_functions[0][0]
    assert log_softmax.name() == "LogSoftmaxBackward0"
    assert log_softmax.next_functions[0][0].name() == "ToCopyBackward0"


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_16_bit_weights_meet_every_kind_of_cast(on_cuda, compute):
    """A plan computes decompositions and mixed dtypes of a lean model in the dtypes that a region on CUDA has."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    x, w, v = torch.randn(4, 8), torch.randn(8, 8, dtype=half, requires_grad=True), torch.randn(8, dtype=half)
    with compute_region("cpu", compute):
        decomposed = torch.slogdet(w)[1], torch.matrix_exp(w), torch.linalg.solve(w, x.t()), torch.fft.rfft(w).abs()
        mixed = torch.dot(v, x[0]), torch.lerp(x, w[:4], 0.5), x.clone().index_put_((torch.arange(4),), v)
        product = torch.mv(w, x[0])
        assert F.layer_norm(torch.mm(x, w), (8,), v).dtype is torch.float32
    assert {t.dtype for t in decomposed + mixed} == {torch.float32}
    assert product.dtype is half
    (sum(t.sum() for t in decomposed) + product.sum()).backward()
    assert w.grad.dtype is half


def test_dropout_saves_a_mask_of_bytes(on_cuda):
    """Dropout in training uses CUDA's fused kernel with a boolean mask; at rate 0 it returns its input."""
    x = torch.randn(4, 8, requires_grad=True)
    assert F.dropout(x, 0.1).grad_fn.name() == "NativeDropoutBackward0"
    assert F.dropout(x, 0.0) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_products_in_any_precision(on_cuda, dtype):
    """Grouped products have the right shapes in fp32 and fp16 too, and gradients for both factors."""
    x = torch.randn(24, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 16, 40, dtype=dtype, requires_grad=True)
    out = torch._grouped_mm(x, weight, offs=torch.tensor([6, 12, 18, 24], dtype=torch.int32))
    assert (out.shape, out.dtype) == ((24, 40), dtype)
    out.sum().backward()
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


def test_registrations_are_removed():
    """After the block the CPU behaves as before."""
    with new_mode(), as_on_cuda():
        pass
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.LayerNorm(8)(x).dtype is torch.bfloat16
    assert F.dropout(torch.ones(4, requires_grad=True), 0.5).grad_fn.name() == "MulBackward0"


def test_fp32_list_is_read_from_this_torch():
    """The list has the operations that CUDA's autocast of the installed torch runs in fp32."""
    assert {"layer_norm", "exp", "group_norm", "mse_loss"} <= set(autocast_fp32())


@pytest.mark.parametrize(
    ("dtype", "mask", "heads", "kernel"),
    [
        (torch.bfloat16, None, 4, "flash"),
        (torch.float16, None, 2, "flash"),
        (torch.float32, None, 4, "efficient"),
        (torch.float32, None, 2, "math"),
        (torch.bfloat16, "plain", 4, "efficient"),
        (torch.bfloat16, "learnt", 4, "efficient"),
        (torch.float32, "permuted", 4, "math"),
        (torch.bfloat16, "permuted", 4, "math"),
    ],
)
def test_attention_kernel(dtype, mask, heads, kernel):
    """16 bits use flash attention, masks and fp32 the memory-efficient kernel, grouped fp32 and permuted masks the formula."""
    q, k = torch.zeros(2, 4, 8, 16, dtype=dtype), torch.zeros(2, heads, 8, 16, dtype=dtype)
    bias = None if mask is None else torch.zeros(2, 4, 8, 8, dtype=dtype, requires_grad=mask == "learnt")
    if mask == "permuted":  # as in T5: an embedding of (rows, columns, heads)
        bias = torch.zeros(8, 8, 4, dtype=dtype).permute(2, 0, 1)[None]
    assert kernel_for(q, k, k, bias) == kernel


def test_attention_runs_forward_and_backward(on_cuda):
    """Every kernel returns the query's shape, also with padded heads and boolean masks, and gradients for all three inputs."""
    learnt = torch.zeros(1, 4, 6, 6, dtype=torch.bfloat16, requires_grad=True)
    for size, mask in ((16, None), (12, None), (16, torch.ones(2, 1, 6, 6, dtype=torch.bool)), (16, learnt)):
        qkv = [torch.randn(2, 4, 6, size, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        out = F.scaled_dot_product_attention(*qkv, mask)
        assert out.shape == qkv[0].shape
        out.sum().backward()
        assert all(t.grad.shape == t.shape for t in qkv)
    assert learnt.grad.shape == learnt.shape


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_one_call(on_cuda, kind):
    """A recurrent layer has the shapes and gradients of torch's, without a loop over time steps."""
    layer = kind(8, 16, 2, batch_first=True, bidirectional=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = layer(torch.randn(3, 50, 8))
    assert out.shape == (3, 50, 32)
    assert (state[0] if kind is nn.LSTM else state).shape == (4, 3, 16)
    out.sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.shape == p.shape for p in layer.parameters())


def test_reserve_is_as_measured():
    """One, two and three LSTM layers save 5, 11 and 17 times their hidden states, as measured on an H200."""
    assert [reserve_bytes("lstm", 1, layers) for layers in (1, 2, 3)] == [5, 11, 17]


def traced_dtypes():
    """The output dtypes of a region's softmax and sum while they are traced, as by torch.compile."""
    with compute_region("cpu", "fp16"):
        h = FakeTensorMode().from_tensor(torch.ones(2, 4, dtype=torch.float16))
        return h.softmax(-1).dtype, h.sum().dtype


def test_region_traced_after_a_plan_has_its_own_rule():
    """torch's table of Python kernels, which tracing uses, does not contain the plan's kernels any more."""
    assert traced_dtypes() == (torch.float32, torch.float32)
    with new_mode(), as_on_cuda(), torch.autocast("cpu", torch.float16):
        assert torch.ones(2, 4, dtype=torch.float16).softmax(-1).dtype is torch.float32
    with compute_region("cpu", "fp16"):
        h = FakeTensorMode().from_tensor(torch.ones(2, 4, dtype=torch.float16))
        kinds = [node.target for node in make_fx(lambda x: x.softmax(-1))(h).graph.nodes if node.op == "call_function"]
    assert kinds == [torch.ops.aten._to_copy.default, torch.ops.aten._softmax.default]  # CUDA's kernel needs no copy


def test_region_first_entered_during_a_plan_has_the_full_rule():
    """The Engine's rule is derived from torch's own lists, not from those that a plan has changed; the plan's rule wins."""
    code = (
        "import torch\n"
        "from halfstep.planning.cuda_rules import as_on_cuda\n"
        "from halfstep.engine.region import compute_region\n"
        "with as_on_cuda(), compute_region('cpu', 'bf16'):\n"
        "    print(torch.nn.functional.layer_norm(torch.ones(2, dtype=torch.bfloat16), (2,)).dtype)\n"
        "with compute_region('cpu', 'bf16'):\n"
        "    print(torch.ones(2, dtype=torch.bfloat16).softmax(-1).dtype)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["torch.float32", "torch.float32"]


class Recorder(TorchDispatchMode):
    """Records the operations below autograd."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":  # the others are queries about a tensor
            self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def test_rms_norm_is_one_kernel(on_cuda):
    """RMS norm dispatches CUDA's fused kernel, saves its input without a copy, and has gradients for input and weight."""
    x, w = (torch.randn(*s, dtype=torch.bfloat16, requires_grad=True) for s in ((2, 5, 8), (8,)))
    saved = []
    with Recorder() as recorder, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = F.rms_norm(x, (8,), w)
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    assert recorder.names == ["aten._fused_rms_norm"]
    assert sorted(t.nbytes for t in saved) == sorted([x.nbytes, w.nbytes, 2 * 5 * 4])
    out.sum().backward()
    assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)
    assert F.rms_norm(x, (8,)).dtype is torch.bfloat16


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_group_norm_copies_a_channels_last_image(on_cuda, memory_format):
    """CUDA's kernel reads and writes the default format, and the copy is what the backward pass saves."""
    x = torch.randn(2, 8, 4, 4, dtype=torch.bfloat16).to(memory_format=memory_format).requires_grad_()
    norm, saved = nn.GroupNorm(1, 8, dtype=torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = norm(x)
    (image,) = (t for t in saved if t.shape == x.shape)
    storages = {t.untyped_storage()._cdata for t in (image, x)}
    assert len(storages) == (1 if memory_format is torch.contiguous_format else 2)
    assert out.is_contiguous()
    assert image.is_contiguous()
    out.sum().backward()
    assert (x.grad.shape, norm.weight.grad.shape) == (x.shape, norm.weight.shape)


def test_rms_norm_of_mixed_dtypes_is_the_formula(on_cuda):
    """With weights of another dtype CUDA computes the formula, as a CPU does."""
    with Recorder() as recorder:
        out = F.rms_norm(torch.randn(2, 8, dtype=torch.bfloat16), (8,), torch.ones(8))
    assert "aten.rsqrt" in recorder.names
    assert out.dtype is torch.bfloat16


REGIONS = (("bf16", False), ("fp16", False), ("bf16", True), ("fp16", True))  # compute, lean


@pytest.mark.parametrize(
    ("operation", "bits"),
    [
        (lambda x: F.layer_norm(x, (8,)), (32, 32, 16, 16)),
        (lambda x: F.group_norm(x, 2), (32, 32, 16, 16)),
        (lambda x: F.rms_norm(x, (8,)), (32, 32, 16, 16)),
        (lambda x: x.softmax(-1), (32, 32, 16, 16)),
        (lambda x: x.softmax(-1, dtype=torch.float32), (32, 32, 32, 32)),
        (lambda x: x.log_softmax(-1), (32, 32, 32, 32)),
        (lambda x: x.log(), (32, 32, 16, 16)),
        (lambda x: x.rsqrt(), (32, 32, 16, 16)),
        (lambda x: x.exp(), (32, 32, 16, 32)),
        (lambda x: x.reciprocal(), (32, 32, 16, 32)),
        (lambda x: x**2, (32, 32, 16, 32)),
        (lambda x: x**3, (32, 32, 16, 16)),
        (F.softplus, (32, 32, 16, 16)),
        (lambda x: F.interpolate(x[None, None], scale_factor=2), (32, 32, 16, 16)),
        (lambda x: x.sum(0), (32, 32, 32, 32)),
        (lambda x: x.logsumexp(-1), (32, 32, 32, 32)),
        (lambda x: F.mse_loss(x, x), (32, 32, 32, 32)),
    ],
)
def test_results_have_the_dtype_of_a_region_on_cuda(on_cuda, operation, bits):
    """Operations of CUDA's fp32 list give fp32 in autocast presets; in lean ones 16 bits where the region's rule does."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    results = []
    for compute, lean in REGIONS:
        with compute_region("cpu", compute, lean=lean):
            results.append(torch.finfo(operation(torch.rand(4, 8, dtype=dtypes[compute])).dtype).bits)
    assert tuple(results) == bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lean", [False, True])
def test_cross_entropy_saves_the_logits_without_a_copy(on_cuda, dtype, lean):
    """In a region cross-entropy is the fused kernel: the logits are the only saved tensor of their size."""
    logits = torch.randn(64, FEW_LOGITS // 64, dtype=dtype, requires_grad=True)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with compute_region("cpu", "bf16", lean=lean), hooks:
        loss = F.cross_entropy(logits, torch.zeros(64, dtype=torch.long))
    assert loss.dtype is torch.float32
    assert [t.dtype for t in saved if t.numel() == logits.numel()] == [dtype]
    loss.backward()
    assert logits.grad.dtype is dtype


def test_probabilities_as_targets_are_computed_by_torch(on_cuda):
    """Cross-entropy with probabilities as targets is not the fused kernel: torch computes it in fp32."""
    logits = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with Recorder() as recorder, compute_region("cpu", "bf16", lean=True):
        loss = F.cross_entropy(logits, torch.full((4, 8), 1 / 8))
    assert loss.dtype is torch.float32
    assert "aten._log_softmax" in recorder.names
