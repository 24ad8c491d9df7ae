"""compute_fp32: modules that compute in fp32 on weights that stay in 16 bits."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.checkpoint.directory import load_checkpoint
from halfstep.checkpoint.export import masters_of
from halfstep.engine.casting import uncast_forwards
from halfstep.engine.region import fp32_weights
from halfstep.errors import SettingError
from halfstep.jobs.job import Job
from halfstep.planning.estimator import Estimator
from halfstep.planning.trace import StepOptions
from halfstep.precision.policy import Policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF = {"bf16": BF16, "fp16": FP16}
TOKENS = torch.tensor([[1, 5, 2, 2, 7], [3, 0, 8, 6, 4]])
lean_presets = pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean,loss_scale=256"])


class Block(nn.Module):
    """A residual block; two of them are repeated blocks."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 8), nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        return self.lm_head(self.blocks(self.embed(tokens)))


def build(precision, new_model=Language, seed=0, **options):
    """An Engine over a model that is the same each time."""
    torch.manual_seed(seed)
    model = new_model()
    return halfstep.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), precision=precision, **options)


def loss_of(engine):
    """The loss of predicting the next token."""
    with engine.forward():
        logits = engine.model(TOKENS)
        return F.cross_entropy(logits[:, :-1].reshape(-1, 11), TOKENS[:, 1:].reshape(-1))


def train(engine, steps=3):
    """Train a few steps; the losses."""
    losses = []
    for _ in range(steps):
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def observed(engine):
    """Output dtypes by module, and the head's input and output, of one forward."""
    dtypes, head = {}, {}

    def record(name):
        def hook(_module, args, out):
            dtypes[name] = out.dtype
            if name == "lm_head":
                head["in"], head["out"] = args[0].detach(), out.detach()

        return hook

    hooks = [m.register_forward_hook(record(name)) for name, m in engine.model.named_modules()]
    loss_of(engine)
    for hook in hooks:
        hook.remove()
    return dtypes, head


def params_of(model):
    return {name: (p, p.dtype) for name, p in model.named_parameters(remove_duplicate=False)}


# --- what is computed -----------------------------------------------------------------------------------------------


@lean_presets
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "separate"])
def test_the_head_is_an_fp32_head_on_the_same_16_bit_weights(precision, tied):
    """Bit for bit, on a weight that stays 16-bit and tied; every other module gives 16 bits."""
    half = HALF[precision[:4]]
    engine = build(f"{precision},compute_fp32=lm_head", partial(Language, tied))
    model = engine.model
    dtypes, head = observed(engine)
    assert head["in"].dtype is half
    assert head["out"].dtype is FP32
    assert torch.equal(head["out"], F.linear(head["in"].float(), model.lm_head.weight.float()))
    assert not torch.equal(head["out"], F.linear(head["in"], model.lm_head.weight).float())
    assert {d for name, d in dtypes.items() if name and name != "lm_head"} == {half}
    assert (model.lm_head.weight is model.embed.weight) is tied
    assert {p.dtype for p in model.parameters()} == {half}


@lean_presets
def test_training_keeps_the_tie_and_the_dtypes(precision):
    """Three steps with accumulation: the loss falls, parameters are the same 16-bit objects, masters are fp32."""
    engine = build(f"{precision},compute_fp32=lm_head", accumulate=2)
    before = params_of(engine.model)
    losses = train(engine, 12)
    assert losses[-1] < losses[0]
    after = params_of(engine.model)
    assert all(after[name][0] is p and after[name][1] is dtype for name, (p, dtype) in before.items())
    assert {m.dtype for m in engine.masters().values()} == {FP32}


def test_evaluation_computes_in_fp32_too():
    """With the weights and with their EMA, without gradients, and the parameters are in place afterwards."""
    engine = build("bf16-lean,compute_fp32=lm_head", ema=0.5)
    train(engine, 2)
    before = params_of(engine.model)
    for ema in (False, True):
        with engine.evaluate(ema=ema):
            assert engine.model(TOKENS).dtype is FP32
    assert all(params_of(engine.model)[name][0] is p for name, (p, _) in before.items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_with_fp32_weights_it_is_keep_fp32(precision):
    """Both keys give the same losses and weights, bit for bit."""
    one, other = (build(f"{precision},{key}=lm_head|blocks.1") for key in ("compute_fp32", "keep_fp32"))
    assert train(one) == train(other)
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))


def head_gradient(precision, dtype):
    """The gradient of an untied head by the Engine, and that of the same head on the same inputs in `dtype`."""
    engine = build(precision, partial(Language, tied=False))
    _, head = observed(engine)
    weight = engine.model.lm_head.weight.detach().to(dtype).requires_grad_()
    logits = F.linear(head["in"].to(dtype), weight)
    F.cross_entropy(logits[:, :-1].reshape(-1, 11), TOKENS[:, 1:].reshape(-1)).backward()
    engine.backward(loss_of(engine))
    return engine.model.lm_head.weight.grad, weight.grad


@pytest.mark.parametrize(("grads", "factor"), [("bf16", 0.9), ("fp32", 1e-3)])
def test_gradients_of_an_fp32_head_are_closer_to_float64(grads, factor):
    """Closer than those of a 16-bit head; where gradients are stored in fp32, they are exact to fp32."""
    wide, exact = head_gradient(f"bf16-lean,grads={grads},compute_fp32=lm_head", torch.float64)
    narrow, _ = head_gradient(f"bf16-lean,grads={grads}", torch.float64)
    assert (wide - exact).norm() < factor * (narrow - exact).norm()


@pytest.mark.parametrize("grads", ["bf16", "fp32"])
def test_the_gradient_is_rounded_at_most_once(grads):
    """It is the fp32 gradient, rounded to the weight's format where gradients are stored in that."""
    found, exact = head_gradient(f"bf16-lean,grads={grads},compute_fp32=lm_head", FP32)
    assert found.dtype is (BF16 if grads == "bf16" else FP32)
    assert torch.equal(found, exact.to(found.dtype))


def test_tied_gradients_add_up_in_fp32():
    """The embedding's share and the head's arrive at one fp32 gradient, also over two micro-batches."""
    grads = []
    for accumulate in (1, 2):
        engine = build("bf16-lean,grads=fp32,compute_fp32=lm_head", accumulate=accumulate)
        for _ in range(accumulate):
            engine.backward(loss_of(engine))
        grads.append(engine.model.embed.weight.grad.clone())
    assert grads[0].dtype is FP32
    assert torch.allclose(grads[1], 2 * grads[0], rtol=1e-5)  # the sum; a step divides
    assert not torch.equal(grads[0], grads[0].to(BF16).float())


# --- kinds of modules -----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Layers that read their weights in unusual ways."""

    def __init__(self):
        super().__init__()
        self.gru, self.attention = nn.GRU(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.full((8,), 0.7))

    def forward(self, x):
        x = self.gru(x)[0]
        x = self.normed(self.attention(x, x, x, need_weights=False)[0])
        return x.to(self.scale.dtype) * self.scale  # as T5 asks a weight for its dtype


@lean_presets
def test_layers_that_read_their_weights_in_other_ways_compute_in_fp32(precision):
    """A GRU with its list of weights, attention that reads its child's weight, parametrizations, `x.to(weight.dtype)`."""
    torch.manual_seed(0)
    engine = build(f"{precision},compute_fp32=mixed", lambda: nn.ModuleDict({"mixed": Mixed()}))
    mixed = engine.model["mixed"]
    exact = copy.deepcopy(mixed).float()
    uncast_forwards(exact)
    exact.gru._flat_weights = [getattr(exact.gru, name) for name in exact.gru._flat_weights_names]
    half, x = HALF[precision[:4]], torch.randn(2, 3, 8)
    with engine.forward():
        found = mixed(x.to(half))
    assert torch.equal(found, exact(x.to(half).float()))
    engine.backward(found.square().mean())
    assert {(p.dtype, p.grad.dtype) for p in mixed.parameters()} == {(half, half)}
    assert all(
        w is getattr(mixed.gru, n) for n, w in zip(mixed.gru._flat_weights_names, mixed.gru._flat_weights, strict=True)
    )


def adapted():
    base = nn.Linear(8, 8).requires_grad_(requires_grad=False).to(BF16)
    return nn.ModuleDict({"base": base, "adapter": nn.Linear(8, 8)})


def test_a_frozen_16_bit_base_stays_16_bit():
    """Under a preset with fp32 weights keep_fp32 casts frozen weights in place, compute_fp32 only computes in fp32."""
    for key, dtype in (("keep_fp32", FP32), ("compute_fp32", BF16)):
        engine = build(f"bf16,{key}=base", adapted)
        base, x = engine.model["base"], torch.randn(3, 8)
        with engine.forward():
            found = base(x.to(BF16))
        assert torch.equal(found, F.linear(x.to(BF16).float(), base.weight.float(), base.bias.float()))
        assert base.weight.dtype is dtype


def test_quantised_and_absent_weights_are_left_alone():
    """A tensor subclass, an empty tensor and a missing bias are not copied; an error restores what was."""
    model = nn.Linear(4, 4, bias=False).to(BF16)
    model.wrapped = nn.Parameter(TwoTensor(torch.ones(3, dtype=BF16), torch.ones(3, dtype=BF16)), requires_grad=False)
    model.gathered_later = nn.Parameter(torch.empty(0, dtype=BF16))
    before = dict(model._parameters)
    with pytest.raises(RuntimeError, match="stop"), fp32_weights(model):
        assert {n for n, p in model._parameters.items() if p is not before[n]} == {"weight"}
        assert model.weight.dtype is FP32
        raise RuntimeError("stop")
    assert all(p is before[n] for n, p in model._parameters.items())


def test_one_copy_for_a_weight_that_two_modules_share():
    """Inside one module that is named, a tied weight is cast once."""
    model = Language().to(BF16)
    with fp32_weights(model):
        assert model.embed.weight is model.lm_head.weight
        assert model.embed.weight.dtype is FP32


# --- options of the Engine ------------------------------------------------------------------------------------------


class Checkpointed(Language):
    """Its blocks are recomputed in backward by torch's checkpoint, called by the model."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.lm_head(x)


class Stack(nn.Sequential):
    """Blocks that a module around them checkpoints, so that its own forward is not run again."""

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def stacked(kind):
    model = Language()
    model.blocks = kind(*model.blocks)
    return model


@pytest.mark.parametrize("pattern", ["lm_head", "blocks.0|lm_head", "blocks"])
def test_recomputed_blocks_give_the_same_training(pattern):
    """By the Engine's recompute or the model's own checkpoint, around the module that is named or inside it."""
    precision = f"bf16-lean,compute_fp32={pattern}"
    plain = build(precision)
    expected = train(plain)
    others = [
        build(precision, recompute="cheap"),
        build(precision, recompute=0.5),
        build(precision, Checkpointed),
        build(precision, gradient_release=True),
    ]
    for other in others:
        assert train(other) == expected
        assert all(map(torch.equal, plain.model.parameters(), other.model.parameters()))


def test_a_checkpoint_inside_a_named_module_recomputes_in_fp32():
    """Backward runs only the inner modules again, and they have fp32 copies too."""
    plain, inner = (
        train(build("bf16-lean,compute_fp32=blocks", partial(stacked, kind))) for kind in (nn.Sequential, Stack)
    )
    assert plain == inner


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch by its own compiler, in some versions
@pytest.mark.parametrize("pattern", ["lm_head", pytest.param("blocks.1", marks=pytest.mark.slow)])
def test_compiled_models_are_traced_without_a_break(pattern):
    """One graph, the same gradients as eager, and the parameters are in place afterwards."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, other = (build(f"bf16-lean,compute_fp32={pattern}") for _ in range(2))
    eager.backward(loss_of(eager))
    before = params_of(other.model)
    model = other.model
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with other.forward():
        logits = compiled(TOKENS)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 11), TOKENS[:, 1:].reshape(-1))
    other.backward(loss)
    assert all(model.get_parameter(name) is p for name, (p, _) in before.items())
    for a, b in zip(eager.model.parameters(), model.parameters(), strict=True):
        assert (a.grad.float() - b.grad.float()).norm() < 0.02 * a.grad.float().norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of torch by its own compiler
@pytest.mark.parametrize("pattern", ["lm_head", "blocks", "blocks.0|lm_head"])
@pytest.mark.parametrize("mode", [True, "blocks"])
def test_the_engine_compiles_modules_on_copies(pattern, mode):
    """compile=True and compile="blocks" train as eager does, to the rounding of 16 bits."""
    torch._dynamo.reset()
    precision = f"bf16-lean,compute_fp32={pattern}"
    expected = train(build(precision), 4)
    found = train(build(precision, compile=mode), 4)
    assert found == pytest.approx(expected, rel=0.02)
    torch._dynamo.reset()


def test_checkpoints_and_exports_do_not_depend_on_it(tmp_path):
    """The layout is that of the preset: saved with the key and loaded without it, and back, bit for bit."""
    source = build("bf16-lean,compute_fp32=lm_head")
    train(source)
    source.save(tmp_path / "saved")
    assert all(map(torch.equal, masters_of(load_checkpoint(tmp_path / "saved")).values(), source.masters().values()))
    plain = build("bf16-lean", seed=1)
    plain.load(tmp_path / "saved")
    plain.save(tmp_path / "again")
    back = build("bf16-lean,compute_fp32=lm_head", seed=2)
    back.load(tmp_path / "again")
    assert train(source) == train(back)
    assert all(torch.equal(m, back.masters()[name]) for name, m in source.masters().items())
    assert source.model.state_dict().keys() == Language().state_dict().keys()


def test_close_restores_every_forward():
    """After close() the model has no trace of the wrapper."""
    model = Language()
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    engine = build("bf16-lean,compute_fp32=blocks|lm_head", lambda: model)
    assert "forward" in vars(model.lm_head)
    assert "forward" in vars(model.blocks[0].up)
    engine.close()
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before


# --- what is reported and rejected ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "row"),
    [
        ("bf16-lean,compute_fp32=lm_head", "lm_head on copies of 16-bit weights"),
        ("bf16-lean,keep_fp32=*.norm,compute_fp32=blocks.1", "blocks.0.norm; blocks.1 on copies of 16-bit weights"),
        ("bf16-lean,keep_fp32=blocks", "blocks"),
        ("bf16,compute_fp32=lm_head,keep_fp32=embed", "embed, lm_head"),
        ("bf16-lean", None),
    ],
)
def test_the_truth_table_lists_modules_in_fp32(precision, row):
    """By name, the outermost ones, and whether their weights are fp32."""
    engine = build(precision)
    train(engine, 1)
    rows = dict(engine.truth().rows)
    assert rows.get("modules in fp32") == row
    assert ("fp32 in" in rows["compute"]) is (row is not None and row != "embed")


def test_keep_fp32_wins_where_both_cover_a_module():
    """A norm inside a named block keeps fp32 weights; the rest of the block has 16-bit ones."""
    engine = build("bf16-lean,keep_fp32=*.norm,compute_fp32=blocks.1")
    dtypes = {name: p.dtype for name, p in engine.model.named_parameters()}
    assert dtypes["blocks.1.norm.weight"] is dtypes["blocks.0.norm.weight"] is FP32
    assert dtypes["blocks.1.up.weight"] is BF16
    assert observed(engine)[0]["blocks.1.up"] is FP32


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("compute_fp32=haed", r"compute_fp32=haed matches no module of Language.*embed, blocks"),
        (
            "keep_fp32=blocks,compute_fp32=blocks.0|lm_head",
            r"compute_fp32=blocks.0 has no effect: keep_fp32=blocks covers",
        ),
    ],
)
def test_patterns_without_effect_are_rejected(text, words):
    """A name that does not exist, and one that keep_fp32 has already; the model is not changed."""
    model = Language()
    with pytest.raises(SettingError, match=words):
        build(f"bf16-lean,{text}", lambda: model)
    assert {p.dtype for p in model.parameters()} == {FP32}


@pytest.mark.parametrize("key", ["", ",compute_fp32=lm_head"])
def test_an_autopsy_names_the_module_and_its_weight(key):
    """A weight that is not finite is reported by its own name and format, with the key as without it."""
    watch = halfstep.Watch(every=1)
    engine = build(f"fp16-lean{key}", partial(Language, tied=False), watch=watch)
    train(engine, 1)
    with torch.no_grad():
        engine.model.lm_head.weight[2, 3] = torch.inf
    engine.backward(loss_of(engine))
    engine.step(replay=lambda: loss_of(engine))
    engine.close()
    (autopsy,) = watch.autopsies
    assert (autopsy.cause, autopsy.module, autopsy.parameter) == ("weights", "lm_head", "lm_head.weight")
    assert autopsy.dtype == "float16"


def test_the_planner_counts_the_copy():
    """An fp32 copy of the head's weight lives from its forward to its backward, next to fp32 logits."""
    vocab, dim = 4096, 16
    job = Job(
        model=lambda: nn.ModuleDict({"embed": nn.Embedding(vocab, dim), "lm_head": nn.Linear(dim, vocab, bias=False)}),
        data=lambda batch_size: [torch.zeros(batch_size, 2, dtype=torch.int64)],
        loss=lambda model, batch: model["lm_head"](model["embed"](batch)).float().square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )

    def peak(precision):
        return Estimator(job, Policy.parse(precision), options=StepOptions()).at(1).peak.breakdown

    copy_bytes = 4 * vocab * dim
    wide, plain = peak("bf16-lean,compute_fp32=lm_head"), peak("bf16-lean")
    assert wide["cast cache"] == copy_bytes
    assert "cast cache" not in plain
    assert wide["weights"] == plain["weights"]
    assert wide["temporaries"] >= copy_bytes  # the gradient in fp32, before it is rounded
