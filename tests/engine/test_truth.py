"""The truth table against the tensors it speaks of."""

import itertools
import json

import pytest
import torch
from torch import nn

import halfstep
from halfstep.engine.casting import cast_model
from halfstep.engine.truth import Truth, build_truth, census
from halfstep.optim import SGD, AdamW, adopt
from halfstep.precision.policy import PRESETS, Policy


def truth_of(policy, params, optimizers=(), **changes):
    """The table after one step, with the arguments an Engine would give."""
    grads = [p.grad for p in params if p.grad is not None]
    settings = {
        "policy": policy,
        "params": params,
        "grads": census(grads),
        "grad_bytes": sum(g.numel() * g.element_size() for g in grads),
        "states": {p: s for o in optimizers for p, s in o.state.items()},
        "accumulate": 1,
        "loss_scale": "none",
        "paths": ["the path"],
        "support": "native",
        "device": "some device",
        "ema": False,
    }
    return build_truth(**settings | changes)


def stepped(precision, make=torch.optim.AdamW, model=None):
    """A model trained one step under a policy, without an Engine."""
    policy = Policy.parse(precision)
    model = model or nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = make(model.parameters())
    masters = cast_model(model, policy)
    if policy.params != "fp32" or policy.states != "fp32":
        optimizer = adopt(optimizer, master=policy.master if policy.params != "fp32" else "none", states=policy.states)
        for p in model.parameters():
            optimizer.start_master(p, masters.get(p))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return truth_of(policy, list(model.parameters()), [optimizer])


@pytest.mark.parametrize(
    ("precision", "make", "expected"),
    [
        ("fp32", torch.optim.AdamW, 16),
        ("tf32", torch.optim.AdamW, 16),
        ("bf16", torch.optim.AdamW, 16),
        ("fp16", torch.optim.AdamW, 16),
        ("bf16-lean", torch.optim.AdamW, 14),
        ("fp16-lean", torch.optim.AdamW, 14),
        ("bf16-lean,master=fp32", torch.optim.AdamW, 16),
        ("bf16-lean,master=none", torch.optim.AdamW, 12),
        ("bf16-lean,states=bf16", torch.optim.AdamW, 10),
        ("bf16,states=bf16", torch.optim.AdamW, 12),
        ("fp32", torch.optim.SGD, 8),
        ("bf16-lean", torch.optim.SGD, 6),
        ("fp32", lambda p: torch.optim.SGD(p, momentum=0.9), 12),
        ("bf16-lean", lambda p: torch.optim.SGD(p, momentum=0.9), 10),
        ("fp32", lambda p: torch.optim.Adam(p, amsgrad=True), 20),
    ],
)
def test_bytes_per_parameter_are_those_held(precision, make, expected):
    """Weights, gradients, masters and moments, counted from the tensors that exist after a step."""
    table = stepped(precision, make)
    assert table.bytes_per_parameter == expected
    assert dict(table.rows)["bytes per parameter"] == f"{expected:.2f}"


def test_bytes_are_a_mean_over_kept_and_lean_weights():
    """A lean model with a kept module of the same size holds 15 bytes per parameter."""
    table = stepped("bf16-lean,keep_fp32=1")
    assert table.bytes_per_parameter == 15
    rows = dict(table.rows)
    assert rows["parameters"].startswith(("bf16 (4,160), fp32 (4,160)", "fp32 (4,160), bf16 (4,160)"))
    assert rows["parameters"].endswith("8,320 trainable")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-lean", "fp16-lean", "bf16-lean,states=bf16"])
def test_rows_name_the_dtypes_of_the_tensors(precision):
    """Weights, gradients and states are shown as they are, in Halfstep's spelling."""
    policy, rows = Policy.parse(precision), dict(stepped(precision).rows)
    assert rows["precision"] == str(policy)
    assert rows["parameters"] == f"{policy.params}; 8,320 trainable"
    assert rows["gradients"] == policy.params
    assert rows["optimizer states"] == policy.states
    assert rows["step"] == "the path"
    inside = "; softmax and norms fp32 inside, 16 bits in and out" if policy.is_lean else ""
    assert rows["losses, softmax, sums"] == "fp32" + inside


def test_the_table_is_html_in_a_notebook():
    """Rows, what is lossy and what is waived are the same as in the text."""
    truth = Truth((("precision", "a<b"),), ("some loss",), ("a promise",), 16.0)
    page = truth._repr_html_()
    assert all(text in page for text in ("a&lt;b", "some loss", "a promise"))
    assert page.count("<tr>") == len(str(truth).splitlines()) == 3


def test_the_table_is_read_from_the_tensors_not_from_the_policy():
    """Gradients of another dtype than the policy would give are shown as what they are."""
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    param.grad = torch.ones(3)
    rows = dict(truth_of(PRESETS["bf16-lean"], [param]).rows)
    assert rows["gradients"] == "fp32"


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        ("fp32", "the fp32 weights themselves"),
        ("bf16", "the fp32 weights themselves"),
        ("bf16-lean", "split: weight and 16 more bits, exact fp32"),
        ("bf16-lean,master=fp32", "an fp32 copy, exact fp32"),
        ("fp16-lean,master=fp32", "an fp32 copy, exact fp32"),
        ("bf16-lean,master=none", "none"),
    ],
)
def test_the_master_row_says_where_the_master_is(precision, text):
    """The weights, the 16 more bits, a whole copy, or nothing."""
    assert dict(stepped(precision).rows)["master"] == text


def test_an_fp16_split_is_not_called_exact_without_its_bound():
    """Below fp16's normal range an fp16 split is off by up to 2^-40; a table that tells the truth says so."""
    table = stepped("fp16-lean")
    shown = dict(table.rows)["master"] + " ".join(table.lossy)
    assert "split" in shown
    assert "2^-40" in shown or "normal" in shown or "9.1e-13" in shown


def test_before_the_first_step_the_table_says_none_yet():
    """No gradients, states or masters exist; nothing is made up."""
    params = list(nn.Linear(3, 3).parameters())
    rows = dict(truth_of(PRESETS["fp32"], params).rows)
    assert rows["gradients"] == rows["optimizer states"] == "none yet"
    model = nn.Linear(3, 3)
    cast_model(model, PRESETS["bf16-lean"])
    table = truth_of(PRESETS["bf16-lean"], list(model.parameters()))
    assert dict(table.rows)["master"].endswith("(from the first step on)")
    assert table.bytes_per_parameter == 2


def test_an_optimizer_without_moments_has_none():
    """Plain SGD holds a step count and nothing per parameter."""
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = SGD([param])
    optimizer.step()
    assert dict(truth_of(PRESETS["fp32"], [param], [optimizer]).rows)["optimizer states"] == "none"


def test_states_that_are_not_tensors_are_left_out():
    """A number or None in an optimizer's state is no memory per parameter."""
    param = nn.Parameter(torch.ones(3))
    states = {param: {"step": 3, "momentum_buffer": None, "other": 2.5}}
    table = truth_of(PRESETS["fp32"], [param], states=states)
    assert table.bytes_per_parameter == 4


@pytest.mark.parametrize(
    ("precision", "compute"),
    [("fp32", "IEEE fp32"), ("tf32", "TF32 matmuls"), ("bf16", "bf16 autocast"), ("fp16-lean", "fp16 autocast")],
)
@pytest.mark.parametrize(
    ("support", "where"),
    [("native", "native"), ("slow", "no faster than fp32"), ("emulated", "emulated"), (None, "support unknown")],
)
def test_the_compute_row_says_how_and_how_well(precision, compute, support, where):
    """Format, device, and whether the device really runs it."""
    params = list(nn.Linear(2, 2).parameters())
    rows = dict(truth_of(Policy.parse(precision), params, support=support).rows)
    assert rows["compute"] == f"{compute} on some device: {where} (intended; observed at the first step)"


def test_the_other_rows_repeat_what_was_set():
    """Reduction, accumulation, loss scale, paths and the moving average."""
    params = list(nn.Linear(2, 2).parameters())
    rows = dict(truth_of(PRESETS["fp16"], params, loss_scale="dynamic", paths=["a", "b"]).rows)
    assert rows["reduction"] == "none, one rank"
    assert rows["accumulation"] == "none"
    assert rows["loss scale"] == "dynamic"
    assert rows["step"] == "a; b"
    rows = dict(
        truth_of(
            PRESETS["bf16-lean"], params, accumulate=4, replaced_rows={"reduction": "bf16 over ranks"}, ema=True
        ).rows
    )
    assert rows["reduction"] == "bf16 over ranks"
    assert rows["accumulation"] == "fp32 over 4 micro-batches"
    assert rows["bytes per parameter"] == "4.00 + 4 for the EMA"


@pytest.mark.parametrize(
    ("precision", "changes", "statement"),
    [
        ("bf16-lean,master=none", {}, "updates below 3.9e-03 of a weight are lost"),
        ("fp16-lean,master=none", {}, "updates below 4.9e-04 of a weight are lost"),
        ("bf16-lean,grads=bf16", {"accumulate": 2}, "rounded to bf16 and can stagnate"),
        ("bf16-lean,states=bf16", {}, "optimizer states: rounded to bf16"),
        ("fp16", {}, "below 6e-08 / loss scale they vanish"),
        ("fp16-lean", {}, "below 6e-08 / loss scale they vanish"),
        ("bf16,reduce=bf16", {}, "sums over ranks are rounded to bf16"),
        ("bf16", {"support": "emulated"}, "bf16 is emulated on this device"),
        ("fp16", {"support": "slow"}, "fp16 is no faster than fp32 on this device"),
    ],
)
def test_what_is_lossy_is_stated(precision, changes, statement):
    """Each way to lose digits has its sentence, and it shows in the text."""
    table = truth_of(Policy.parse(precision), list(nn.Linear(2, 2).parameters()), **changes)
    assert any(statement in text for text in table.lossy)
    assert statement in str(table)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "bf16-lean", "bf16-lean,grads=bf16"])
def test_where_nothing_is_lost_nothing_is_stated(precision):
    """No sentence about losses for policies that keep every digit outside the compute format."""
    table = truth_of(Policy.parse(precision), list(nn.Linear(2, 2).parameters()))
    assert table.lossy == ()
    assert "nothing beyond the compute format" in str(table)


def test_as_dict_survives_json():
    """Run files and checkpoints hold the table as plain values."""
    for precision, make in itertools.product(["fp32", "fp16-lean,states=bf16"], [torch.optim.AdamW, torch.optim.SGD]):
        table = stepped(precision, make)
        found = json.loads(json.dumps(table.as_dict()))
        assert found == table.as_dict()
        assert found["rows"] == dict(table.rows)
        assert list(found["rows"]) == [name for name, _ in table.rows]
        assert found["lossy"] == list(table.lossy)
        assert found["bytes_per_parameter"] == table.bytes_per_parameter


def test_the_text_is_one_aligned_line_per_row():
    """Every row, every loss and every promise given up is one line, with the values in one column."""
    table = Truth((("a", "1"), ("much longer", "2")), ("x", "y"), ("promise 4",), 16.0)
    assert str(table).splitlines() == [
        "  a            1",
        "  much longer  2",
        "  lossy        x",
        "  lossy        y",
        "  waived       promise 4",
    ]
    full = str(stepped("fp16-lean"))
    assert full.isascii()
    assert len(full.splitlines()) >= 12


def test_census_counts_elements_by_dtype():
    """Elements, not tensors, under Halfstep's names; unknown dtypes keep torch's."""
    tensors = [
        torch.zeros(3),
        torch.zeros(2, 2),
        torch.zeros(5, dtype=torch.float16),
        torch.zeros(1, dtype=torch.int16),
    ]
    assert census(tensors) == {"fp32": 7, "fp16": 5, "int16": 1}


def test_a_model_without_parameters_does_not_divide_by_zero():
    """An empty table is still a table."""
    assert truth_of(PRESETS["fp32"], []).bytes_per_parameter == 0


def test_lean_classes_and_adopted_ones_hold_the_same():
    """halfstep.optim.AdamW on 16-bit weights holds what an adopted stock AdamW holds."""
    model = nn.Linear(64, 64)
    masters = cast_model(model, PRESETS["bf16-lean"])
    optimizer = AdamW(model.parameters(), master="split")
    for p in model.parameters():
        optimizer.start_master(p, masters[p])
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert truth_of(PRESETS["bf16-lean"], list(model.parameters()), [optimizer]).bytes_per_parameter == 14


class Rotated(nn.Module):
    """A layer norm, an fp32 table that meets activations through a product, and in a maximum."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(0, 1, 8)[None])

    def forward(self, x):
        return self.linear(torch.maximum((self.norm(self.linear(x)) * self.table).softmax(-1), self.table))


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean"])
def test_a_lean_models_table_names_what_gave_16_bits_and_what_gave_fp32(precision):
    """Operations of torch.amp's fp32 list are counted after the first step; large fp32 results are named with buffers."""
    model = Rotated()
    engine = halfstep.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)
    for _ in range(2):
        with engine.forward():
            loss = model(torch.randn(4, 8)).float().mean()
        engine.backward(loss)
        engine.step()
    rows = dict(engine.truth().rows)
    assert rows["16-bit results"] == "layer_norm x1, mul with an fp32 buffer x1, softmax x1 (fp32 in torch.amp)"
    assert "maximum 128 B" in rows["fp32 results"]
    assert rows["fp32 results"].endswith("; fp32 buffers: table")
    engine.close()
