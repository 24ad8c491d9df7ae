"""The graph of a loss shows the formats that ran and the factors that were left in it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine_models import Net, batches, build, train_step
from halfstep.engine.engine import Engine
from halfstep.engine.graph import Products, leftover_factor, loss_results, products_of, wide_results


def engine_of(precision, **options):
    """A small linear model in an Engine."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return model, Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, **options)


def compute_row(engine):
    """The row of the truth table that shows what was computed in."""
    return dict(engine.truth().rows)["compute"]


class Doubled(torch.autograd.Function):
    """A custom function, whose graph is one node."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: nn.Linear(8, 8), 1),
        (lambda: nn.Linear(8, 8, bias=False), 1),
        (lambda: nn.Conv1d(3, 4, 3), 1),
        (lambda: nn.ConvTranspose1d(3, 4, 3), 1),
        (lambda: nn.GRU(8, 8, batch_first=True), 4),
    ],
)
def test_every_kind_of_product_is_counted(make, count):
    """Linear, convolution and recurrent layers are counted in the format of their results."""
    module, x = make(), torch.randn(2, 3, 8)
    for dtype, name in ((torch.float32, "fp32"), (torch.float64, "fp64")):
        out = module.to(dtype)(x.to(dtype))
        products = products_of((out[0] if isinstance(out, tuple) else out).sum())
        assert set(products.formats) == {name}
        assert products.total >= 1
        assert products.total == count or isinstance(module, nn.GRU)


def test_products_written_as_functions_are_counted():
    """Batched products, einsum and attention are products, and elementwise operations are not."""
    x = torch.randn(2, 3, 8, requires_grad=True)
    assert products_of((x @ x.mT).sum()).total == 1
    assert products_of(torch.einsum("bij,bkj->bik", x, x).sum()).total == 1
    assert products_of(F.scaled_dot_product_attention(x[None], x[None], x[None]).sum()).total >= 1
    assert products_of((x * x).softmax(-1).sum()) == Products()


def test_a_node_that_two_paths_reach_is_counted_once():
    """A graph is walked node by node, not path by path: a deep residual network has 2^depth paths."""
    x, layer = torch.randn(2, 8), nn.Linear(8, 8)
    for _ in range(60):
        x = x + layer(x)
    assert products_of(x.sum()).formats == {"fp32": 60}


def test_opaque_nodes_are_reported_as_such():
    """Custom functions, compiled code and re-entrant checkpoints are counted apart; other checkpoints are visible."""
    layer, x = nn.Linear(8, 8), torch.randn(2, 8, requires_grad=True)
    assert products_of(Doubled.apply(layer(x)).sum()) == Products({"fp32": 1}, {"custom autograd functions": 1})
    inside = products_of(checkpoint(layer, x, use_reentrant=True).sum())
    assert inside == Products({}, {"re-entrant checkpoints": 1})
    assert products_of(checkpoint(layer, x, use_reentrant=False).sum()) == Products({"fp32": 1}, {})
    compiled = torch.compile(layer, backend="aot_eager")
    assert products_of(compiled(x).sum()) == Products({}, {"compiled code": 1})


@pytest.mark.parametrize(
    ("edit", "factor"),
    [
        (lambda x: x / 4, 0.25),
        (lambda x: x * 0.25, 0.25),
        (lambda x: 0.25 * x, 0.25),
        (lambda x: (x / 4).double(), 0.25),
        (lambda x: x / torch.tensor(4.0), 0.25),
        (lambda x: x / 4 + (2 * x) / 4, 0.25),
        (lambda x: x.clone().div_(4), 0.25),
        (lambda x: x, None),
        (lambda x: x * x, None),
        (lambda x: x / 4 + x, None),
        (lambda x: torch.amp.GradScaler("cpu", init_scale=1024.0).scale(x), 1024.0),
    ],
)
def test_the_last_factor_of_a_loss_is_read_from_its_graph(edit, factor):
    """A constant factor of the whole loss is recognised however it is written, and the gradients stay the same."""
    weight = torch.randn(3, requires_grad=True)
    loss = edit(weight.sum())
    assert leftover_factor(loss) == factor
    (ours,) = torch.autograd.grad(loss, weight)
    (theirs,) = torch.autograd.grad(edit(weight.sum()), weight)
    assert torch.equal(ours, theirs)


def test_a_factor_inside_a_checkpoint_does_not_disturb_it():
    """Reading the factor runs no unpack hook, which a checkpoint allows once."""
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    loss = checkpoint(lambda x: layer(x).sum() / 4, x, use_reentrant=False)
    assert leftover_factor(loss) in {0.25, None}
    loss.backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    ("precision", "ran"), [("bf16", "bf16"), ("fp16", "fp16"), ("bf16-lean", "bf16"), ("fp32", "fp32")]
)
def test_the_compute_row_shows_what_ran(precision, ran):
    """Before the first step the row is the policy's intent; after it, the formats of the products."""
    model, _, engine = build(precision)
    assert "intended" in compute_row(engine)
    train_step(model, engine, batches(1)[0])
    assert compute_row(engine).startswith(f"{ran} in 2 of 2 matrix products on ")
    assert "not entered" not in compute_row(engine)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_forgotten_forward_block_is_reported(precision, caplog):
    """Products outside the block run in fp32: the table shows it, and one warning names the fix."""
    model, engine = engine_of(precision)
    for _ in range(3):
        engine.backward(model(torch.randn(4, 8)).pow(2).mean())
        engine.step()
    assert compute_row(engine).startswith("fp32 in 2 of 2 matrix products")
    assert compute_row(engine).endswith("engine.forward() was not entered")
    assert caplog.text.count("outside `with engine.forward():`") == 1


def test_a_block_forgotten_later_is_reported(caplog):
    """The first step is right and a later loss is computed outside the block: that one is reported."""
    model, engine = engine_of("bf16")
    for inside in (True, False, False):
        with engine.forward() if inside else torch.enable_grad():
            loss = model(torch.randn(4, 8)).pow(2).mean()
        assert caplog.text.count("outside `with") == 0 or not inside
        engine.backward(loss)
        engine.step()
    assert caplog.text.count("outside `with") == 1
    assert compute_row(engine).startswith("bf16 in 2 of 2")


def test_a_lean_loss_outside_the_block_is_reported(caplog):
    """16-bit weights compute in 16 bits anyway, but the loss then is 16-bit too."""
    model, engine = engine_of("bf16-lean")
    engine.backward(model(torch.randn(4, 8).bfloat16()).pow(2).mean())
    assert "outside `with engine.forward():`" in caplog.text


def test_losses_that_need_no_block_are_not_reported(caplog):
    """A penalty on the weights, a loss from another Engine's block, and fp32 policies are silent."""
    model, engine = engine_of("bf16")
    other, other_engine = engine_of("bf16")
    engine.backward(sum(p.pow(2).sum() for p in model.parameters()))
    engine.step()
    with other_engine.forward():
        loss = other(model(torch.randn(4, 8))).float().mean()
    engine.backward(loss)
    other.zero_grad()
    engine.step()
    model, engine = engine_of("fp32")
    engine.backward(model(torch.randn(4, 8)).mean())
    assert "outside" not in caplog.text


def test_every_loss_of_the_first_micro_batch_is_observed():
    """A micro-batch with several losses is reported as a whole, and later micro-batches add nothing."""
    model, engine = engine_of("bf16", accumulate=2)
    for _ in range(4):
        for _ in range(2):
            with engine.forward():
                loss = model(torch.randn(4, 8)).float().mean()
            engine.backward(loss)
        engine.step()
    assert compute_row(engine).startswith("bf16 in 4 of 4 matrix products")


def test_mixed_formats_are_all_shown():
    """A module in keep_fp32 runs in fp32, and the row shows both."""
    model = Net()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16,keep_fp32=head")
    train_step(model, engine, batches(1)[0])
    assert compute_row(engine).startswith("bf16 in 1, fp32 in 1 of 2 matrix products")


def test_compiled_code_is_not_claimed_as_observed():
    """The content of a compiled graph is not visible, so the row stays the intent and shows why."""
    model = nn.Linear(8, 8)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    compiled = torch.compile(model, backend="aot_eager")
    with engine.forward():
        loss = compiled(torch.randn(4, 8)).float().mean()
    engine.backward(loss)
    engine.step()
    assert "(intended; not observed inside 1 x compiled code)" in compute_row(engine)


@pytest.mark.parametrize(
    ("accumulate", "edit", "message"),
    [
        (4, lambda loss: loss / 4, "divided by 4, and accumulate=4"),
        (4, lambda loss: loss * 0.25, "divided by 4, and accumulate=4"),
        (3, lambda loss: loss / 3, "divided by 3, and accumulate=3"),
        (4, lambda loss: loss / 2, None),
        (1, lambda loss: loss / 1, None),
        (1, lambda loss: torch.amp.GradScaler("cpu").scale(loss), "multiplied by 65536"),
        (1, lambda loss: loss * 100, None),
    ],
)
def test_factors_left_in_the_loss_are_reported_once(accumulate, edit, message, caplog):
    """`loss / accumulate` and `scaler.scale(loss)` are what the Engine does itself."""
    model, engine = engine_of("fp32", accumulate=accumulate)
    for _ in range(2 * accumulate):
        with engine.forward():
            loss = edit(model(torch.randn(4, 8)).mean())
        engine.backward(loss)
        engine.step()
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == (message is not None)
    assert message is None or message in warnings[0]


def test_a_loss_is_made_of_its_functions_and_means():
    """Casts, scales and masks in between are passed over; what computed the logits is not part of the loss."""
    w, y = torch.randn(8, 4, requires_grad=True), torch.tensor([0, 1])
    logits = torch.ones(2, 8).bfloat16() @ w.bfloat16()
    each = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    scaled = torch.amp.GradScaler("cpu").scale((each * torch.tensor([1.0, 0.0])).mean() / 2)
    assert loss_results(scaled) == [("mean", "fp32"), ("nll_loss", "bf16"), ("log_softmax", "bf16")]
    assert loss_results(logits.float().square().mean()) == [("mean", "fp32")]
    assert loss_results(logits) == [("result", "bf16")]
    assert loss_results(torch.zeros((), requires_grad=True)) == [("result", "fp32")]


def test_large_fp32_results_are_listed_by_operation():
    """fp32 results at least an eighth as large as the largest product are summed by operation; smaller ones are not."""
    x, w = torch.randn(16, 32), torch.randn(32, 32, requires_grad=True)
    h = x @ w
    loss = (h * 2 + h.mean(-1, keepdim=True)).exp().sum()
    sizes = wide_results(loss)
    each = 4 * 16 * 32
    assert sizes == {"mul": each, "add": each, "exp": each, "mm": each}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert wide_results((x.bfloat16() @ w.bfloat16()).float().sum()) == {"to_copy": each}
