"""The model made to fit its policy: dtypes of weights, kept modules, wrapped forwards."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from halfstep import Engine
from halfstep.checkpoint.directory import load_checkpoint
from halfstep.checkpoint.export import masters_of
from halfstep.engine.casting import cast_model, uncast_forwards, wrap_forwards
from halfstep.engine.region import compute_region
from halfstep.errors import SettingError
from halfstep.kernels.split import split
from halfstep.precision.policy import PRESETS, Policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF = {"bf16": BF16, "fp16": FP16}
NORMS = [nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6), nn.LayerNorm(6, elementwise_affine=False)]
every_compute = pytest.mark.parametrize("compute", ["bf16", "fp16"])


class Net(nn.Module):
    """A bit of everything: convolution, batch norm, layer norm, a block with a head inside."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 1)
        self.bn = nn.BatchNorm1d(4)
        self.norm = nn.LayerNorm(5)
        self.body = nn.Sequential(nn.Linear(20, 6), nn.GELU(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.body(self.norm(self.bn(self.conv(x))).flatten(1)))


def net(precision, module=None):
    torch.manual_seed(0)
    model, policy = module or Net(), Policy.parse(precision)
    masters = cast_model(model, policy)
    wrap_forwards(model, policy)
    return model, masters


def outputs_by_module(model, compute, x=None):
    """The dtype each module gives inside a region."""
    found = {}
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: found.__setitem__(name, out.dtype))
        for name, module in model.named_modules()
    ]
    with compute_region("cpu", compute):
        model(torch.randn(2, 3, 5) if x is None else x)
    for hook in hooks:
        hook.remove()
    return found


def dtypes(model):
    return {name: p.dtype for name, p in model.named_parameters()}


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["fp32", "tf32", "bf16", "fp16"])
def test_presets_with_fp32_weights_leave_the_weights_alone(preset):
    """No parameter changes, and there is no master to hand over."""
    model = Net()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    assert cast_model(model, PRESETS[preset]) == {}
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert torch.equal(p, before[name][1])


@pytest.mark.parametrize("preset", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize(("to", "lean"), [(BF16, "bf16-lean"), (FP16, "fp16-lean")], ids=["bf16", "fp16"])
def test_16_bit_models_are_rejected_where_weights_are_fp32(preset, to, lean):
    """A .half() model has lost the digits already; the message counts, gives an example and two ways out."""
    model = Net()
    model.head.to(to)
    with pytest.raises(SettingError, match=rf"2 parameters, e.g. head.weight in {to}.*Drop .half\(\).*'{lean}'"):
        cast_model(model, PRESETS[preset])


@every_compute
def test_lean_presets_round_the_weights_and_hand_over_the_masters(compute):
    """Same parameter objects, nearest 16-bit values, exact fp32 masters; batch norm stays fp32."""
    model = Net()
    objects = dict(model.named_parameters())
    exact = {name: p.detach().clone() for name, p in objects.items()}
    masters = cast_model(model, PRESETS[f"{compute}-lean"])
    for name, p in model.named_parameters():
        assert p is objects[name]
        if name.startswith("bn."):
            assert p.dtype is FP32
            assert p not in masters
        else:
            assert p.dtype is HALF[compute]
            assert torch.equal(masters[p], exact[name])
            assert torch.equal(p, split(exact[name], HALF[compute])[0])
    assert all(b.dtype in {FP32, torch.int64} for b in model.buffers())
    assert len(masters) == len(exact) - 2


def test_weights_that_have_the_dtype_already_are_taken_as_they_are():
    """A bf16 model under bf16-lean is fine: there is no finer master than the weights."""
    model = nn.Linear(3, 3).bfloat16()
    assert cast_model(model, PRESETS["bf16-lean"]) == {}
    assert model.weight.dtype is BF16


@pytest.mark.parametrize("wrong", [FP16, torch.float64])
def test_weights_of_another_dtype_are_rejected(wrong):
    """Lean weights are made from fp32; anything else is named with its dtype."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(wrong))
    with pytest.raises(SettingError, match=rf"Parameter 1.weight is {wrong}.*Build the model in fp32"):
        cast_model(model, PRESETS["bf16-lean"])


def test_weights_beyond_fp16s_range_are_rejected():
    """A weight that would become inf is named with its value, and the hint names its module."""
    model = Net()
    model.body[2].weight.data[1, 1] = -1e6
    with pytest.raises(
        SettingError, match=r"body.2.weight has a value of 1e\+06, outside the range of fp16.*keep_fp32=body.2"
    ):
        cast_model(model, PRESETS["fp16-lean"])
    model = Net()
    model.body[2].weight.data[1, 1] = -1e6
    masters = cast_model(model, Policy.parse("fp16-lean,keep_fp32=body.2"))
    assert model.body[2].weight.dtype is FP32
    assert model.body[2].weight not in masters
    model = Net()
    model.body[2].weight.data[1, 1] = -1e6
    cast_model(model, PRESETS["bf16-lean"])
    assert model.body[2].weight.dtype is BF16


def test_weights_that_are_inf_already_are_not_the_casts_fault():
    """A mask of -inf is representable in 16 bits and stays."""
    model = nn.Linear(2, 2)
    model.weight.data[0, 0] = -torch.inf
    cast_model(model, PRESETS["fp16-lean"])
    assert model.weight[0, 0] == -torch.inf


@pytest.mark.parametrize(
    "break_it", [lambda m: m.head.weight.data.fill_(1e6), lambda m: m.head.double()], ids=["range", "dtype"]
)
def test_a_rejected_model_is_left_as_it_was(break_it):
    """The refusal comes before the first cast: half a cast model would be of no use to anybody."""
    model = Net()
    break_it(model)
    before = dtypes(model)
    with pytest.raises(SettingError):
        cast_model(model, PRESETS["fp16-lean"])
    assert dtypes(model) == before


def test_integer_parameters_are_left_alone():
    """Only floating parameters are cast."""
    model = nn.Linear(2, 2)
    model.index = nn.Parameter(torch.arange(3), requires_grad=False)
    cast_model(model, PRESETS["bf16-lean"])
    assert model.index.dtype is torch.int64


@every_compute
def test_kept_modules_and_their_insides_stay_fp32(compute):
    """keep_fp32 keeps the parameters of the modules it names, and of all modules inside them."""
    model, masters = net(f"{compute}-lean,keep_fp32=body|head")
    found = dtypes(model)
    assert {found[name] for name in found if name.startswith(("body", "head", "bn"))} == {FP32}
    assert {found[name] for name in found if name.startswith(("conv", "norm"))} == {HALF[compute]}
    assert len(masters) == 4


def test_a_tied_weight_with_one_kept_owner_stays_fp32():
    """One tensor has one dtype: the wider wish wins, under whichever name."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, i):
            return self.head(self.embed(i))

    for pattern in ("head", "embed"):
        model, masters = net(f"bf16-lean,keep_fp32={pattern}", Tied())
        assert model.embed.weight is model.head.weight
        assert model.embed.weight.dtype is FP32
        assert not masters
        with compute_region("cpu", "bf16"):
            loss = model(torch.arange(3)).float().square().mean()
        loss.backward()
        assert model.embed.weight.grad.dtype is FP32
    model, masters = net("bf16-lean", Tied())
    assert model.embed.weight.dtype is BF16
    assert len(masters) == 1


@pytest.mark.parametrize("kept", ["bn", "head"])
def test_modules_that_stay_fp32_are_not_taken_in_16_bits(kept):
    """Batch norm and kept modules of a .bfloat16() model cannot be fp32 any more: rejected, or made fp32, not ignored."""
    model = Net().bfloat16()
    policy = Policy.parse("bf16-lean" if kept == "bn" else "bf16-lean,keep_fp32=head")
    try:
        cast_model(model, policy)
    except SettingError:
        return
    wrap_forwards(model, policy)
    tensors = [*getattr(model, kept).parameters(), *getattr(model, kept).buffers()]
    assert {t.dtype for t in tensors if t.is_floating_point()} == {FP32}
    assert outputs_by_module(model, "bf16")["head"] is (FP32 if kept == "head" else BF16)


# --- forwards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-lean", "fp16-lean"])
def test_kept_modules_compute_in_fp32_inside_a_region(precision):
    """The kept head gives fp32 and everything around it 16 bits; gradients reach every weight."""
    compute = precision[:4]
    model, _ = net(f"{precision},keep_fp32=head")
    found = outputs_by_module(model, compute)
    assert found["head"] is FP32
    assert found["body"] is found["conv"] is HALF[compute]
    with compute_region("cpu", compute):
        model(torch.randn(2, 3, 5)).square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters())


@every_compute
def test_a_kept_module_gives_fp32_digits(compute):
    """Not only the dtype: the product is the one fp32 gives for these inputs."""
    model, _ = net(f"{compute},keep_fp32=head")
    x = torch.randn(3, 6).to(HALF[compute])
    with compute_region("cpu", compute):
        y = model.head(x)
    assert torch.equal(y, torch.nn.functional.linear(x.float(), model.head.weight, model.head.bias))


def test_everything_inside_a_kept_module_computes_in_fp32():
    """Only the outermost kept module is wrapped; what is inside runs with autocast off, functions included."""
    model, _ = net("bf16,keep_fp32=body|body.2")
    found = outputs_by_module(model, "bf16")
    assert found["body"] is found["body.0"] is found["body.2"] is FP32
    assert "forward" in vars(model.body)
    assert "forward" not in vars(model.body[2])


def test_a_kept_module_takes_arguments_of_any_kind():
    """Keyword arguments, nested containers and things that are not tensors arrive; 16-bit tensors in fp32."""

    class Odd(nn.Module):
        def forward(self, *args, **kwargs):
            self.seen = args, kwargs
            return args[0] if args else None

    model = nn.ModuleDict({"odd": Odd()})
    wrap_forwards(model, Policy.parse("bf16,keep_fp32=odd"))
    half = torch.ones(2, dtype=BF16)
    with compute_region("cpu", "bf16"):
        model["odd"]([half, {"x": half}], "text", 3, flag=None, more=(half,))
        (pair, text, number), kwargs = model["odd"].seen
        assert pair[0].dtype is pair[1]["x"].dtype is kwargs["more"][0].dtype is FP32
        assert (text, number, kwargs["flag"]) == ("text", 3, None)
        assert model["odd"]() is None
        model["odd"](x=half)
        assert model["odd"].seen[1]["x"].dtype is FP32


def test_the_device_of_a_kept_modules_inputs_is_found_inside_containers():
    """Autocast must be turned off for the device the inputs are on, also when they come in a list."""
    from halfstep.engine.casting import _device_type

    there = torch.empty(1, device="meta")
    assert _device_type((there,), {}) == "meta"
    assert _device_type((), {"x": there}) == "meta"
    assert _device_type(([there],), {}) == "meta"
    assert _device_type(("text",), {}) == "cpu"


@every_compute
@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6), nn.LayerNorm(6, elementwise_affine=False)], ids=repr
)
def test_normalisation_layers_of_lean_models_run_in_16_bits(compute, layer):
    """16-bit weights and inputs give 16 bits, whether the input comes by position or by name."""
    layer = copy.deepcopy(layer)
    model, _ = net(f"{compute}-lean", nn.Sequential(layer))
    half = torch.randn(2, 6).to(HALF[compute])
    with compute_region("cpu", compute, lean=True):
        assert model(half).dtype is HALF[compute]
        name = "x" if isinstance(layer, nn.RMSNorm) else "input"
        assert layer(**{name: half}).dtype is HALF[compute]


@every_compute
@pytest.mark.parametrize("layer", NORMS, ids=repr)
def test_normalisation_layers_of_lean_models_take_fp32_inputs(compute, layer):
    """An fp32 buffer added on the way, or a kept module before it, gives a normalisation layer fp32 to work on."""
    layer = copy.deepcopy(layer)
    model, _ = net(f"{compute}-lean", nn.Sequential(layer))
    x = torch.randn(2, 6)
    with compute_region("cpu", compute, lean=True):
        found = model(x).float()
    exact = copy.deepcopy(layer).float()
    uncast_forwards(exact)
    assert torch.allclose(found, exact(x), rtol=0.02, atol=0.02)


@every_compute
def test_batch_norm_of_lean_models_keeps_fp32_statistics(compute):
    """A 16-bit convolution feeds it, its statistics and weights are fp32, and it gives 16 bits."""
    model, _ = net(f"{compute}-lean")
    found = outputs_by_module(model, compute)
    assert found["bn"] is HALF[compute]
    assert model.bn.running_mean.dtype is model.bn.running_var.dtype is FP32
    assert model.bn.num_batches_tracked == 1


def test_unknown_patterns_are_rejected():
    """A pattern that names no module is a typing error; the message shows it and some names that exist."""
    with pytest.raises(SettingError, match=r"keep_fp32=haed\|x.\* matches no module of Net.*conv, bn, norm"):
        wrap_forwards(Net(), Policy.parse("bf16,keep_fp32=haed|x.*|head"))


def test_a_module_is_known_by_all_of_its_names():
    """A module that is registered twice can be kept by either name."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

    model, _ = net("bf16-lean,keep_fp32=second", Shared())
    assert model.first.weight.dtype is FP32
    with compute_region("cpu", "bf16"):
        assert model.first(torch.ones(1, 4)).dtype is FP32


def test_uncast_restores_every_forward():
    """No trace is left in any module, and the model computes as before."""
    model = Net()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    wrap_forwards(model, Policy.parse("bf16-lean,keep_fp32=head"))
    assert "forward" in vars(model.head)
    uncast_forwards(model)
    uncast_forwards(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert model(torch.randn(2, 3, 5)).dtype is FP32


def test_wrapping_twice_is_wrapping_once():
    """Two engines on one model, or a second call, must not make a forward call itself."""
    model, policy = Net(), Policy.parse("bf16,keep_fp32=head")
    wrap_forwards(model, policy)
    wrap_forwards(model, policy)
    assert outputs_by_module(model, "bf16")["head"] is FP32
    uncast_forwards(model)
    assert outputs_by_module(model, "bf16")["head"] is BF16


def test_a_forward_that_somebody_wrapped_is_respected():
    """A forward set on the instance is called inside ours, with fp32 inputs, and is back after uncast."""
    model, seen = Net(), []
    original = model.head.forward

    def theirs(x):
        seen.append(x.dtype)
        return original(x) + 1000

    model.head.forward = theirs
    wrap_forwards(model, Policy.parse("bf16,keep_fp32=head"))
    with compute_region("cpu", "bf16"):
        y = model(torch.randn(2, 3, 5))
    assert y.dtype is FP32
    assert y.min() > 900
    assert seen == [FP32]
    uncast_forwards(model)
    assert vars(model.head)["forward"] is theirs


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), by_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize(
    "precision",
    ["bf16,keep_fp32=head", "bf16-lean", "fp16-lean,keep_fp32=head|norm", "bf16-lean,compute_fp32=body|head"],
)
def test_a_copy_of_a_wrapped_model_uses_its_own_weights(clone, precision):
    """Copies work like the original, keep their fp32 modules, and follow their own weights."""
    model, _ = net(precision)
    compute = precision[:4]
    twin = clone(model)
    assert dtypes(twin) == dtypes(model)
    model.eval()
    twin.eval()
    x = torch.randn(2, 3, 5)
    with compute_region("cpu", compute):
        before = twin(x)
        assert torch.equal(model(x), before)
        for p in model.parameters():
            p.data.zero_()
        assert torch.equal(twin(x), before)
        for p in twin.parameters():
            p.data.zero_()
        assert not twin(x).any()
    assert outputs_by_module(twin, compute) == outputs_by_module(model, compute)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch by its own compiler, in some versions
def test_wrapped_models_can_be_compiled():
    """torch.compile traces through the wrapped forwards without a break."""
    torch._dynamo.reset()
    model, _ = net("bf16-lean,keep_fp32=head")
    model.eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 5)
    with compute_region("cpu", "bf16"):
        expected, found = model(x), compiled(x)
    assert found.dtype is expected.dtype is FP32
    assert torch.allclose(found, expected, rtol=1e-2, atol=1e-2)
    torch._dynamo.reset()


def test_each_wrapped_module_runs_its_own_forward():
    """Several kept modules do not get mixed up: each computes with its own weights."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrap_forwards(model, Policy.parse("bf16,keep_fp32=0|1"))
    x = torch.ones(1, 2)
    for layer in model:
        with compute_region("cpu", "bf16"):
            found = layer(x)
        assert torch.equal(found, nn.functional.linear(x, layer.weight, layer.bias))


# --- weights that somebody else changes ----------------------------------------------------------------------------


def fresh_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def zero_a_row(model, _start):
    model[0].weight[0].zero_()


def clamp_data(model, _start):
    for param in model.parameters():
        param.data.clamp_(-0.1, 0.1)


def load_the_start(model, start):
    model.load_state_dict(start)


def replace_storage(model, _start):
    model[2].weight.data = torch.full_like(model[2].weight, 0.25)


def train_with_edits(precision, edit, steps=6):
    torch.manual_seed(0)
    model = fresh_model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), precision=precision, ema=0.5)
    inputs = torch.randn(steps, 4, 6)
    for x in inputs:
        with engine.forward():
            loss = model(x).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            edit(model, start)
        for name, master in engine.masters().items():
            assert torch.allclose(master, engine.params[name].float(), rtol=2.0**-7, atol=2.0**-25)
    return model, engine


@pytest.mark.parametrize("edit", [zero_a_row, clamp_data, load_the_start, replace_storage])
@pytest.mark.parametrize(
    "precision", ["bf16-lean", "bf16-lean,master=fp32", "fp16-lean", "fp16-lean,master=fp32,states=bf16"]
)
def test_weights_edited_outside_the_engine_are_trained_from_there(precision, edit):
    """Pruning, clamping, load_state_dict and new storage have the effect that they have under fp32; the EMA follows."""
    (model, engine), (exact, reference) = train_with_edits(precision, edit), train_with_edits("fp32", edit)
    loose = 0.02  # two steps of AdamW's size: its sign may differ where a gradient is near zero
    for (name, param), other in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert torch.allclose(param.float(), other, atol=loose), name
        assert torch.allclose(engine.ema.averages[name], reference.ema.averages[name], atol=loose), name


def test_a_checkpoint_after_an_edit_has_the_edited_weights(tmp_path):
    """What is saved between an edit and the next step is what that step would use, in every layout it is loaded in."""
    _, engine = train_with_edits("bf16-lean,master=fp32", zero_a_row)
    engine.save(tmp_path / "saved")
    for precision in ("bf16-lean,master=fp32", "bf16-lean", "fp32"):
        fresh = fresh_model()
        other = Engine(fresh, torch.optim.AdamW(fresh.parameters()), precision=precision, ema=0.5)
        other.load(tmp_path / "saved")
        assert (other.masters()["0.weight"][0] == 0).all()
    assert (masters_of(load_checkpoint(tmp_path / "saved"))["0.weight"][0] == 0).all()


# --- a frozen base --------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen base of several kinds of layers, and trainable adapters next to two of them, as in LoRA."""

    def __init__(self, base):
        super().__init__()
        self.embed, self.norm, self.bn = nn.Embedding(11, 8), nn.LayerNorm(8), nn.BatchNorm1d(4)
        self.rnn, self.proj = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.7))
        self.requires_grad_(False).to(base)
        self.down, self.up, self.head = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False), nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.bn(self.rnn(self.norm(self.embed(tokens)))[0])
        return self.head((self.proj(x) + self.up(self.down(x))) * self.scale)


def train_adapters(base, precision, steps=3):
    torch.manual_seed(0)
    model = Adapted(base)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), precision=precision)
    tokens, losses = torch.arange(20).reshape(5, 4) % 11, []
    for _ in range(steps):
        with engine.forward():
            loss = model(tokens).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name].float(), value.float()) for name, value in frozen.items())
    return model, engine, losses


@pytest.mark.parametrize("base", [BF16, FP16], ids=["bf16 base", "fp16 base"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "bf16-lean", "fp16-lean", "bf16,keep_fp32=proj"])
def test_adapters_train_next_to_a_frozen_16_bit_base(precision, base):
    """Under every preset, with losses as in fp32; base weights keep their values, whatever dtype they are stored in."""
    model, engine, losses = train_adapters(base, precision)
    reference = train_adapters(base, "fp32")[2]
    assert torch.allclose(torch.tensor(losses), torch.tensor(reference), rtol=0.03)
    lean = HALF.get(precision.removesuffix("-lean")) if precision.endswith("-lean") else None
    assert model.down.weight.dtype is (lean or FP32)
    assert engine.masters()["up.weight"].dtype is FP32
    assert model.proj.weight.dtype is (base if precision in {"bf16", "fp16", "bf16-lean", "fp16-lean"} else FP32)
    assert model.bn.running_mean.dtype is FP32


def test_casting_a_frozen_base_to_fp32_is_logged_once(caplog):
    """One line names what was cast and that nothing was lost; under bf16 the matrices stay as they are."""
    caplog.set_level("INFO", "halfstep")
    train_adapters(BF16, "fp32", steps=1)
    lines = [r.message for r in caplog.records if "Frozen 16-bit weights" in r.message]
    assert len(lines) == 1
    assert "fp32" in lines[0]
    assert "embed.weight" in lines[0]


def test_trainable_16_bit_weights_are_rejected_next_to_a_frozen_base():
    """Only what is trained must be fp32: the message counts those alone."""
    model = Adapted(BF16)
    model.head.to(BF16)
    with pytest.raises(SettingError, match=r"2 parameters, e.g. head.weight"):
        cast_model(model, PRESETS["bf16"])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated, and people still have such weights
@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"fp8"}))
def test_frozen_tensors_of_any_kind_pass_untouched(preset):
    """A quantised base, packed integers, fp8 and tensor subclasses are only read: no preset casts or rejects them."""
    model = nn.Sequential(nn.Linear(4, 4))
    odd = {
        "packed": torch.arange(3, dtype=torch.uint8),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "wrapped": TwoTensor(torch.ones(3), torch.ones(3)),
        "complex": torch.ones(3, dtype=torch.complex64),
    }
    for name, value in odd.items():
        model[0].register_parameter(name, nn.Parameter(value, requires_grad=False))
    params = [p for p in model.parameters() if p.requires_grad]
    engine = Engine(model, torch.optim.AdamW(params), precision=preset)
    with engine.forward():
        loss = model(torch.randn(2, 4)).float().square().mean()
    engine.backward(loss)
    engine.step()
    for name, value in odd.items():
        now = getattr(model[0], name)
        assert (type(now.data), now.dtype) == (type(value), value.dtype)


def test_trainable_tensor_subclasses_are_rejected_by_name_before_anything_is_changed():
    """The Engine names the parameter, its kind and what to do."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    optimizer = torch.optim.SGD(model.parameters())
    for precision in ("fp32", "bf16-lean"):
        with pytest.raises(SettingError, match=r"parameter 1.weight: it is a tensor subclass, TwoTensor.*Freeze it"):
            Engine(model, optimizer, precision=precision)
        assert model[0].weight.dtype is FP32


def test_recurrent_weights_are_joined_again_after_the_cast(monkeypatch):
    """cuDNN reads a recurrent layer's weights from one buffer; the cast makes separate tensors."""
    model = nn.ModuleDict({"rnn": nn.LSTM(8, 8), "frozen": nn.GRU(8, 8)})
    joined = []
    monkeypatch.setattr(
        nn.RNNBase, "flatten_parameters", lambda self: joined.append((self, {p.dtype for p in self.parameters()}))
    )
    cast_model(model, Policy.parse("fp16-lean,keep_fp32=frozen"))
    assert joined == [(model["rnn"], {torch.float16})]


@pytest.mark.gpu
def test_a_recurrent_layer_trains_without_compaction():
    """torch warns, which is an error here, where cuDNN has to copy the weights at every call; it joins no bf16 weights."""
    model = nn.LSTM(64, 64).to("cuda")
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp16-lean")
    for _ in range(2):
        with engine.forward():
            loss = model(torch.randn(5, 2, 64, device="cuda"))[0].float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.close()
