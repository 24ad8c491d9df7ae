"""Cross-entropy without copies: every implementation against torch's own in float64, gradients included."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.kernels import cross_entropy as module
from halfstep.kernels import cross_entropy_launch as launch
from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.cross_entropy import Settings, cross_entropy, cross_entropy_as_on_cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = triton_runs_on(DEVICE)
# The kernels run on a GPU and in Triton's interpreter (TRITON_INTERPRET=1).
IMPLEMENTATIONS = {"reference": module.REFERENCE} | ({"fused": module.FUSED} if KERNELS else {})
by_each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
needs_kernels = pytest.mark.skipif(not KERNELS, reason="Requires: [a CUDA device, or TRITON_INTERPRET=1]")
EXAMPLES = 40 if DEVICE.type == "cuda" or not KERNELS else 12  # the interpreter takes up to a second each

LAUNCHED = {f"{form}_{way}_kernel" for form in ("rows", "tiles") for way in ("forward", "backward")} | {"reduce_kernel"}

# Relative rounding of a gradient: half a unit in the last place of its dtype, and fp32's own arithmetic.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2**-8 * 1.01, torch.float16: 2**-11 * 1.05, torch.float64: 1e-12}


@pytest.fixture(autouse=True)
def _quiet_numpy():
    """The interpreter computes in NumPy, which warns where a GPU gives inf or NaN."""
    with np.errstate(all="ignore"):
        yield


def make(shape, dtype, layout="plain", *, seed=0, size=3.0):
    """Logits of this shape: as torch makes them, with the classes last in memory, or as a slice of a larger tensor."""
    g = torch.Generator().manual_seed(seed)
    if layout == "classes last" and len(shape) > 1:
        memory = torch.randn((shape[0], *shape[2:], shape[1]), generator=g)
        logits = memory.movedim(-1, 1)
    elif layout == "slice":
        logits = torch.randn([s + 2 for s in shape], generator=g)[tuple(slice(1, s + 1) for s in shape)]
    else:
        logits = torch.randn(shape, generator=g)
    return (logits * size).to(DEVICE, dtype) if layout != "slice" else _sliced(logits * size, dtype)


def _sliced(logits, dtype):
    wide = torch.empty([s + 2 for s in logits.shape], dtype=dtype, device=DEVICE)
    part = wide[tuple(slice(1, s + 1) for s in logits.shape)]
    return part.copy_(logits)


def targets(shape, num_classes, *, seed=0, ignore=()):
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(0, num_classes, shape, generator=g)
    for at in ignore:
        target.view(-1)[at % max(1, target.numel())] = -100
    return target.to(DEVICE)


def without_classes(shape):
    return shape[:1] + shape[2:] if len(shape) > 1 else ()


def both(implementation, logits, target, weight=None, **options):
    """Loss and gradient by an implementation, and by torch in float64 on the same values."""
    ours, exact = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
    loss = module.apply(ours, target, weight, Settings(**options), implementation)
    values = Settings(**options)
    wide = None if weight is None else weight.double()
    expected = torch.ops.aten.cross_entropy_loss(
        exact, target, wide, values.reduction, values.ignore_index, values.label_smoothing
    )
    g = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    loss.backward(g)
    expected.backward(g.double())
    return (loss, ours.grad), (expected, exact.grad)


def assert_same(implementation, logits, target, weight=None, **options):
    (loss, grad), (expected, exact) = both(implementation, logits, target, weight, **options)
    assert loss.dtype is (torch.float64 if logits.dtype is torch.float64 else torch.float32)
    assert (grad.dtype, grad.shape, loss.shape) == (logits.dtype, logits.shape, expected.shape)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    # fp16's smallest numbers are 2^-24 apart.
    torch.testing.assert_close(grad.double(), exact, rtol=ROUNDING[logits.dtype], atol=3e-7, equal_nan=True)


shapes = st.sampled_from([(5,), (1, 1), (7, 1), (3, 10), (6, 33), (2, 5, 4), (2, 3, 2, 3), (2, 2, 2, 3, 2), (3, 1030)])
layouts = st.sampled_from(["plain", "classes last", "slice"])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@by_each
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    shape=shapes,
    layout=layouts,
    dtype=dtypes,
    reduction=st.integers(0, 2),
    smoothing=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    weighted=st.booleans(),
    ignore=st.lists(st.integers(0, 20), max_size=3),
    few_programs=st.booleans(),
    seed=st.integers(0, 99),
)
def test_loss_and_gradient_are_those_of_float64(
    implementation, shape, layout, dtype, reduction, smoothing, weighted, ignore, few_programs, seed
):
    """Any shape, strides, dtype, reduction, weights, smoothing and ignored positions: fp32 loss, rounded gradient."""
    num_classes = shape[0] if len(shape) == 1 else shape[1]
    weight = torch.rand(num_classes, generator=torch.Generator().manual_seed(seed)).to(DEVICE) if weighted else None
    target = targets(without_classes(shape), num_classes, seed=seed, ignore=ignore)
    logits = make(shape, dtype, layout, seed=seed)
    assume(implementation is module.REFERENCE or launch.layouts(logits) is not None)
    with pytest.MonkeyPatch.context() as patch:
        if few_programs:  # tiles of many positions, which a GPU gets for large batches only
            patch.setattr(launch, "ENOUGH_PROGRAMS", 1)
        assert_same(implementation, logits, target, weight, reduction=reduction, label_smoothing=smoothing)


@by_each
@pytest.mark.parametrize("num_classes", [1025, 4096, 4099, 9001])
def test_rows_longer_than_a_block_are_summed_once(implementation, num_classes):
    """Rows that end inside, at or after a block, start at any alignment, and lie apart by more than their length."""
    logits = make((3, num_classes), torch.bfloat16, seed=num_classes)
    target = targets((3,), num_classes, seed=1, ignore=[1])
    assert_same(implementation, logits, target, label_smoothing=0.1)
    wide = make((2, 3, num_classes + 1), torch.float16, seed=2)[:, :-1, :-1].transpose(
        1, 2
    )  # (2, C, 2), classes contiguous
    assert_same(implementation, wide, targets((2, 2), num_classes, seed=2), reduction=0)


@by_each
def test_expanded_logits_have_a_gradient_for_each_copy(implementation):
    """Logits that share memory, along positions or along classes, get a dense gradient."""
    for shape in ((1, 1100), (1, 7), (3, 1)):
        logits = make(shape, torch.float32).expand(3, max(7, shape[1]))
        assert_same(implementation, logits, targets((3,), logits.shape[1]))


@by_each
def test_a_target_at_either_end_of_a_row_is_in_its_gradient(implementation):
    """The first and the last class, in a tile and in a long row."""
    for num_classes in (9, 4099):
        logits = make((4, num_classes), torch.float32)
        target = torch.tensor([0, num_classes - 1, 1, num_classes - 2], device=DEVICE)
        assert_same(implementation, logits, target)


@by_each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_classes", [12, 1030])
def test_large_logits_have_accurate_probabilities(implementation, dtype, num_classes):
    """Logits around 10^4, whose exponentials overflow, give the loss and gradient of float64."""
    logits = (make((3, num_classes), torch.float32).double() + 1e4).to(dtype)
    assert_same(implementation, logits, targets((3,), num_classes))
    assert_same(implementation, -logits, targets((3,), num_classes), label_smoothing=0.1)


@by_each
@pytest.mark.parametrize("num_classes", [12, 5000])
def test_masked_classes_have_probability_and_gradient_zero(implementation, num_classes):
    """Logits of -inf, also in whole blocks at the beginning of a row, are as in torch; as a target, the loss is inf."""
    logits = make((3, num_classes), torch.bfloat16)
    logits[:, : num_classes - 4] = -torch.inf
    last = torch.tensor([num_classes - 1, num_classes - 4, num_classes - 2], device=DEVICE)
    assert_same(implementation, logits, last)
    (loss, _), (expected, _) = both(implementation, logits, last * 0, reduction=0)
    assert loss.isinf().all()
    assert expected.isinf().all()
    (loss, _), (expected, _) = both(implementation, logits, last, reduction=0, label_smoothing=0.1)
    assert torch.equal(loss.double(), expected)  # inf: a masked class has a share of the smooth target


@by_each
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("num_classes", [12, 1500])
def test_nan_and_inf_reach_the_loss_and_the_gradient(implementation, bad, num_classes):
    """A row with a NaN or +inf has a NaN loss and gradient, and no other row has."""
    logits = make((3, num_classes), torch.float16)
    logits[1, num_classes // 2] = bad
    (loss, grad), (expected, exact) = both(implementation, logits, targets((3,), num_classes), reduction=0)
    assert torch.equal(loss.isnan(), expected.isnan())
    assert torch.equal(grad.isnan(), exact.isnan())
    assert loss.isnan().tolist() == [False, True, False]


@by_each
@pytest.mark.parametrize("num_classes", [12, 1500])
def test_ignored_positions_have_no_gradient_whatever_their_logits(implementation, num_classes):
    """An ignored position with NaN logits has loss and gradient 0."""
    logits = make((3, num_classes), torch.bfloat16)
    logits[1] = torch.nan
    (loss, grad), _ = both(implementation, logits, targets((3,), num_classes, ignore=[1]))
    assert loss.isfinite()
    assert not grad[1].any()
    assert grad[0].any()


@by_each
def test_all_ignored_gives_nan_for_the_mean_and_zero_for_the_sum(implementation):
    """As in torch; the gradient is 0 in both."""
    logits = make((3, 5), torch.float32)
    target = torch.full((3,), -100, device=DEVICE)
    for options in ({}, {"label_smoothing": 0.1}):
        (loss, grad), (expected, _) = both(implementation, logits, target, reduction=1, **options)
        assert loss.isnan()
        assert expected.isnan()
        assert not grad.any()
        assert_same(implementation, logits, target, reduction=2, **options)


@by_each
@pytest.mark.parametrize("num_classes", [12, 1500])
@pytest.mark.parametrize("target", [-1, 1 << 40, None])
def test_a_target_outside_the_classes_gives_nan_and_reads_nothing(implementation, num_classes, target):
    """NaN loss and gradient for that position alone."""
    logits = make((2, num_classes), torch.bfloat16).requires_grad_()
    index = torch.tensor([0, num_classes if target is None else target], device=DEVICE)
    for weight in (None, torch.ones(num_classes, device=DEVICE)):
        logits.grad = None
        loss = module.apply(logits, index, weight, Settings(reduction=0), implementation)
        loss.sum().backward()
        assert loss.isnan().tolist() == [False, True]
        assert logits.grad.isnan().any(dim=1).tolist() == [False, True]


@by_each
def test_ignore_index_may_be_a_class_and_targets_may_be_bytes(implementation):
    """A class can be ignored, and uint8 class indices work as in torch."""
    logits = make((4, 6), torch.float32)
    target = torch.tensor([2, 0, 5, 2], device=DEVICE)
    assert_same(implementation, logits, target, ignore_index=2)
    (loss, _), _ = both(implementation, logits, target, ignore_index=2)
    byte = module.apply(logits, target.to(torch.uint8), None, Settings(ignore_index=2), implementation)
    assert torch.equal(byte, loss)


@by_each
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "reduction": 0}, {"reduction": 2}], ids=str)
def test_the_gradient_can_be_differentiated(implementation, options):
    """create_graph=True gives the second derivatives of torch's own loss."""
    results = []
    for own in (True, False):
        logits = make((3, 7), torch.float32).requires_grad_()
        target, weight = targets((3,), 7, ignore=[2]), torch.linspace(0.5, 2, 7, device=DEVICE)
        values = Settings(**options)
        if own:
            loss = module.apply(logits, target, weight, values, implementation)
        else:
            loss = torch.ops.aten.cross_entropy_loss(
                logits, target, weight, values.reduction, values.ignore_index, values.label_smoothing
            )
        (grad,) = torch.autograd.grad(loss.square().sum(), logits, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), logits)
        results.append((grad.detach(), second))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_reference_passes_gradcheck_twice():
    """First and second derivatives of the reference agree with finite differences in fp64."""
    target, weight = torch.tensor([1, -100, 0]), torch.tensor([0.5, 1.0, 2.0, 1.5], dtype=torch.float64)
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def loss(x):
        return module.apply(x, target, weight, Settings(label_smoothing=0.1), module.REFERENCE)

    assert torch.autograd.gradcheck(loss, logits)
    assert torch.autograd.gradgradcheck(loss, logits)


def test_a_gradient_that_no_kernel_can_write_is_the_references():
    """An implementation that gives None leaves the gradient to the reference."""
    by_nobody = module.Implementation(module.REFERENCE.forward, lambda *_: None)
    assert_same(by_nobody, make((3, 5), torch.bfloat16), targets((3,), 5))


class Own(torch.Tensor):
    """A tensor subclass."""


FALLBACK = {
    "probabilities": lambda x, t: (x, x.softmax(1), None),
    "fp64": lambda x, t: (x.double(), t, None),
    "empty": lambda x, t: (x[:0], t[:0], None),
    "subclass": lambda x, t: (x.as_subclass(Own), t, None),
    "slice in five dimensions": lambda x, t: (make((2, 3, 2, 3, 2), x.dtype, "slice"), targets((2, 2, 3, 2), 3), None),
    "16-bit weight": lambda x, t: (x.as_subclass(Own), t, torch.ones(5, device=DEVICE).bfloat16()),
}


@pytest.mark.parametrize("case", FALLBACK.values(), ids=FALLBACK)
def test_what_the_kernels_do_not_support_is_computed_by_torch_in_fp32(case, monkeypatch):
    """Probabilities, fp64, empty batches and subclasses give torch's result on fp32 logits."""
    monkeypatch.setattr(module, "FEW_LOGITS", 0)
    logits, target, weight = case(make((3, 5), torch.bfloat16), targets((3,), 5))
    loss = cross_entropy(logits, target, weight, label_smoothing=0.1)
    wide = logits if logits.dtype is torch.float64 else logits.float()
    expected = F.cross_entropy(
        wide,
        target.float() if target.is_floating_point() else target,
        None if weight is None else weight.float(),
        label_smoothing=0.1,
    )
    assert loss.dtype is wide.dtype
    assert torch.equal(loss, expected) or (loss.isnan() and expected.isnan())


# torch's own forward-mode formulas load TorchScript, whose deprecation it announces.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transforms_and_forward_mode_give_torchs_derivatives(monkeypatch):
    """grad, vmap and jvp see through the loss."""
    monkeypatch.setattr(module, "FEW_LOGITS", 1)
    logits, target = make((3, 5), torch.float32), targets((3,), 5)
    loss = lambda x: cross_entropy(x, target)  # noqa: E731 - the function under test, with one argument
    grad = torch.func.grad(loss)(logits)
    torch.testing.assert_close(grad, torch.func.grad(lambda x: F.cross_entropy(x, target))(logits))
    stacked = torch.stack([logits, logits * 2])
    torch.testing.assert_close(torch.func.vmap(loss)(stacked), torch.stack([loss(logits), loss(logits * 2)]))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(logits, torch.ones_like(logits))
        tangent = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
    torch.testing.assert_close(tangent, (grad * 1.0).sum(), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_torch_compile_traces_torchs_operation():
    """A compiled function has no graph break at the loss, and its result and gradient are torch's."""
    logits, target = make((3, 5), torch.bfloat16).requires_grad_(), targets((3,), 5)
    loss = torch.compile(cross_entropy, backend="aot_eager", fullgraph=True)(logits, target)
    loss.backward()
    exact = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(exact, target)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad, exact.grad.bfloat16())


@pytest.mark.parametrize(
    "call",
    [
        lambda x, t: cross_entropy(x, t[:1]),
        lambda x, t: cross_entropy(x, t.to(torch.int32)),
        lambda x, t: cross_entropy(x, t, torch.ones(3, device=DEVICE)),
        lambda x, t: cross_entropy(x, t, label_smoothing=1.5),
        lambda x, t: cross_entropy(x, t, torch.ones(5, device=DEVICE, requires_grad=True)).backward(),
    ],
    ids=["shape", "index dtype", "weight shape", "smoothing", "weight gradient"],
)
def test_invalid_arguments_raise_torchs_errors(call):
    """What torch rejects is rejected."""
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        call(make((3, 5), torch.float32), targets((3,), 5))


@needs_kernels
def test_plain_logits_take_the_kernels_and_are_saved_themselves(monkeypatch):
    """The kernels run where they can and the logits are many, and backward has the logits, not a copy."""
    assert (
        "CrossEntropy"
        not in cross_entropy(make((3, 5), torch.float32).requires_grad_(), targets((3,), 5)).grad_fn.name()
    )
    monkeypatch.setattr(module, "FEW_LOGITS", 1)
    logits = make((3, 5), torch.bfloat16).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = cross_entropy(logits, targets((3,), 5))
    assert "CrossEntropy" in loss.grad_fn.name()
    assert sum(t.data_ptr() == logits.data_ptr() for t in saved) == 1
    assert all(t.numel() <= 13 for t in saved if t.data_ptr() != logits.data_ptr())


@needs_kernels
def test_results_are_bit_identical_from_run_to_run():
    """Sums over positions have a fixed order."""
    logits, target = make((12, 9), torch.bfloat16), targets((12,), 9)
    losses = {module.apply(logits, target, None, Settings(), module.FUSED).item() for _ in range(2)}
    assert len(losses) == 1


def test_logits_changed_after_the_loss_are_an_error_of_autograd():
    """The logits are saved, so a change in place is rejected instead of giving a wrong gradient."""
    logits = make((3, 5), torch.float32).requires_grad_()
    x = logits * 1
    loss = module.apply(x, targets((3,), 5), None, Settings(), module.REFERENCE)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("shape", [(4, 50), (2, 3, 8, 8), (6, 3000)])
@pytest.mark.parametrize("reduction", [0, 1])
def test_fake_tensors_allocate_the_gradient_and_a_few_numbers_per_position(shape, reduction, monkeypatch):
    """On fake tensors the planner sees the shapes, dtypes and saved tensors of the kernels, and nothing runs."""
    monkeypatch.setattr(module, "FEW_LOGITS", 1)
    saved = []
    with FakeTensorMode():
        logits = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        target = torch.empty(without_classes(shape), dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            loss = cross_entropy_as_on_cuda(logits, target, reduction=reduction)
        loss.sum().backward()
    assert (loss.dtype, tuple(loss.shape)) == (torch.float32, without_classes(shape) if reduction == 0 else ())
    assert (logits.grad.dtype, logits.grad.shape) == (torch.bfloat16, logits.shape)
    numbers = sum(t.numel() for t in saved if t.dtype is torch.float32)
    assert 2 * target.numel() <= numbers <= 4 * target.numel() + 1
    assert sum(t.numel() for t in saved if t.dtype is torch.bfloat16) == logits.numel()


@pytest.mark.parametrize(
    ("logits", "rows", "programs"),
    [
        (torch.empty(8192, 50257, device="meta", dtype=torch.bfloat16), True, 8192),
        (torch.empty(8, 1023, 32000, device="meta", dtype=torch.bfloat16).transpose(1, 2), True, 8 * 1023),
        (torch.empty(128, 1000, device="meta", dtype=torch.bfloat16), False, 128),
        (torch.empty(8, 21, 512, 512, device="meta", dtype=torch.bfloat16), False, 8 * 512 * 512 // 1024),
    ],
    ids=["vocabulary", "classes last", "small", "images"],
)
def test_launches_fit_the_strides(logits, rows, programs):
    """Long contiguous rows get a program each; few rows are spread over many programs; images get vectors of positions."""
    shape = launch.launch_shape(launch.layouts(logits), logits)
    assert (shape.rows, shape.num_programs) == (rows, programs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_but_the_gradient_is_as_large_as_the_logits(dtype):
    """Peak memory of forward and backward is the gradient's, plus a few numbers per position."""
    logits = torch.randn(4096, 50257, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.randint(0, 50257, (4096,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cross_entropy(logits, target).backward()
    assert torch.cuda.max_memory_allocated() - before <= logits.nbytes + (1 << 20)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
def test_three_launches_and_a_graph_can_capture_them(monkeypatch):
    """Two kernels forward, one backward, no host synchronisation: a captured step replays on new logits."""
    monkeypatch.setattr(module, "FEW_LOGITS", 1)
    logits = torch.randn(128, 1000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 1000, (128,), device="cuda")

    def step():
        logits.grad = None
        loss = cross_entropy(logits, target)
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with (
        warnings.catch_warnings(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
    ):
        warnings.simplefilter("ignore")  # torch's profiler announces changes of its own
        step()
        torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        launches = [e.name for e in profile.events() if e.name in LAUNCHED]
    assert sorted(launches) == ["reduce_kernel", "tiles_backward_kernel", "tiles_forward_kernel"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    with torch.no_grad():
        logits.copy_(torch.randn_like(logits))
    graph.replay()
    expected = F.cross_entropy(logits.detach().double(), target)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
