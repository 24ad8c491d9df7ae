"""halfstep.inspect in plain loops: what is stored, what one step computes in, and that nothing is changed by looking."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.errors import ExpectationError, SettingError


class Net(nn.Module):
    """A convolution, a norm with buffers, products without weights and two linear layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.mix(self.norm(self.conv(x.unsqueeze(1))))
        return self.head((x @ x.transpose(1, 2) @ x).mean(1))


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, generator=generator).to(dtype), torch.arange(4) % 3


def bits(*objects):
    """Every number of these states."""
    tensors, pending = [], [each.state_dict() for each in objects]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            tensors.append(value.clone())
        elif isinstance(value, dict):
            pending += list(value.values())
        elif isinstance(value, list | tuple):
            pending += value
    return tensors


def formats(inspection, key):
    return dict(inspection.as_dict()["facts"][key]["formats"])


def amp_loop(steps, observe=None):
    """Three steps of torch AMP with a scaler, accumulation and clipping, the step number `observe` under inspection."""
    model, scaler = Net(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inspection = None

    def step():
        for _ in range(2):
            x, y = batch()
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(x)
            scaler.scale(F.cross_entropy(logits.float(), y) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for number in range(steps):
        if number == observe:
            with halfstep.inspect(model, optimizer, scaler) as inspection:
                step()
        else:
            step()
    return bits(model, optimizer, scaler), inspection


def test_an_observed_step_has_the_same_bits():
    """Weights, buffers, states and the scaler after three steps do not depend on whether one of them was observed."""
    plain, _ = amp_loop(3)
    observed, _ = amp_loop(3, observe=1)
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))


class Attention(nn.Module):
    """A fused attention kernel."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        heads = self.mix(x).view(4, 6, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


class Recurrent(nn.Module):
    """Operators that torch chooses by device and mode."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.GRU(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)])

    def forward(self, x):
        for cell in self.cells:
            x, _ = cell(x)
        return x


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Dropout()),
        Attention,
        Recurrent,
    ],
    ids=["encoder", "conv", "attention", "recurrent"],
)
def test_models_of_all_kinds_have_the_same_bits(build):
    """The kernels that torch chooses, and random numbers, are the same in an observed step."""
    outcomes = []
    for observed in (False, True):
        torch.manual_seed(0)
        model, x = build(), torch.randn(4, 6, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with halfstep.inspect(model, optimizer) if observed else contextlib.nullcontext():
            model(x).square().mean().backward()
            optimizer.step()
        outcomes.append(bits(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_torch_amp_is_as_it_should_be():
    """fp32 weights, masters, states, loss and sums; bf16 compute: the expectations of a correct loop hold."""
    _, inspection = amp_loop(1, observe=0)
    inspection.expect(
        weights="fp32", master="fp32", states="fp32", loss="fp32", compute="bf16", backward="bf16", grads="fp32",
        accumulate="fp32", reduce="none", buffers="fp32", scaler="dynamic", step="applied", frozen="none",
    )  # fmt: skip
    assert inspection.as_dict()["bytes_per_parameter"]["weights"] == 4.0
    assert inspection.as_dict()["loss_scale"] == 65536.0


def test_what_is_stored_needs_no_step():
    """Weights and a missing master are read at once; what a step would show is not observed, with the way to observe it."""
    model = Net().bfloat16()
    inspection = halfstep.inspect(model, torch.optim.AdamW(model.parameters()))
    inspection.expect(weights="bf16", master="none", buffers="bf16")
    with pytest.raises(ExpectationError, match="half a ulp") as caught:
        inspection.expect(master="fp32")
    assert "conv.weight" in str(caught.value)
    with pytest.raises(ExpectationError, match=r"with halfstep.inspect\(model, optimizer, scaler\)"):
        inspection.expect(loss="fp32")
    with pytest.raises(ExpectationError, match="before the first step"):
        inspection.expect(states="fp32")
    assert isinstance(caught.value, AssertionError)


def test_a_16_bit_loop_is_seen_as_one():
    """Pure bf16 training computes its loss, gradients and sums in bf16, and each is named where it differs."""
    model = Net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    with halfstep.inspect(model, optimizer) as inspection:
        for _ in range(2):
            x, y = batch(torch.bfloat16)
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with pytest.raises(ExpectationError) as caught:
        inspection.expect(master="fp32", states="fp32", loss="fp32", grads="fp32", accumulate="fp32")
    lines = str(caught.value).splitlines()
    rows = {line.split()[0]: line.split()[1:3] for line in lines[2:7]}
    assert rows == {key: ["fp32", "bf16"] for key in ("states", "loss", "grads", "accumulate")} | {
        "master": ["fp32", "none"]
    }
    assert inspection.as_dict()["bytes_per_parameter"]["states"] == 4.0


def test_compute_is_observed_by_module():
    """A module that leaves autocast is named by its own name."""
    model = Net()

    def leave_autocast(module, inputs):
        return (inputs[0].float(),)

    model.head.register_forward_pre_hook(leave_autocast)
    forward = model.head.forward
    model.head.forward = torch.autocast("cpu", enabled=False)(forward)
    with halfstep.inspect(model) as inspection:
        x, y = batch()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        F.cross_entropy(logits.float(), y).backward()
    assert formats(inspection, "compute")["fp32"] == 1
    with pytest.raises(ExpectationError, match=r"compute +bf16 +bf16 \(\d\), fp32 \(1\) +head"):
        inspection.expect(compute="bf16")
    inspection.expect(compute="bf16|fp32")


def test_products_without_gradients_are_not_the_models_compute():
    """Rotary tables and a teacher under no_grad do not count; a frozen layer of the model does."""

    class Rotary(nn.Module):
        def forward(self, x):
            return x + (torch.ones(8, 2) @ torch.ones(2, 8)).sum().to(x.dtype)

    model = nn.Sequential(nn.Linear(8, 8), Rotary(), nn.Linear(8, 3)).bfloat16()
    model[0].requires_grad_(requires_grad=False)
    teacher = nn.Linear(8, 3)
    with halfstep.inspect(model) as inspection:
        with torch.no_grad():
            teacher(torch.ones(2, 8))
        model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
    assert formats(inspection, "compute") == {"bf16": 2}
    inspection.expect(frozen="bf16", weights="bf16")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_observed(reentrant):
    """Recomputation inside backward, in either implementation, neither fails nor counts as another backward."""
    model = Net()
    with halfstep.inspect(model) as inspection:
        x, y = batch()
        with torch.autocast("cpu", torch.bfloat16):
            logits = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        F.cross_entropy(logits.float(), y).backward()
    inspection.expect(compute="bf16", loss="fp32", grads="fp32", accumulate="none")


def test_the_loss_is_judged_by_what_computed_it():
    """A cast of the result, a scale or an average of micro-batches does not hide a 16-bit loss."""
    model = nn.Linear(8, 3).bfloat16()
    x, y = batch(torch.bfloat16)
    losses = {
        "bf16": [
            lambda logits: F.cross_entropy(logits, y).float() * 1024,
            lambda logits: (F.cross_entropy(logits, y, reduction="none") * torch.ones(4)).mean(),
            lambda logits: F.mse_loss(logits, torch.zeros(4, 3, dtype=torch.bfloat16)) / 4,
            lambda logits: -F.log_softmax(logits, -1).float()[:, 0].mean(),
        ],
        "fp32": [
            lambda logits: F.cross_entropy(logits.float(), y),
            lambda logits: (logits.float() ** 2).mean(),
            lambda logits: F.cross_entropy(logits.float(), y) + 0.1 * model.weight.float().norm(),
        ],
    }
    for form, functions in losses.items():
        for function in functions:
            with halfstep.inspect(model) as inspection:
                function(model(x)).backward()
            if form == "fp32":
                inspection.expect(loss="fp32")
            else:
                assert "bf16" in formats(inspection, "loss")


def test_a_skipped_step_is_seen_as_one():
    """With a fused optimizer the kernel skips, with another the scaler does not call it: both are a skipped step."""
    for fused in (False, True):
        model = nn.Linear(8, 3)
        optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=fused), torch.amp.GradScaler("cpu")
        for factor, outcome in ((float("inf"), "skipped"), (1.0, "applied")):
            with halfstep.inspect(model, optimizer, scaler) as inspection:
                scaler.scale(model(torch.ones(2, 8)).sum() * factor).backward()
                scaler.step(optimizer)
                scaler.update()
            inspection.expect(step=outcome)
            optimizer.zero_grad()


def test_nothing_stays_behind_when_the_body_raises():
    """Hooks, patched functions and modes are gone after an error, and what was known before is still there."""
    model = Net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    run, call = torch.autograd.backward, nn.Module.__call__
    inspection = halfstep.inspect(model, optimizer, scaler)
    before = inspection.result
    with pytest.raises(RuntimeError, match="mine"), inspection:
        model(batch()[0]).sum().backward()
        raise RuntimeError("mine")
    assert torch.autograd.backward is run
    assert nn.Module.__call__ is call
    assert "step" not in vars(scaler)
    assert not optimizer._optimizer_step_pre_hooks
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert inspection.result is before
    with inspection, pytest.raises(SettingError, match="already"):
        inspection.__enter__()


@pytest.mark.slow
def test_compiled_code_stays_compiled():
    """The compiled graph of a model runs under inspection, nothing is compiled again, and the loss outside of it is seen."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    compiled = torch.compile(model, backend="aot_eager")
    compiled(batch()[0]).sum().backward()
    graphs = counters["stats"]["unique_graphs"]
    with halfstep.inspect(compiled, torch.optim.SGD(model.parameters(), lr=0.1)) as inspection:
        x, y = batch()
        F.cross_entropy(compiled(x), y).backward()
    assert counters["stats"]["unique_graphs"] == graphs
    inspection.expect(loss="fp32", weights="fp32", compute="fp32", states="none")
    assert ("wrapped in", "torch.compile") in inspection.rows
    torch._dynamo.reset()


def test_an_engine_is_inspected_by_itself():
    """Of an Engine its own optimizers, scaler and EMA are read, and a lean preset is what it promises."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = halfstep.Engine(model, optimizer, "bf16-lean,states=8bit", accumulate=2, ema=0.9)
    with halfstep.inspect(engine) as inspection:
        for _ in range(2):
            x, y = batch()
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()
    inspection.expect(
        master="fp32", states="8bit", loss="fp32", compute="bf16", grads="fp32", accumulate="fp32", ema="fp32",
        scaler="none", step="applied", weights="bf16|fp32",
    )  # fmt: skip
    engine.close()


def test_the_table_is_readable():
    """Text, HTML and plain values have the same rows."""
    model = Net()
    inspection = halfstep.inspect(model, torch.optim.AdamW(model.parameters()))
    text, page = str(inspection), inspection._repr_html_()
    for name, value in inspection.rows:
        assert name in text
        assert value in text
        assert f">{name}<" in page
    assert text.count("not observed") == 3
    assert inspection.as_dict()["facts"]["master"] == {
        "observed": True, "formats": {"fp32": 123}, "note": "the weights themselves", "bytes": 0,
    }  # fmt: skip


def test_wrong_arguments_are_rejected():
    """A scaler in the place of the optimizer, or an unknown kind of EMA, is an error with the way out."""
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match="third argument"):
        halfstep.inspect(model, torch.amp.GradScaler("cpu"))
    with pytest.raises(SettingError, match="Pass its module"):
        halfstep.inspect(model, ema=3)


def test_optimizers_in_a_list_and_parts_in_a_dictionary():
    """Several modules and optimizers are one inspection."""
    parts = {"actor": nn.Linear(2, 2).bfloat16(), "critic": nn.Linear(2, 2)}
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts.values()]
    inspection = halfstep.inspect(parts, optimizers)
    assert formats(inspection, "master") == {"none": 6, "fp32": 6}
    inspection.expect(states="none")
