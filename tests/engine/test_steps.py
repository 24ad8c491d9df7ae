"""The step: which way each optimizer goes and why, and that every way is unscale, clip and step."""

import logging

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halfstep import optim
from halfstep.backends import Backend, SingleDevice
from halfstep.engine.steps import Decision, StepPath, choose_path, decide, gradients_of, take_step, unscale_in_place

# Some versions of torch say so whenever a sparse tensor is made, here or in coalesce().
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ONE_RANK = SingleDevice()


def decision(found=0.0, divisor=1.0, norm=1.0):
    return Decision(torch.tensor(found), torch.tensor(norm), torch.tensor(divisor))


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


# --- which path -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
        lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, dampening=0.5),
    ],
    ids=["Adam", "AdamW", "SGD", "SGD with momentum", "amsgrad", "dampening without momentum"],
)
def test_stock_optimizers_are_switched_to_fused_and_that_is_logged(make, caplog):
    """Adam, AdamW and SGD as people build them: fused in every group and for later groups, with a line in the log."""
    model = small_net()
    optimizer = make(model.parameters())
    with caplog.at_level(logging.INFO, logger="halfstep"):
        path = choose_path(optimizer, model)
    name = type(optimizer).__name__
    assert path.kind == "fused"
    assert path.optimizer is optimizer
    assert path.reason == f"torch's fused {name}: unscale, clip and skip in its kernel"
    assert f"{name} was switched to fused=True" in caplog.text
    assert all(group["fused"] and not group["foreach"] for group in optimizer.param_groups)
    assert optimizer.defaults["fused"] is True
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert optimizer.param_groups[-1]["fused"] is True


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_built_fused_are_taken_without_a_word(make, caplog):
    """Nothing is switched, so nothing is said; Adagrad is fused only when built so."""
    model = small_net()
    with caplog.at_level(logging.INFO, logger="halfstep"):
        assert choose_path(make(model.parameters(), lr=0.1, fused=True), model).kind == "fused"
    assert not caplog.records


class Own(torch.optim.AdamW):
    """A subclass may do anything in its step."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.RMSprop, "torch has no fused RMSprop"),
        (torch.optim.NAdam, "torch has no fused NAdam"),
        (Own, "torch has no fused Own"),
        (torch.optim.Adagrad, "Adagrad was not built with fused=True"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1), "dampening with momentum"),
        (lambda p: torch.optim.Adam(p, foreach=True), "set by hand"),
        (lambda p: torch.optim.Adam(p, foreach=False), "set by hand"),
        (lambda p: torch.optim.SGD(p, fused=False), "set by hand"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable=True"),
    ],
    ids=["RMSprop", "NAdam", "subclass", "Adagrad", "dampening", "foreach", "no foreach", "no fused", "differentiable"],
)
def test_other_optimizers_are_stepped_on_the_host_with_the_reason(make, reason):
    """What torch cannot fuse, or the user decided otherwise, is left as it is."""
    model = small_net()
    optimizer = make(model.parameters())
    before = [dict(group) for group in optimizer.param_groups]
    path = choose_path(optimizer, model)
    assert path.kind == "plain"
    assert path.reason.startswith(f"{type(optimizer).__name__}, decided on the host: ")
    assert reason in path.reason
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in before
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fused", [True, None])
def test_sgd_does_not_step_16_bit_weights_on_a_cpu_by_torchs_fused_kernel(fused, dtype, caplog):
    """On Arm that kernel computes some elements from stray memory; a user who asked for it is told."""
    model = small_net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, fused=fused)
    with caplog.at_level(logging.INFO, logger="halfstep"):
        path = choose_path(optimizer, model)
    assert (path.kind, optimizer.param_groups[0]["fused"]) == ("plain", False if fused else None)
    assert "torch's fused SGD is wrong for 16-bit weights" in path.reason
    assert ("switched to fused=False" in caplog.text) == bool(fused)


def test_one_group_set_by_hand_is_enough():
    """An optimizer with one unfused group is not switched behind its owner's back."""
    a, b = small_net(), small_net()
    optimizer = torch.optim.SGD([{"params": a.parameters()}, {"params": b.parameters(), "foreach": True}])
    assert choose_path(optimizer, nn.ModuleList([a, b])).kind == "plain"
    assert not optimizer.param_groups[0]["fused"]


def test_sparse_and_complex_parameters_are_stepped_on_the_host():
    """Fused kernels take neither."""
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    assert "sparse gradients" in choose_path(torch.optim.SGD(model.parameters()), model).reason
    model = nn.Linear(2, 2, dtype=torch.complex64)
    assert "complex parameters" in choose_path(torch.optim.SGD(model.parameters()), model).reason


def test_devices_whose_fused_kernels_ignore_the_scale_are_stepped_on_the_host():
    """Only devices known to take grad_scale and found_inf are fused."""
    model = nn.Linear(2, 2, device="meta")
    assert "do not take a loss scale on meta" in choose_path(torch.optim.SGD(model.parameters()), model).reason


def test_lean_optimizers_go_their_own_way():
    """halfstep.optim classes follow the fused protocol themselves."""
    model = small_net().bfloat16()
    path = choose_path(optim.AdamW(model.parameters()), model)
    assert (path.kind, path.reason) == ("halfstep", "halfstep.optim.AdamW")


@pytest.mark.parametrize(
    "value", [torch.zeros(3), torch.ones(1), nn.Linear(2, 2), "yes"], ids=["buffer", "one", "module", "text"]
)
def test_a_member_that_happens_to_be_called_sparse_does_no_harm(value):
    """Only an embedding's sparse=True makes sparse gradients; the name belongs to the user."""
    model = nn.Module()
    model.layer = nn.Linear(2, 2)
    if isinstance(value, torch.Tensor):
        model.register_buffer("sparse", value)
    else:
        model.sparse = value
    assert choose_path(torch.optim.SGD(model.layer.parameters()), model).kind == "fused"


def test_sparse_gradients_made_by_a_function_are_stepped():
    """F.embedding(sparse=True) makes sparse gradients that no module announces; stock SGD takes them, so must this."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 2))

        def forward(self, index):
            return F.embedding(index, self.weight, sparse=True)

    model = Table()
    path = choose_path(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model(torch.tensor([1, 1])).sum().backward()
    gradients_of(dict(model.named_parameters()))
    take_step([path], decide([model.weight.grad], torch.tensor(2.0), None, ONE_RANK), ONE_RANK, divides=True)
    assert model.weight.detach()[:, 0].tolist() == [1, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "make", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)], ids=["Adam", "SGD"]
)
@pytest.mark.parametrize("as_number", [False, True])
def test_switching_an_optimizer_that_has_stepped_continues_where_it_was(make, as_number):
    """State from before the switch, old checkpoints' plain step numbers included, is used by the fused kernel."""
    ours, theirs = small_net(), small_net()
    a, b = make(ours.parameters()), make(theirs.parameters())
    x = torch.randn(6, 5)
    for i in range(6):
        if i == 3:
            path = choose_path(a, ours)
            if as_number:
                for state in a.state.values():
                    if "step" in state:
                        state["step"] = int(state["step"])
                path = choose_path_again(a, ours)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().sum().backward()
        if i < 3:
            a.step()
        else:
            take_step([path], decision(), ONE_RANK, divides=False)
        b.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def choose_path_again(optimizer, model):
    """As if the state had been plain numbers before the first choice."""
    for group in optimizer.param_groups:
        group["fused"] = group["foreach"] = None
    return choose_path(optimizer, model)


# --- the decision ---------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(-(10**6), 10**6).map(lambda i: i * 1e-4), min_size=1, max_size=20),
    st.sampled_from([1.0, 3.0, 1024.0, 65536.0]),
    st.sampled_from([None, 0.1, 1.0, 50.0]),
)
def test_the_decision_is_torchs_clip_on_true_gradients(values, divisor, max_norm):
    """The norm is of the unscaled gradients; dividing by the decision's divisor is unscale and clip_grad_norm_."""
    true = torch.tensor(values, dtype=torch.float64)
    scaled = (true * divisor).float()
    found = decide([scaled], torch.tensor(divisor), max_norm, ONE_RANK)
    assert found.found_inf.item() == 0
    assert found.norm.item() == pytest.approx(true.norm().item(), rel=1e-5, abs=1e-30)
    param = nn.Parameter(true.clone())
    param.grad = true.clone()
    if max_norm is not None:
        nn.utils.clip_grad_norm_([param], max_norm)
    assert torch.allclose(scaled.double() / found.divisor.double(), param.grad, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_bad_element_is_flagged_as_exactly_one(bad, max_norm):
    """Fused kernels skip only when the flag is exactly 1, so it is 0 or 1 and nothing else."""
    grads = [torch.ones(3), torch.tensor([1.0, bad], dtype=torch.float16)]
    found = decide(grads, torch.tensor(4.0), max_norm, ONE_RANK)
    assert found.found_inf.item() == 1
    assert found.found_inf.dtype is torch.float32
    assert found.found_inf.shape == found.norm.shape == found.divisor.shape == ()
    assert not found.norm.isfinite()


@pytest.mark.parametrize("divisor", [0.0, -1.0, torch.nan])
def test_a_divisor_that_cannot_divide_is_flagged(divisor):
    """A window of weight 0 or a broken scale skips the step instead of writing NaN."""
    assert decide([torch.ones(3)], torch.tensor(divisor), 1.0, ONE_RANK).found_inf.item() == 1


class Overflowing(Backend):
    """Another rank overflowed, and this one has half of the gradients."""

    def agree(self, found_inf):
        return torch.ones_like(found_inf)

    def total_norm(self, partial):
        return partial * 2**0.5


def test_flag_and_norm_are_those_of_all_ranks():
    """The backend has the last word on both, and clipping uses its norm."""
    decision = decide([torch.ones(2)], torch.tensor(1.0), 1.0, Overflowing())
    assert decision.norm.item() == pytest.approx(2)
    assert decision.divisor.item() == pytest.approx(2)
    assert decide([torch.ones(2)], torch.tensor(1.0), None, Overflowing()).found_inf.item() == 1


def test_no_gradients_decide_for_a_step():
    """A window in which nothing got a gradient is not an overflow."""
    found = decide([], torch.tensor(8.0), 1.0, ONE_RANK)
    assert (found.found_inf.item(), found.norm.item(), found.divisor.item()) == (0, 0, 8)


def test_coalescing_shows_a_sum_that_overflows():
    """Two rows of 40000 in fp16 are finite until they are summed."""
    param, dense, none = (
        nn.Parameter(torch.zeros(5, 1).half()),
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(2)),
    )
    rows = torch.full((2, 1), 40000.0, dtype=torch.float16)
    param.grad = torch.sparse_coo_tensor([[1, 1]], rows, (5, 1), check_invariants=True)
    dense.grad = torch.ones(2)
    assert decide([param.grad], torch.tensor(1.0), None, ONE_RANK).found_inf.item() == 0
    before = dense.grad
    gradients = gradients_of({"param": param, "dense": dense, "none": none})
    assert gradients.keys() == {"param", "dense"}
    assert gradients["param"] is param.grad
    assert param.grad.is_coalesced()
    assert gradients["dense"] is dense.grad is before
    assert decide([param.grad], torch.tensor(1.0), None, ONE_RANK).found_inf.item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_unscaling_divides_in_place(dtype):
    """Every dtype, also by a divisor that fp16 itself cannot hold, rounded once."""
    values = torch.tensor([65504.0, 3.0, -0.5, 1.5]).to(dtype)
    grad = values.clone()
    unscale_in_place([grad, torch.ones(2)], torch.tensor(2.0**17))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert torch.equal(grad, (values.to(wide) / 2.0**17).to(dtype))


def test_unscaling_reaches_sparse_and_conjugated_gradients():
    """The values behind a sparse gradient, and a complex one that is only noted as conjugated."""
    grad = torch.sparse_coo_tensor([[1, 3]], torch.tensor([2.0, 4.0]), (5,), check_invariants=True).coalesce()
    unscale_in_place([grad], torch.tensor(2.0))
    assert grad.to_dense().tolist() == [0, 1, 0, 2, 0]
    conj = torch.tensor([2 + 4j]).conj()
    unscale_in_place([conj], torch.tensor(2.0))
    assert conj.tolist() == [1 - 2j]


# --- the step -------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "fused SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.05),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=p[0].dtype is torch.float32),
    "fused with a tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01, dtype=torch.float64).to(p[0].dtype)),
    "plain RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "plain SGD with dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "plain foreach Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "halfstep AdamW": lambda p: (optim.AdamW if p[0].dtype is torch.float32 else torch.optim.AdamW)(p, lr=0.01),
    "halfstep SGD": lambda p: (optim.SGD if p[0].dtype is torch.float32 else torch.optim.SGD)(p, lr=0.05, momentum=0.9),
}
every_optimizer = pytest.mark.parametrize(("kind", "make"), OPTIMIZERS.items(), ids=OPTIMIZERS)


def train(model, path, inputs, scale, max_norm, bad_at=()):
    """The steps of a scaled run; the flags that were found."""
    flags = []
    for i, x in enumerate(inputs):
        model.zero_grad()
        (model(x).square().mean() * scale).backward()
        if i in bad_at:
            next(model.parameters()).grad[0, 0] = torch.inf
        grads = [p.grad for p in model.parameters()]
        found = decide(grads, torch.tensor(scale), max_norm, ONE_RANK)
        take_step([path], found, ONE_RANK, divides=True)
        flags.append(found.found_inf.item())
    return flags


@every_optimizer
@pytest.mark.parametrize(("scale", "max_norm"), [(1.0, None), (1024.0, None), (1.0, 0.05), (65536.0, 0.05)])
def test_every_path_is_unscale_clip_and_step(kind, make, scale, max_norm):
    """Against torch's own order, unscale, clip_grad_norm_, step, in float64 on the same inputs."""
    ours, reference = small_net(), small_net().double()
    path = choose_path(make(list(ours.parameters())), ours)
    assert path.kind == kind.split()[0]
    optimizer = make(list(reference.parameters()))
    inputs = [torch.randn(8, 5, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    for x in inputs:
        reference.zero_grad()
        reference(x.double()).square().mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        optimizer.step()
    assert train(ours, path, inputs, scale, max_norm) == [0.0] * 8
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.double(), q, rtol=1e-5, atol=2e-6)


@every_optimizer
@pytest.mark.parametrize("bad_at", [{0}, {2}, {0, 1, 3}], ids=["first", "middle", "several"])
def test_skipped_steps_never_happened(kind, make, bad_at):
    """A run with bad steps equals the run without them, bit for bit, on every path; nothing is left on the optimizer."""
    skipping, clean = small_net(), small_net()
    inputs = [torch.randn(8, 5, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    path = choose_path(make(list(skipping.parameters())), skipping)
    assert train(skipping, path, inputs, 16.0, 0.5, bad_at) == [float(i in bad_at) for i in range(6)]
    other = choose_path(make(list(clean.parameters())), clean)
    train(clean, other, [x for i, x in enumerate(inputs) if i not in bad_at], 16.0, 0.5)
    for p, q in zip(skipping.parameters(), clean.parameters(), strict=True):
        assert torch.equal(p, q)
        mine, theirs = path.optimizer.state[p], other.optimizer.state[q]
        assert mine.keys() == theirs.keys()
        assert all(
            torch.equal(torch.as_tensor(mine[n]), torch.as_tensor(theirs[n])) for n in mine if mine[n] is not None
        )
    assert not {"found_inf", "grad_scale"} & vars(path.optimizer).keys()


@pytest.mark.parametrize("plain", [False, True], ids=["on the device", "on the host"])
def test_one_bad_gradient_skips_all_optimizers(plain):
    """Several optimizers share one decision, whatever paths they take."""
    models = [small_net(i) for i in range(3)]
    makes = [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop if plain else optim.SGD]
    paths = [choose_path(make(m.parameters(), lr=0.1), m) for make, m in zip(makes, models, strict=True)]
    assert [p.kind for p in paths] == ["fused", "fused", "plain" if plain else "halfstep"]
    before = [p.detach().clone() for m in models for p in m.parameters()]

    def step(bad):
        for model in models:
            model.zero_grad()
            (model(torch.ones(2, 5)).square().mean() * 8).backward()
        if bad:
            models[1][0].weight.grad[0, 0] = torch.nan
        grads = [p.grad for m in models for p in m.parameters()]
        take_step(paths, decide(grads, torch.tensor(8.0), 1.0, ONE_RANK), ONE_RANK, divides=True)

    step(bad=True)
    assert all(torch.equal(p, q) for p, q in zip((p for m in models for p in m.parameters()), before, strict=True))
    step(bad=False)
    assert not any(torch.equal(p, q) for p, q in zip((p for m in models for p in m.parameters()), before, strict=True))


def test_several_optimizers_are_clipped_by_one_norm():
    """The divisor is shared: mixed paths move every parameter as one clip over all of them would."""
    models, references = [small_net(i) for i in range(2)], [small_net(i).double() for i in range(2)]
    paths = [choose_path(torch.optim.SGD(models[0].parameters(), lr=1.0), models[0]),
             choose_path(torch.optim.SGD(models[1].parameters(), lr=1.0, foreach=True), models[1])]  # fmt: skip
    assert [p.kind for p in paths] == ["fused", "plain"]
    x = torch.ones(2, 5)
    for model in models:
        (model(x).square().mean() * 4).backward()
    grads = [p.grad for m in models for p in m.parameters()]
    take_step(paths, decide(grads, torch.tensor(4.0), 0.1, ONE_RANK), ONE_RANK, divides=True)
    for model in references:
        model(x.double()).square().mean().backward()
    params = [p for m in references for p in m.parameters()]
    nn.utils.clip_grad_norm_(params, 0.1)
    torch.optim.SGD(params, lr=1.0).step()
    for p, q in zip((p for m in models for p in m.parameters()), params, strict=True):
        assert torch.allclose(p.double(), q, rtol=1e-5, atol=1e-6)


def test_sparse_gradients_are_unscaled_clipped_and_stepped():
    """A sparse embedding with duplicate rows moves as its dense twin in float64."""
    sparse, dense = nn.Embedding(6, 3, sparse=True), nn.Embedding(6, 3).double()
    dense.weight.data.copy_(sparse.weight.data)
    path = choose_path(torch.optim.SGD(sparse.parameters(), lr=0.5), sparse)
    index = torch.tensor([1, 1, 4, 2, 1])
    (sparse(index).square().sum() * 256).backward()
    gradients_of({"weight": sparse.weight})
    take_step([path], decide([sparse.weight.grad], torch.tensor(256.0), 1.0, ONE_RANK), ONE_RANK, divides=True)
    dense(index).square().sum().backward()
    nn.utils.clip_grad_norm_(dense.parameters(), 1.0)
    torch.optim.SGD(dense.parameters(), lr=0.5).step()
    assert torch.allclose(sparse.weight.double(), dense.weight, rtol=1e-5, atol=1e-6)


def test_complex_parameters_are_unscaled_clipped_and_stepped():
    """As torch does it in complex128, gradients with a lazy conjugate included."""
    start = torch.tensor([1 + 2j, -0.5 + 1j, 3j])
    ours, reference = nn.Parameter(start.clone()), nn.Parameter(start.to(torch.complex128))
    model = nn.ParameterList([ours])
    path = choose_path(torch.optim.SGD(model.parameters(), lr=0.5), model)
    ((ours.conj() * (1 + 2j)).real.sum() * 64).backward()
    take_step([path], decide([ours.grad], torch.tensor(64.0), 1.0, ONE_RANK), ONE_RANK, divides=True)
    (reference.conj() * (1 + 2j)).real.sum().backward()
    reference.grad = reference.grad.resolve_conj()  # torch's own clip_grad_norm_ rejects it otherwise
    nn.utils.clip_grad_norm_([reference], 1.0)
    torch.optim.SGD([reference], lr=0.5).step()
    assert torch.allclose(ours.to(torch.complex128), reference, rtol=1e-5, atol=1e-6)


def test_a_divisor_known_to_be_one_leaves_the_gradients_unread():
    """divides=False gives the kernel no scale, and the host path no division."""
    for make in (torch.optim.SGD, torch.optim.RMSprop, optim.SGD):
        model = small_net()
        optimizer = make(model.parameters(), lr=0.1)
        path, seen = choose_path(optimizer, model), []
        optimizer.register_step_pre_hook(lambda o, *_, seen=seen: seen.append(getattr(o, "grad_scale", None)))
        model(torch.ones(1, 5)).sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        take_step([path], decision(divisor=7.0), ONE_RANK, divides=False)
        assert seen == [None]
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


def test_an_error_in_step_leaves_nothing_on_the_optimizer():
    """The flag and the scale are taken off again, so that the next plain step() is plain."""
    model = small_net()
    path = choose_path(torch.optim.AdamW(model.parameters()), model)

    def fail(*_):
        raise ZeroDivisionError

    hook = path.optimizer.register_step_pre_hook(fail)
    model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        take_step([path], decision(), ONE_RANK, divides=True)
    assert not {"found_inf", "grad_scale"} & vars(path.optimizer).keys()
    hook.remove()
    path.optimizer.step()


@pytest.mark.parametrize("kind", ["fused", "halfstep"])
def test_the_device_paths_read_nothing_back(kind):
    """No value of a flagged or clear step is read by the host."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default, "the host read a device value"
            return func(*args, **(kwargs or {}))

    model = small_net()
    make = torch.optim.AdamW if kind == "fused" else optim.AdamW
    path = choose_path(make(model.parameters()), model)
    for bad in (False, True):
        model(torch.ones(1, 5)).sum().backward()
        if bad:
            model[0].bias.grad[0] = torch.nan
        with NoReading():
            grads = [p.grad for p in model.parameters()]
            take_step([path], decide(grads, torch.ones(()), 1.0, ONE_RANK), ONE_RANK, divides=True)


# --- a fault of stock torch -----------------------------------------------------------------------------------------


@pytest.fixture
def uninitialised_memory_is_nan():
    """Deterministic mode fills torch.empty with NaN, so that memory nobody wrote can be seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def skip_first_step(optimizer, param):
    """The first step of a stock fused optimizer, flagged, as GradScaler does it."""
    param.grad = torch.full_like(param, torch.inf)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


def test_stock_fused_sgd_leaves_its_momentum_uninitialised_after_a_skipped_first_step(uninitialised_memory_is_nan):
    """The buffer is created with torch.empty and not written when the flag is set; the next step then uses it."""
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, fused=True)
    skip_first_step(optimizer, param)
    assert torch.equal(param, torch.ones(4))
    assert optimizer.state[param]["momentum_buffer"].isnan().all()
    param.grad = torch.ones(4)
    optimizer.step()
    assert param.isnan().all()


@pytest.mark.parametrize("nesterov", [False, True])
def test_here_a_skipped_first_step_leaves_zero_momentum_and_training_continues(uninitialised_memory_is_nan, nesterov):
    """take_step leaves zeros where stock torch leaves garbage, and then trains like a run that never skipped."""
    ours, theirs = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.01}
    path = choose_path(torch.optim.SGD([ours], **options), nn.ParameterList([ours]))
    ours.grad = torch.full_like(ours, torch.inf)
    take_step([path], decision(found=1.0), ONE_RANK, divides=True)
    assert torch.equal(ours, torch.ones(4))
    assert torch.equal(path.optimizer.state[ours]["momentum_buffer"], torch.zeros(4))
    stock = torch.optim.SGD([theirs], **options)
    for i in range(5):
        ours.grad, theirs.grad = torch.full((4,), i + 1.0), torch.full((4,), i + 1.0)
        take_step([path], decision(), ONE_RANK, divides=False)
        stock.step()
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)


def test_a_parameter_that_joins_late_gets_its_momentum():
    """A layer whose first gradient comes at step 3 is stepped next to those that have momentum already."""
    early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    path = choose_path(torch.optim.SGD([early, late], lr=0.1, momentum=0.9), nn.ParameterList([early, late]))
    for i in range(4):
        early.grad, late.grad = torch.ones(3), torch.ones(3) if i >= 2 else None
        take_step([path], decision(), ONE_RANK, divides=False)
    assert torch.allclose(path.optimizer.state[early]["momentum_buffer"], torch.full((3,), 3.439))
    assert torch.allclose(path.optimizer.state[late]["momentum_buffer"], torch.full((3,), 1.9))


def test_step_paths_are_values():
    """A path cannot be changed after it was chosen."""
    path = choose_path(torch.optim.SGD(small_net().parameters()), small_net())
    assert isinstance(path, StepPath)
    with pytest.raises(AttributeError):
        path.kind = "plain"
