"""`recompute=`: the same bits with fewer activations saved."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep import Engine
from halfstep.engine.recompute import check_recompute, parse_recompute
from halfstep.engine.region import compute_region, recomputing
from halfstep.engine.rerun.expensive import is_saved
from halfstep.engine.setup import prepare_run
from halfstep.errors import SettingError
from halfstep.precision.policy import Policy

WIDTH = 8


class Block(nn.Module):
    """Attention and an MLP, with dropout in the attention, between saved operations and after them."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.p, self.drop = dropout, nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)
        x = x + self.drop(self.proj(h.transpose(1, 2).flatten(2)))
        return x + self.drop(self.fc2(self.drop(F.gelu(self.fc1(self.norm2(x))))))


class Conv(nn.Module):
    """A residual block with batch-norm and activations in place."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm, self.act = nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.conv2(self.act(self.norm(self.conv1(x)).mul_(2).add_(1))).mul_(0.5)


class Keywords(nn.Module):
    """A block with keyword arguments, options and results that are not tensors."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, tables, mask=None, flag=False):
        cos, sin = tables
        y = self.b(torch.tanh(self.a(x) * cos + sin)) * mask
        return {"x": x + y, "flag": not flag, "nothing": None}, (y, 3)


class KeywordModel(nn.Module):
    """Calls its blocks with everything by name."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Keywords() for _ in range(3))

    def forward(self, x):
        tables, mask, flag = (torch.cos(x), torch.sin(x)), x > 0, False
        for layer in self.layers:
            result, (y, three) = layer(x=x, tables=tables, mask=mask, flag=flag)
            x, flag = result["x"] + y / three, result["flag"]
        assert flag
        return x


def transformer(dropout=0.0, num_blocks=3):
    """A few blocks."""
    return nn.Sequential(*[Block(dropout) for _ in range(num_blocks)])


def train(make, recompute, precision="fp32", num_steps=2, shape=(2, 3, WIDTH), **options):
    """The losses, gradients, buffers and weights of a few steps, and the model."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = Engine(model, optimizer, precision, recompute=recompute, **options)
    values = []
    accumulate = options.get("accumulate", 1)
    for _ in range(num_steps * accumulate):
        x = torch.randn(shape)
        with engine.forward():
            loss = model(x).float().square().mean()
        engine.backward(loss)
        values += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        engine.step()
    values += [torch.rand(3), *model.buffers(), *model.parameters()]
    engine.close()
    return values, model


def assert_same(first, second):
    """Equal bits in every value."""
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recompute", ["cheap", 0.5])
@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", "fp16", "bf16-lean", "fp16-lean", "bf16-lean,keep_fp32=1|*.norm1|*.fc2"]
)
def test_gradients_have_the_same_bits(precision, recompute):
    """In every preset, with dropout before, between and after the operations whose results are saved."""
    make = lambda: transformer(dropout=0.2)  # noqa: E731 - the model of this test
    assert_same(train(make, None, precision)[0], train(make, recompute, precision)[0])


@pytest.mark.parametrize("recompute", ["cheap", 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_batch_norm_statistics_are_updated_once(precision, recompute):
    """Running averages and their count are those of one forward, and operations in place do no harm."""
    make = lambda: nn.Sequential(*[Conv() for _ in range(3)])  # noqa: E731 - the model of this test
    values, model = train(make, recompute, precision, shape=(2, WIDTH, 5))
    assert_same(train(make, None, precision, shape=(2, WIDTH, 5))[0], values)
    assert model[0].norm.num_batches_tracked == 2


def test_a_block_may_read_the_buffers_that_it_changes():
    """The second run reads the values that the first one read, in every step and when backward runs twice."""

    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x):
            self.mean.lerp_(x.detach().mean((0, 1)), 0.5)
            return super().forward(torch.tanh(x - self.mean))

    make = lambda: nn.Sequential(Counting(), Counting())  # noqa: E731 - the model of this test
    assert_same(train(make, None)[0], train(make, "cheap")[0])
    gradients = []
    for recompute in (None, "cheap", 0.1):
        torch.manual_seed(0)
        model = make()
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", recompute=recompute)
        with engine.forward():
            y = model(torch.randn(2, 3, WIDTH))
        engine.backward(y.square().mean(), retain_graph=True)
        engine.backward(y.sum())
        gradients.append([p.grad for p in model.parameters()])
    assert_same(gradients[0], gradients[1])
    assert_same(gradients[0], gradients[2])


@pytest.mark.parametrize("recompute", ["cheap", 0.1])
def test_blocks_may_have_keywords_options_and_structured_results(recompute):
    """Arguments by name, tuples of tensors, flags, dictionaries and None pass through."""
    assert_same(train(KeywordModel, None)[0], train(KeywordModel, recompute)[0])


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bf16-lean", {"accumulate": 2}),
        ("bf16-lean", {"gradient_release": True}),
        ("bf16", {"ema": 0.5, "accumulate": 2}),
    ],
)
def test_it_composes(precision, options):
    """With accumulation, gradient release and an EMA."""
    make = lambda: transformer(0.1, 2)  # noqa: E731 - the model of this test
    assert_same(train(make, None, precision, **options)[0], train(make, "cheap", precision, **options)[0])


def test_two_forwards_in_one_region_cast_weights_twice():
    """Autocast's cache of cast weights, which the second run does not have, is off in the blocks and on around them."""
    gradients = []
    for recompute in (None, "cheap", 0.1):
        torch.manual_seed(0)
        model = transformer(num_blocks=2)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", recompute=recompute)
        x = torch.randn(2, 3, WIDTH)
        with engine.forward():
            torch.set_autocast_cache_enabled(recompute is not None)  # the gradient of a shared cast is summed in bf16
            loss = (model(x) * model(-x)).float().mean()
            assert torch.is_autocast_cache_enabled() == (recompute is not None)
        engine.backward(loss)
        gradients.append([p.grad for p in model.parameters()])
    assert_same(gradients[0], gradients[1])
    assert_same(gradients[0], gradients[2])


class Live(TorchDispatchMode):
    """Records the storages that operations allocate."""

    def __init__(self, model):
        super().__init__()
        self.storages, self.weights = {}, {p.untyped_storage()._cdata for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def num_bytes(self):
        """Bytes that are still alive."""
        alive = {cdata: num for cdata, (ref, num) in self.storages.items() if not ref.expired()}
        return sum(num for cdata, num in alive.items() if cdata not in self.weights)


def bytes_for_backward(recompute, precision="fp32", num_blocks=4, tokens=(4, 8)):
    """Bytes per token and block that are alive between forward and backward."""
    torch.manual_seed(0)
    model = transformer(num_blocks=num_blocks)
    policy = Policy.parse(precision)
    run = prepare_run(model, [torch.optim.SGD(model.parameters(), lr=0.1)], policy, recompute=recompute)
    x = torch.randn(*tokens, WIDTH, requires_grad=True)
    live = Live(model)
    with live, compute_region("cpu", policy.compute):
        y = model(x)
    alive = live.num_bytes()
    assert y.grad_fn is not None
    run.undo.close()
    return alive / (num_blocks * tokens[0] * tokens[1])


def test_cheap_saves_the_results_of_products_and_attention_only():
    """Per token and block: q, k, v, the attention and its log-sums, both products' results and the block's; not the last product's."""
    heads = 2
    expected = 4 * ((3 + 1 + 1 + 2 + 1) * WIDTH + heads)
    assert bytes_for_backward("cheap") == expected
    assert bytes_for_backward(None) > 1.4 * expected


def test_a_share_is_met_by_blocks_that_save_only_their_inputs():
    """With a share near 0 only the blocks' inputs and outputs are alive; one half lies halfway."""
    everything, least = bytes_for_backward(None), bytes_for_backward(0.01)
    assert least == 4 * WIDTH
    assert bytes_for_backward(0.5) == pytest.approx((everything + least) / 2, rel=0.01)


def test_it_runs_on_fake_tensors():
    """The planner traces a step with it."""
    with FakeTensorMode():
        model = transformer(0.1)
        run = prepare_run(
            model, [torch.optim.SGD(model.parameters(), lr=0.1)], Policy.parse("bf16-lean"), recompute="cheap"
        )
        with compute_region("cpu", "bf16", lean=True):
            loss = model(torch.randn(2, 3, WIDTH)).float().mean()
        with recomputing(lean=True):
            loss.backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())
        run.undo.close()


def test_validation_and_close_run_the_plain_forward():
    """Nothing is checkpointed without gradients, and closing the engine restores the forwards."""
    model = transformer()
    x = torch.randn(1, 2, WIDTH)
    expected = model(x)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", recompute="cheap")
    assert "forward" in vars(model[0])
    with engine.evaluate():
        assert torch.equal(model(x), expected)
    engine.close()
    assert not [name for name in vars(model[0]) if name == "forward" or name.startswith("_halfstep")]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_of_the_model_uses_its_own_weights(clone):
    """A copy made while the engine is open computes with its own blocks."""
    model = transformer()
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", recompute="cheap"):
        copied = clone(model)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        x = torch.randn(1, 2, WIDTH)
        copied(x).square().mean().backward()
    assert copied[0].fc1.weight.grad.abs().sum() > 0
    assert model[0].fc1.weight.grad is None


def test_the_state_keeps_the_names_of_the_model():
    """Wrapped forwards add nothing to the state."""
    model = transformer()
    names = list(model.state_dict())
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", recompute="cheap"):
        assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("recompute", "row"),
    [("cheap", "activations and norms of 3 blocks"), (0.4, "everything in 2 of 3 blocks"), (None, None), (False, None)],
)
def test_the_truth_table_has_a_row(recompute, row):
    """It shows how many blocks are recomputed; without the option there is no row."""
    model = transformer()
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", recompute=recompute) as engine:
        assert dict(engine.truth().rows).get("recompute") == row


def test_a_block_that_changes_its_input_is_rejected():
    """Its second run would read the changed input."""

    class Adds(Block):
        def forward(self, x):
            x += super().forward(x)
            return x * 1

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Adds(), Adds())
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", recompute="cheap")
    with pytest.raises(SettingError, match="class Adds changes its input in place"), engine.forward():
        model(torch.randn(1, 2, WIDTH))


def test_a_model_without_repeated_blocks_is_rejected_before_it_changes():
    """The message gives the class and what to do."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    with pytest.raises(SettingError, match=r"Sequential has none.*nn\.ModuleList.*leave out recompute"):
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-lean", recompute="cheap")
    assert model[0].weight.dtype is torch.float32


def test_a_model_that_checkpoints_by_itself_is_rejected():
    """The message names the flag."""
    model = nn.Sequential(transformer(), nn.Linear(WIDTH, 2))
    model[0].gradient_checkpointing = True
    with pytest.raises(SettingError, match=r"0\.gradient_checkpointing is True.*gradient_checkpointing_disable"):
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", recompute=0.5)


@pytest.mark.parametrize("value", [None, False, "cheap", 0.01, 0.99])
def test_legal_values(value):
    """Off, cheap, or a share between 0 and 1."""
    check_recompute(value)


@pytest.mark.parametrize("value", [True, 1, 0, 0.0, 1.0, -0.5, "all", "", float("nan"), [0.5]])
def test_other_values_are_rejected(value):
    """The message has the value and what is legal."""
    with pytest.raises(SettingError, match="must be None, 'cheap' or a share") as caught:
        check_recompute(value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("cheap", "cheap"), ("Cheap", "cheap"), ("0.6", 0.6), ("off", None), ("none", None), ("0", None)],
)
def test_texts_of_the_command_line(text, value):
    """A word or a number."""
    assert parse_recompute(text) == value


def test_custom_operations_are_saved_unless_they_write_into_their_inputs():
    """Products, attention and a library's own operations are saved; elementwise operations and norms are not."""
    aten = torch.ops.aten
    assert all(map(is_saved, [aten.mm.default, aten.addmm.default, aten.convolution.default, aten.embedding.default]))
    assert not any(
        map(is_saved, [aten.gelu.default, aten.native_layer_norm.default, aten.add.Tensor, aten.relu_.default])
    )
    with torch.library._scoped_library("halfstep_test", "DEF") as library:
        library.define("pure(Tensor x) -> Tensor")
        library.define("writes(Tensor(a!) x) -> ()")
        assert is_saved(torch.ops.halfstep_test.pure.default)
        assert not is_saved(torch.ops.halfstep_test.writes.default)


@pytest.mark.slow  # loads transformers
def test_models_of_transformers_train_with_their_cache_on():
    """GPT-2 creates a key-value cache in training; the blocks do not append to it twice."""
    hf = pytest.importorskip("transformers", reason="needs transformers", exc_type=ImportError)
    ids = torch.randint(0, 20, (2, 5))

    class Gpt(nn.Module):
        def __init__(self, use_cache=True):
            super().__init__()
            self.use_cache = use_cache
            config = hf.GPT2Config(
                vocab_size=20, n_positions=8, n_embd=8, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
            )
            self.inner = hf.GPT2LMHeadModel(config).train()

        def forward(self, x):
            return self.inner(input_ids=ids, use_cache=self.use_cache).logits

    expected = train(lambda: Gpt(use_cache=False), None)[0]
    assert_same(expected, train(Gpt, "cheap")[0])
    assert_same(expected, train(Gpt, 0.1)[0])
