"""The fused step, on a GPU or in Triton's interpreter (TRITON_INTERPRET=1): the reference, faults, odd shapes."""

import itertools
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import halfstep
from halfstep.backends import SingleDevice
from halfstep.engine.steps import choose_path, decide, take_step
from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.table import table_bytes
from halfstep.optim.fused import FusedStep

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not triton_runs_on(DEVICE), reason="Requires: [a CUDA device, or TRITON_INTERPRET=1]")

STEPS = 5 if DEVICE.type == "cuda" else 3  # the interpreter takes 0.3 s for each
SIZES = [(5,), (256,), (257,), (3, 100), (1,), (0, 4), (1500,), ()]
LAYOUTS = [
    (torch.float32, "none", "fp32"), (torch.float32, "none", "8bit"), (torch.bfloat16, "split", "fp32"),
    (torch.bfloat16, "split", "8bit"), (torch.bfloat16, "fp32", "fp32"), (torch.bfloat16, "split", "bf16"),
    (torch.bfloat16, "none", "fp32"), (torch.float16, "split", "fp32"), (torch.float16, "split", "8bit"),
    (torch.float16, "fp32", "bf16"),
]  # fmt: skip


def with_options(every):
    """Each layout with each of these options; in the interpreter with two of them in turn, so that each option occurs often."""
    if DEVICE.type == "cuda":
        return list(itertools.product(LAYOUTS, every))
    half = len(every) // 2
    return [(layout, every[(i + k) % len(every)]) for i, layout in enumerate(LAYOUTS) for k in (0, half)]


def build(dtype, master, states, *, seed=0, kernels=True, cls=halfstep.optim.AdamW, sizes=SIZES, **options):
    g = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(s, generator=g).to(DEVICE, dtype)) for s in sizes]
    optimizer = cls(params, lr=1e-2, master=master, states=states, **options)
    if not kernels:
        optimizer.step_together = lambda *, ready: False  # the torch reference
    return params, optimizer


def give_gradients(params, step, *, scale=1.0):
    g = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=g) * scale).to(p.device, p.dtype)


def state_of(params, optimizer):
    tensors = {}
    for i, p in enumerate(params):
        tensors[f"{i}.weight"] = p.detach().clone()
        tensors |= {f"{i}.{k}": v.clone() for k, v in optimizer.state[p].items()}
    return tensors


def identical(a, b):
    return [n for n in a if not torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8))]


@pytest.mark.parametrize(
    ("layout", "options"),
    with_options([{}, {"weight_decay": 0.1}, {"maximize": True, "betas": (0.0, 0.99)}, {"eps": 1e-3}]),
    ids=str,
)
def test_kernels_follow_the_torch_reference(layout, options):
    """Steps of kernel and reference give the same masters to fp32 rounding, and the same codes but for ties."""
    (a, kernel), (b, reference) = build(*layout, **options), build(*layout, kernels=False, **options)
    for step in range(STEPS):
        for params, optimizer in ((a, kernel), (b, reference)):
            give_gradients(params, step, scale=8.0)
            optimizer.grad_scale = torch.tensor(8.0, device=DEVICE)
            optimizer.found_inf = torch.tensor(0.0, device=DEVICE)
            optimizer.step()
    assert isinstance(kernel.__dict__.get("_fused"), FusedStep)
    loose = 1e-2 if layout[2] != "fp32" else 3e-6
    if layout[0] is not torch.float32 and layout[1] == "none":
        loose = 2e-2
    for p, q in zip(a, b, strict=True):
        mine, theirs = kernel.master_of(p), reference.master_of(q)
        assert torch.allclose(mine, theirs, rtol=loose, atol=loose * 1e-1)
        assert kernel.state[p]["step"].item() == STEPS


@pytest.mark.parametrize(
    ("layout", "rule"),
    with_options(
        [
            (halfstep.optim.SGD, {}),
            (halfstep.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
            (halfstep.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
            (halfstep.optim.SGD, {"momentum": 0.9, "nesterov": True}),
            (halfstep.optim.Lion, {"weight_decay": 0.1}),
            (halfstep.optim.Lion, {"betas": (0.0, 0.5), "maximize": True}),
        ]
    ),
    ids=str,
)
def test_sgd_and_lion_follow_their_references(layout, rule):
    """Steps of kernel and reference, every storage, every option, skipped steps among them."""
    cls, options = rule
    pairs = [build(*layout, cls=cls, **options), build(*layout, cls=cls, kernels=False, **options)]
    for step in range(STEPS + 1):
        for params, optimizer in pairs:
            give_gradients(params, step, scale=4.0)
            optimizer.grad_scale = torch.tensor(4.0, device=DEVICE)
            optimizer.found_inf = torch.tensor(float(step in {0, 3}), device=DEVICE)
            optimizer.step()
    (a, kernel), (b, reference) = pairs
    loose = 3e-6 if layout[2] == "fp32" and (layout[0] is torch.float32 or layout[1] != "none") else 2e-2
    for p, q in zip(a, b, strict=True):
        mine, theirs = kernel.master_of(p), reference.master_of(q)
        if cls is halfstep.optim.Lion and loose > 1e-3:  # the sign of a rounded moment may differ where it is near zero
            assert ((mine - theirs).abs() > 1e-3).sum() <= 1 + 0.05 * p.numel()
        else:
            assert torch.allclose(mine, theirs, rtol=loose, atol=loose * 1e-1)
        assert kernel.state[p]["step"].item() == STEPS - 1


@pytest.mark.parametrize("cls", [halfstep.optim.AdamW, halfstep.optim.Adam])
def test_one_step_is_within_4_ulp_of_float64(cls):
    """Master after one step against Adam in float64, in ulp of the larger of weight and update."""
    params, optimizer = build(torch.float32, "none", "fp32", cls=cls, weight_decay=0.05, sizes=[(4000,)])
    start = params[0].detach().double()
    give_gradients(params, 0)
    grad = params[0].grad.double()
    optimizer.step()
    twin = torch.nn.Parameter(start.clone())
    twin.grad = grad
    stock = torch.optim.AdamW if cls is halfstep.optim.AdamW else torch.optim.Adam
    stock([twin], lr=1e-2, weight_decay=0.05).step()
    size = torch.maximum(start.abs(), (twin.detach() - start).abs())
    ulp = torch.exp2(torch.floor(torch.log2(size)) - 23)
    assert ((params[0].detach().double() - twin.detach()).abs() / ulp).max() <= 4


@pytest.mark.parametrize(
    "layout", [one for one in LAYOUTS if one[2] == "fp32" and (one[1] != "none" or one[0] is torch.float32)]
)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (halfstep.optim.AdamW, {"weight_decay": 0.1}),
        (halfstep.optim.Adam, {"weight_decay": 0.1}),
        (halfstep.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (halfstep.optim.Lion, {"weight_decay": 0.1}),
    ],
    ids=str,
)
def test_one_step_of_the_kernel_is_within_2_ulp_of_the_reference(layout, cls, options):
    """Masters after one step, in ulp of the larger of weight and update, tails included."""
    pairs = [build(*layout, cls=cls, kernels=kernels, sizes=[(3000,), (77,)], **options) for kernels in (True, False)]
    for params, optimizer in pairs:
        give_gradients(params, 0, scale=4.0)
        optimizer.grad_scale = torch.tensor(4.0, device=DEVICE)
        before = [optimizer.master_of(p).double() for p in params]
        optimizer.step()
    (a, kernel), (b, reference) = pairs
    for p, q, start in zip(a, b, before, strict=True):
        mine, theirs = kernel.master_of(p).double(), reference.master_of(q).double()
        size = torch.maximum(start.abs(), (theirs - start).abs())
        ulp = torch.exp2(torch.floor(torch.log2(size)) - 23)
        assert ((mine - theirs).abs() / ulp).max() <= 2


def test_layouts_with_fp32_moments_have_the_same_masters():
    """Split, fp32 copy and plain fp32 weights give bit-identical masters from the same start and gradients."""
    outcomes = []
    g = torch.Generator().manual_seed(0)
    start = torch.randn(700, generator=g).to(torch.bfloat16)
    for dtype, master in ((torch.float32, "none"), (torch.bfloat16, "split"), (torch.bfloat16, "fp32")):
        param = torch.nn.Parameter(start.to(DEVICE, dtype, copy=True))
        optimizer = halfstep.optim.AdamW([param], lr=1e-3, master=master, states="fp32")
        for step in range(20):
            grads = torch.Generator().manual_seed(step)
            param.grad = torch.randn(700, generator=grads).to(torch.bfloat16).to(DEVICE, dtype)
            optimizer.step()
        outcomes.append(optimizer.master_of(param))
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_flagged_step_changes_no_bit(layout):
    """With found_inf set, weights, masters, moments, scales and step counts stay, first step included."""
    params, optimizer = build(*layout)
    for step in range(3):
        give_gradients(params, step)
        if step:
            optimizer.found_inf = torch.tensor(float(step == 1), device=DEVICE)
        before = state_of(params, optimizer) if step == 1 else None
        for p in params:
            if step == 1 and p.numel():
                p.grad.view(-1)[0] = math.nan
        optimizer.step()
        if before is not None:
            assert identical(before, state_of(params, optimizer)) == []


def test_the_same_run_gives_the_same_bits():
    """Deterministic from run to run, 8-bit rounding included."""
    finals = []
    for _ in range(2):
        params, optimizer = build(torch.bfloat16, "split", "8bit")
        for step in range(4):
            give_gradients(params, step)
            optimizer.step()
        finals.append(state_of(params, optimizer))
    assert identical(*finals) == []


def test_odd_addresses_strided_gradients_and_mixed_dtypes():
    """Tensors not aligned to 16 bytes, transposed gradients and several dtypes in one optimizer follow the reference."""
    base = torch.randn(1031, device=DEVICE)
    odd = torch.nn.Parameter(base[1:])
    assert odd.data_ptr() % 16
    wide = torch.nn.Parameter(torch.randn(40, 30, device=DEVICE))
    half = torch.nn.Parameter(torch.randn(600, device=DEVICE).bfloat16())
    params = [odd, wide, half]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    kernel = halfstep.optim.AdamW(params, lr=1e-2, master="split", states="fp32")
    reference = halfstep.optim.AdamW(twins, lr=1e-2, master="split", states="fp32")
    reference.step_together = lambda *, ready: False
    for _ in range(3):
        for p, q in zip(params, twins, strict=True):
            grad = (
                torch.randn(tuple(reversed(p.shape)), device=DEVICE).to(p.dtype).t()
                if p.dim() == 2
                else torch.randn_like(p)
            )
            p.grad, q.grad = grad, grad.clone()
        kernel.step()
        reference.step()
    for p, q in zip(params, twins, strict=True):
        assert torch.allclose(kernel.master_of(p), reference.master_of(q), rtol=3e-6, atol=1e-7)


def test_gradients_may_come_back_to_the_memory_of_an_earlier_step():
    """Three sets of addresses in turn, some not aligned, and transposed ones at an address of the others: as the reference."""
    params = [
        torch.nn.Parameter(torch.randn(24, 24, device=DEVICE)),
        torch.nn.Parameter(torch.randn(600, device=DEVICE)),
    ]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    kernel = halfstep.optim.AdamW(params, lr=1e-2, master="split", states="fp32")
    reference = halfstep.optim.AdamW(twins, lr=1e-2, master="split", states="fp32")
    reference.step_together = lambda *, ready: False
    memory = [[torch.zeros(p.numel() + 4, device=DEVICE) for p in params] for _ in range(3)]
    for step in range(9):
        for i, (p, q) in enumerate(zip(params, twins, strict=True)):
            offset = step % 3 == 1
            grad = memory[step % 3][i][offset : offset + p.numel()].view(p.shape)
            if step in {5, 6}:
                grad = grad.t()
            grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i)))
            p.grad, q.grad = grad, grad.clone()
        kernel.step()
        reference.step()
    for p, q in zip(params, twins, strict=True):
        assert torch.allclose(kernel.master_of(p), reference.master_of(q), rtol=3e-6, atol=1e-7)


def test_tensors_may_come_and_go_between_steps():
    """Parameters without a gradient are left out, step counts stay their own, groups may be added, rates changed."""
    params, optimizer = build(torch.float32, "none", "fp32", sizes=[(300,), (40,), (7,)])
    used = [{0, 1, 2}, {0, 2}, {1}, {0, 1, 2}]
    extra = torch.nn.Parameter(torch.ones(20, device=DEVICE))
    for step, chosen in enumerate(used):
        if step == 2:
            optimizer.add_param_group({"params": [extra], "lr": 0.5})
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        give_gradients(params, step)
        for i, p in enumerate(params):
            if i not in chosen:
                p.grad = None
        extra.grad = torch.ones_like(extra)
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [3, 3, 3]
    assert optimizer.state[extra]["step"].item() == 2
    assert torch.allclose(extra, torch.full_like(extra, (1 - 0.005) ** 2 - 0.995 * 0.5 - 0.5), atol=1e-4)


def patterns_of(dtype, seed):
    """Every fifth finite 16-bit number and the extremes, each with one of the residuals of another number."""
    weight = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    weight, ends = weight[weight.isfinite()], torch.finfo(dtype)
    weight = torch.cat([weight[::5], torch.tensor([0.0, -0.0, ends.max, ends.min, ends.tiny, 1.0], dtype=dtype)])
    limit = 1 << 15 if dtype is torch.bfloat16 else 1 << 14
    edges = torch.tensor([-limit, -1, 0, 1, limit - 1])
    low = edges[torch.randint(0, len(edges), weight.shape, generator=torch.Generator().manual_seed(seed))]
    return weight.to(DEVICE), low.to(torch.int16).to(DEVICE)


@pytest.mark.parametrize("master", ["split", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_kernel_reads_edited_weights_as_the_reference_does(dtype, master):
    """16-bit weights of all sizes next to masters of other weights: kernel and reference give the same bits, all of them finite."""
    weight, low = patterns_of(dtype, 0)
    ends = []
    for kernels in (True, False):
        param = torch.nn.Parameter(weight.clone())
        optimizer = halfstep.optim.SGD([param], lr=0.0, master=master)
        if not kernels:
            optimizer.step_together = lambda *, ready: False
        optimizer.start_master(param, torch.flip(weight.float(), [0]) if master == "fp32" else None)
        if master == "split":
            optimizer.state[param]["low"].copy_(low)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert param.isfinite().all()
        if master == "fp32":
            assert torch.equal(param, weight)
        ends.append(state_of([param], optimizer))
    assert identical(*ends) == []


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout[0] is not torch.float32], ids=str)
def test_kernels_follow_the_reference_on_edited_weights(layout):
    """Rows zeroed, weights clamped, copied, and moved to other memory between the steps."""
    pairs = [build(*layout, sizes=[(20, 30)]), build(*layout, kernels=False, sizes=[(20, 30)])]
    for step in range(5):
        for (param,), optimizer in pairs:
            give_gradients([param], step)
            optimizer.step()
            with torch.no_grad():
                param[step].zero_()
                param.data.clamp_(-1, 1)
                param[10 + step].fill_(1 / 3)
            if step == 2:
                param.data = param.data.clone()
    (a, kernel), (b, reference) = pairs
    loose = 3e-6 if layout[2] == "fp32" and layout[1] != "none" else 2e-2
    assert torch.allclose(kernel.master_of(a[0]), reference.master_of(b[0]), rtol=loose, atol=loose * 1e-1)


@pytest.mark.parametrize("entry", ["low", "exp_avg"])
def test_a_replaced_state_is_the_one_that_is_stepped(entry):
    """Loading and others put new tensors into the state; the kernel must not step at the addresses of the old ones."""
    (param,), optimizer = build(torch.bfloat16, "split", "fp32", sizes=[(300,)])
    for step in range(3):
        give_gradients([param], step)
        optimizer.step()
    old = optimizer.state[param][entry]
    optimizer.state[param][entry] = torch.zeros_like(old)
    unchanged = old.clone()
    give_gradients([param], 3)
    optimizer.step()
    assert torch.equal(old, unchanged)
    assert optimizer.state[param][entry].any()


def test_a_master_that_was_set_is_the_one_that_is_stepped():
    """set_master writes weight and low half in place, and the next step continues from them."""
    (param,), optimizer = build(torch.bfloat16, "split", "fp32", sizes=[(300,)])
    give_gradients([param], 0)
    optimizer.step()
    optimizer.set_master(param, torch.full((300,), 1 / 3, device=DEVICE))
    give_gradients([param], 1)
    optimizer.step()
    master = optimizer.master_of(param)
    assert 0 < (master - 1 / 3).abs().max() < 0.1


def test_training_resumes_from_a_loaded_state():
    """A loaded optimizer steps as the saved one would have."""
    params, optimizer = build(torch.bfloat16, "split", "8bit")
    give_gradients(params, 0)
    optimizer.step()
    copies, other = build(torch.bfloat16, "split", "8bit", seed=5)
    for p, q in zip(params, copies, strict=True):
        q.data.copy_(p)
    other.load_state_dict(optimizer.state_dict())
    for step in (1, 2):
        give_gradients(params, step)
        give_gradients(copies, step)
        optimizer.step()
        other.step()
    assert identical(state_of(params, optimizer), state_of(copies, other)) == []


@pytest.mark.gpu
def test_a_captured_step_follows_the_learning_rate():
    """The step is captured in a CUDA graph; between replays the learning rate changes and takes effect."""
    params, optimizer = build(torch.float32, "none", "fp32", sizes=[(1000,)], weight_decay=0.0)
    give_gradients(params, 0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    moved = []
    for lr in (1e-2, 0.0, 2e-2):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.prepare_replay()
        before = params[0].detach().clone()
        graph.replay()
        torch.cuda.synchronize()
        moved.append((params[0] - before).abs().max().item())
    assert moved[1] == 0.0
    assert moved[2] == pytest.approx(2 * moved[0], rel=0.2)


@pytest.mark.gpu
def test_no_call_of_the_step_synchronises():
    """After the first step nothing in it waits for the device."""
    from gpu_sync import no_synchronisation

    params, optimizer = build(torch.bfloat16, "split", "8bit")
    give_gradients(params, 0)
    optimizer.step()
    give_gradients(params, 1)
    torch.cuda.synchronize()
    with no_synchronisation():
        optimizer.step()


@pytest.mark.gpu
@pytest.mark.slow
def test_a_tensor_past_2_to_the_31_elements():
    """Offsets are 64-bit: the last element of a huge tensor is stepped like the first."""
    count = 2**31 + 300
    param = torch.nn.Parameter(torch.ones(count, device="cuda", dtype=torch.bfloat16))
    optimizer = halfstep.optim.AdamW([param], lr=1e-1, master="split", states="8bit", weight_decay=0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert param[0].item() == param[-1].item() == pytest.approx(0.9, abs=0.01)
    assert optimizer.state[param]["low"][-1] == optimizer.state[param]["low"][0]


@settings(max_examples=8 if DEVICE.type == "cpu" else 60, deadline=None)  # the interpreter takes a second each
@given(
    st.lists(st.integers(1, 1300), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.sampled_from(["fp32", "8bit"]),
    st.data(),
)
def test_one_bad_element_anywhere_makes_the_step_a_no_op(sizes, dtype, bad, states, data):
    """Pass 1 detects it at any position of any tensor, tails included, and pass 2 then changes no tensor."""
    master = "none" if dtype is torch.float32 else "split"
    params, optimizer = build(dtype, master, states, sizes=[(n,) for n in sizes])
    path, tables = choose_path(optimizer, torch.nn.ParameterList(params)), {}
    divisor = torch.full((), 2.0, device=DEVICE)
    before = None
    for step in range(3):
        give_gradients(params, step)
        if step:  # a first clean step fills the moments; the second step finds tables that are ready
            before = state_of(params, optimizer)
            which = data.draw(st.integers(0, len(sizes) - 1))
            params[which].grad[data.draw(st.integers(0, sizes[which] - 1))] = bad
        decision = decide([p.grad for p in params], divisor, 1.0, SingleDevice(), tables)
        take_step([path], decision, SingleDevice(), divides=True)
        assert decision.found_inf.item() == float(step > 0)
        if before is not None:
            assert identical(before, state_of(params, optimizer)) == []


def test_the_decision_of_the_kernel_is_that_of_torch():
    """Flag, norm and divisor from one launch equal those of the plain computation, clipped or not, finite or not."""
    from halfstep.kernels.gradstats_triton import judge

    for sums in ([1.0, 8.0], [0.0], [1e30, 1e30], [math.inf, 1.0], [math.nan, 1.0]):
        squares = torch.tensor(sums, device=DEVICE)
        for scale in (1.0, 1024.0, 0.0):
            divisor = torch.tensor(scale, device=DEVICE)
            norm = squares.sum().sqrt() / divisor
            flag = (~(norm.isfinite() & (divisor > 0))).float()
            for max_norm in (None, 1.0, 1):
                clipped = divisor if max_norm is None else divisor * ((norm + 1e-6) / max_norm).clamp(min=1)
                with np.errstate(all="ignore"):  # the interpreter computes in NumPy
                    judged = judge(squares, divisor, max_norm)
                for mine, wanted in zip(judged, (flag, norm, clipped), strict=True):
                    assert torch.allclose(mine, wanted, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.slow
def test_a_thousand_steps_track_torch():
    """Kernel AdamW stays with torch.optim.AdamW in fp32 over 1,000 steps, to the rounding that both accumulate."""
    generator = torch.Generator().manual_seed(3)
    start, target = (torch.randn(600, generator=generator) for _ in range(2))
    finals = []
    for make in (
        lambda p: halfstep.optim.AdamW(p, lr=1e-2, weight_decay=0.01, master="none", states="fp32"),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.01),
    ):
        param = torch.nn.Parameter(start.clone().to(DEVICE))
        optimizer = make([param])
        noise = torch.Generator().manual_seed(4)
        for _ in range(1000):
            pull = param.detach() - target.to(DEVICE)
            param.grad = pull + 0.1 * torch.randn(600, generator=noise).to(DEVICE)
            optimizer.step()
        finals.append(param.detach().double())
    assert (finals[0] - start.to(DEVICE)).abs().mean() > 0.5  # it moved
    assert (finals[0] - finals[1]).abs().max() <= 2e-5


@pytest.mark.gpu
def test_a_hundred_thousand_tensors_are_one_step():
    """10^5 small tensors of several sizes are stepped by the same few launches."""
    count = 100_000
    flat = torch.ones(count * 8, device="cuda")
    params = [torch.nn.Parameter(flat[8 * i : 8 * i + 1 + i % 8]) for i in range(count)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = halfstep.optim.AdamW(params, lr=0.1, weight_decay=0.0, master="none", states="fp32")
    tables = {}
    path = choose_path(optimizer, torch.nn.ParameterList(params))
    decision = decide([p.grad for p in params], torch.ones((), device="cuda"), None, SingleDevice(), tables)
    take_step([path], decision, SingleDevice(), divides=False)
    assert decision.norm.item() == pytest.approx(sum(p.numel() for p in params) ** 0.5, rel=1e-5)
    for i in (0, 1, 7, 99_999):
        assert torch.allclose(params[i], torch.full_like(params[i], 0.9))


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_the_tables_have_the_size_that_the_planner_counts(states):
    """`table_bytes`, which knows only sizes, gives the bytes of the tables that a step has built."""
    params, optimizer = build(torch.bfloat16, "split", states)
    give_gradients(params, 0)
    optimizer.step()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.int8}[states]
    assert optimizer._fused.table_bytes() == table_bytes([p.numel() for p in params], dtype)


def test_the_interpreter_switch_is_what_this_run_used():
    """On a CPU these tests mean something only in the interpreter."""
    assert DEVICE.type == "cuda" or os.environ["TRITON_INTERPRET"] == "1"


def test_stepping_in_parts_is_stepping_together(monkeypatch):
    """Parts, with the groups' settings of their own, end in the bits of one step; tables are built again only for other parts."""
    prepared = []
    prepare = FusedStep.prepare
    monkeypatch.setattr(FusedStep, "prepare", lambda self, *args: (prepared.append(self), prepare(self, *args))[1])
    sizes = [(5,), (300,), (4, 3), (0, 4), ()]
    (a, whole), (b, parts) = (build(torch.bfloat16, "split", "8bit", sizes=sizes) for _ in range(2))
    for params, optimizer in ((a, whole), (b, parts)):
        group = optimizer.param_groups[0]
        optimizer.param_groups = [group | {"params": params[:3]}, group | {"params": params[3:], "lr": 0.1}]
    first, second = parts.param_groups
    pairs = [(first if i < 3 else second, p) for i, p in enumerate(b)]
    splits = [(slice(0, 2), slice(2, None)), (slice(0, 2), slice(2, None)), (slice(0, 3), slice(3, None))]
    tables, flag = [{}, {}], torch.zeros((), device=DEVICE)
    for step, split in enumerate(splits):
        for optimizer in (whole, parts):
            optimizer.param_groups[1]["lr"] = 0.1 / (step + 1)
        for params in (a, b):
            give_gradients(params, step)
        whole.step()
        prepared.clear()
        for part, own in zip(split, tables, strict=True):
            parts.step_some(pairs[part], flag, own)
        assert len(prepared) == (2, 0, 2)[step]
        assert not identical(state_of(a, whole), state_of(b, parts))
    before = state_of(b, parts)
    give_gradients(b, 9)
    parts.step_some(pairs[:4], torch.ones((), device=DEVICE), tables[0])
    assert not identical(before, state_of(b, parts))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compiling_kernels_ahead_changes_nothing(layout):
    """No parameter, gradient or state exists afterwards that was not there before, and the step is the same."""
    (params, optimizer), (others, plain) = build(*layout), build(*layout)
    before = [p.detach().clone() for p in params]
    optimizer.compile_kernels()
    assert not optimizer.state
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(params, before, strict=True))
    for tensors, own in ((params, optimizer), (others, plain)):
        give_gradients(tensors, 0)
        own.step()
    assert not identical(state_of(params, optimizer), state_of(others, plain))
