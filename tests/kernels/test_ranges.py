"""Extremes of many tensors by one launch, and of tensors that wait for it; every case is compared with torch's aminmax."""

import math

import numpy as np
import pytest
import torch

from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.ranges.ranges import decode, extent_of, launch_ranges, reference_range
from halfstep.watching.backward_trace import BackwardTrace
from halfstep.watching.forward_trace import ForwardTrace
from halfstep.watching.places import Places
from halfstep.watching.probes import OverwrittenError, Probes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
needs_kernel = pytest.mark.skipif(
    not triton_runs_on(DEVICE), reason="needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)"
)


def cases(dtype):
    """Special values, sizes around a chunk, and views: of an unaligned address, in rows with gaps, permuted and expanded."""
    torch.manual_seed(0)
    x = torch.randn(3, 40, 3 * 64).to(dtype)
    tiny = torch.finfo(dtype).smallest_normal / 4
    rows = [[-0.0, 0.0], [math.nan, 1.0], [-math.nan, 1.0], [math.inf, -1.0], [-math.inf, tiny], [tiny, -tiny], [-5.0]]
    special = [torch.tensor(row).to(dtype) for row in rows]
    last = torch.zeros(2 * 32768 + 5).to(dtype)
    last[-1] = -math.inf
    views = [
        x[..., 64:128],
        x.view(3, 40, 3, 4, 16)[:, :, 1].permute(0, 2, 1, 3),
        x[1:].transpose(0, 1),
        x.view(-1)[1:],
        x[:1, :1, :1].expand(4, 5, 6),
    ]
    return [each.to(DEVICE) for each in [x, *special, last, torch.randn(32768).to(dtype)]] + [
        torch.empty_strided(v.shape, v.stride(), dtype=dtype, device=DEVICE).copy_(v) if 0 not in v.stride() else v.to(DEVICE)
        for v in views
    ]  # fmt: skip


def aminmax(tensor):
    return tuple(map(float, reference_range(tensor)))


@needs_kernel
def test_the_kernel_finds_the_extremes_that_the_reference_finds():
    """All dtypes and views in one table, NaN of both signs, infinities, zeros and subnormals included."""
    tensors = [tensor for dtype in DTYPES for tensor in cases(dtype)]
    tensors += [tensor[1:] for dtype in DTYPES for tensor in [torch.randn(70001, device=DEVICE).to(dtype)]]  # unaligned
    extents = [extent_of(tensor) for tensor in tensors]
    assert None not in extents
    assert any(extent.inner != extent.numel for extent in extents)
    table = launch_ranges(extents, [t.itemsize for t in tensors], DEVICE).cpu().numpy()
    measured = decode(table, [t.dtype for t in tensors])
    for tensor, pair in zip(tensors, measured, strict=True):
        assert np.array_equal(pair, aminmax(tensor), equal_nan=True), (tensor.dtype, tensor.shape, tensor.stride())


@pytest.mark.gpu
def test_on_a_gpu_lists_are_measured_in_several_launches(monkeypatch):
    """Views, special values and all dtypes, through probes whose waiting tensors exceed the limit several times."""
    monkeypatch.setattr("halfstep.watching.probes._most_waiting_bytes", lambda device: 1 << 16)
    probes, tensors = Probes(), [tensor for dtype in DTYPES for tensor in cases(dtype)]
    numbers = [probes.add(tensor) for tensor in tensors]
    assert len(probes._tables) > 1
    assert not probes._pairs
    ranges = probes.read()
    for tensor, number in zip(tensors, numbers, strict=True):
        measured = ranges[number].low, ranges[number].high
        assert np.array_equal(measured, aminmax(tensor), equal_nan=True), (tensor.dtype, tensor.shape, tensor.stride())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_is_decoded_without_rounding(dtype):
    """Keys computed by torch from the bits, for every kind of number."""
    values = torch.tensor([1.5, -2.25, 0.0, -0.0, math.inf, -math.inf, 1e-7, -1e-7]).to(dtype)
    bits = values.view(torch.int32 if dtype is torch.float32 else torch.int16).to(torch.int32)
    keys = bits ^ ((bits >> 31) & (0x7FFFFFFF if dtype is torch.float32 else 0x7FFF))
    table = torch.stack((~keys, keys), dim=1).numpy()
    assert decode(table, [dtype] * len(values)) == [(float(v), float(v)) for v in values]


def test_views_that_the_kernel_cannot_read_are_left_to_the_reference():
    """Columns, rows that are no whole vectors, other dtypes and sparse tensors have no extent."""
    x = torch.zeros(8, 12)
    assert extent_of(x[:, ::2]) is None
    assert extent_of(x[:, :3]) is None
    assert extent_of(x.double()) is None
    assert extent_of(x.to_sparse()) is None
    assert extent_of(x.t()) == extent_of(x)


@needs_kernel
def test_a_tensor_that_changes_before_its_measurement_is_noticed():
    """By its version, and by its address where it was freed."""
    probes, x = Probes(), torch.ones(4, device=DEVICE)
    probes.add(x, version=x._version)
    x.mul_(math.inf)
    with pytest.raises(OverwrittenError):
        probes.read()
    probes, x = Probes(), torch.ones(4, device=DEVICE)
    probes.add(x)
    x.untyped_storage().resize_(0)
    with pytest.raises(OverwrittenError):
        probes.read()


class InPlace(torch.autograd.Function):
    """Writes its result over its input and its gradient, and counts no version: as foreign kernels do."""

    @staticmethod
    def forward(ctx, x):
        return x.mul(1.0)

    @staticmethod
    def backward(ctx, grad):
        raw = torch.as_strided(grad.data, grad.shape, grad.stride())
        version = grad._version
        raw.fill_(math.inf)
        torch._C._autograd._unsafe_set_version_counter((grad,), (version,))
        return raw


@needs_kernel
def test_a_gradient_that_a_custom_function_overwrites_is_the_fault_of_that_function():
    """Not of the node that sent it, although both results are in one storage."""
    x = torch.ones(8, device=DEVICE, requires_grad=True)
    probes = Probes()
    trace = BackwardTrace(probes)
    loss = (InPlace.apply(x * 2) * 3).sum()
    with trace.of_graph([loss]):
        loss.backward()
    origin = trace.origin(probes.read())
    assert trace.nodes[origin.node].name == "InPlaceBackward"
    assert not origin.arrived


@needs_kernel
def test_an_operation_in_place_does_not_change_what_waits():
    """The value before it and the value after it are both measured, and running statistics before batch norm writes them."""
    probes, norm = Probes(), torch.nn.BatchNorm1d(3).to(DEVICE)
    trace = ForwardTrace(Places(torch.nn.Identity()), probes, dict(norm.named_buffers()))
    with trace:
        x = torch.ones(4, 3, device=DEVICE) * 2
        x.mul_(math.inf)
        norm(x)
    ranges = probes.read()
    names = {operation.name: operation for operation in trace.operations}
    assert [ranges[p].high for p in names["mul"].outputs] == [2.0]
    assert [ranges[p].high for p in names["mul_"].outputs] == [math.inf]
    assert {name for p, name in trace.named.items() if ranges[p].finite} == {"running_mean", "running_var"}
    assert not norm.running_mean.isfinite().all()
