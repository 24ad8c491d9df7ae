"""Gradients and models that changed outside the Engine, and gradients set aside during a forward."""

import copy
import gc
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from halfstep.engine import guards
from halfstep.engine.engine import Engine
from halfstep.engine.guards import GradientGuard, ModelGuard, count_registrations, num_registrations
from halfstep.errors import SettingError


def layer():
    return nn.Linear(3, 2)


def backward(model):
    model(torch.ones(1, 3)).sum().backward()


def two_layers():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = two_layers()

    def forward(self, x):
        return self.body(x).relu()


def engine_of(model, precision, **options):
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, **options)


def train(engine, *, between=lambda: None):
    with engine.forward():
        loss = engine.model(torch.ones(1, 3)).float().sum()
    engine.backward(loss)
    between()
    return engine.step()


@pytest.fixture
def guarded():
    model = layer()
    return model, GradientGuard(dict(model.named_parameters()))


def test_untouched_gradients_pass(guarded):
    """None at the start, the Engine's own after backward, accumulated ones after remembering again."""
    model, guard = guarded
    guard.check("backward")
    for _ in range(3):
        backward(model)
        guard.record()
        guard.check("step")
        guard.check("backward")
    model.zero_grad()
    guard.forget()
    guard.check("backward")


def test_gradients_from_elsewhere_are_detected(guarded):
    """A bare loss.backward() before any of the Engine's."""
    model, guard = guarded
    backward(model)
    with pytest.raises(
        SettingError, match=r"step\(\): there are gradients that engine.backward\(\) did not compute \(weight, bias\)"
    ):
        guard.check("step")
    with pytest.raises(SettingError, match=r"Write engine.backward\(loss\).*model.zero_grad\(\)"):
        guard.check("backward")


@pytest.mark.parametrize(
    "touch",
    [
        backward,
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model: model.weight.grad.mul_(2),
        lambda model: model.weight.grad.zero_(),
        lambda model: setattr(model.weight, "grad", torch.zeros(2, 3)),
    ],
    ids=["bare backward", "clip_grad_norm_", "edited", "zeroed", "replaced"],
)
def test_changed_gradients_are_detected(guarded, touch):
    """Clipping, editing, replacing, or adding to gradients that are still scaled."""
    model, guard = guarded
    backward(model)
    guard.record()
    touch(model)
    with pytest.raises(SettingError, match=r"changed since engine.backward\(\).*max_norm=.*engine.unscale\(\)"):
        guard.check("step")


def test_cleared_gradients_are_detected(guarded):
    """optimizer.zero_grad() between backward and step throws the gradients away."""
    model, guard = guarded
    backward(model)
    guard.record()
    model.zero_grad()
    with pytest.raises(
        SettingError, match=r"unscale\(\): the gradients of weight, bias were cleared.*remove optimizer.zero_grad"
    ):
        guard.check("unscale")


def test_cleared_and_remade_gradients_are_detected():
    """zero_grad and a bare backward in a row: new tensors may get the old ones' addresses, and must not pass for them."""
    for _ in range(50):
        model = nn.Linear(3, 1, bias=False)
        guard = GradientGuard(dict(model.named_parameters()))
        backward(model)
        guard.record()
        model.weight.grad = None
        model.weight.grad = torch.zeros(1, 3)
        with pytest.raises(SettingError, match="changed since"):
            guard.check("step")


def test_a_parameter_that_gets_a_gradient_late_is_detected(guarded):
    """One gradient more than after backward is a change too."""
    model, guard = guarded
    backward(model)
    model.bias.grad = None
    guard.record()
    model.bias.grad = torch.ones(2)
    with pytest.raises(SettingError, match="the gradients of bias changed"):
        guard.check("step")


def test_gradients_are_moved_out_of_a_graph_once_a_window():
    """A copy takes the place of each gradient, later ones add to it in place, and an edit is still noticed."""
    model = layer()
    guard = GradientGuard(dict(model.named_parameters()), in_graphs=True)
    with guard.set_aside():  # nothing there yet
        pass
    backward(model)
    guard.record()
    inside = model.weight.grad
    with guard.set_aside():
        inside.fill_(torch.nan)  # what a replay does to it
    guard.check("backward")
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
    kept = model.weight.grad
    backward(model)
    guard.record()
    with guard.set_aside():
        pass
    assert model.weight.grad is kept
    assert torch.equal(kept, torch.full((2, 3), 2.0))
    guard.forget()
    guard.record()
    model.bias.grad.mul_(2)
    with guard.set_aside():
        pass
    with pytest.raises(SettingError, match="gradients of bias changed"):
        guard.check("step")


def test_hidden_gradients_come_back_as_they_were():
    """No weight has a gradient inside the block, after it each has its own; one made inside stays and is noticed."""
    model = layer()
    guard = GradientGuard(dict(model.named_parameters()), hide=True)
    backward(model)
    guard.record()
    before = model.weight.grad
    with pytest.raises(ZeroDivisionError), guard.set_aside():
        assert model.weight.grad is None
        raise ZeroDivisionError
    assert model.weight.grad is before
    guard.check("step")
    with guard.set_aside():
        guard.check("backward")  # inside the block
        assert model.weight.grad is before
    with guard.set_aside():
        backward(model)
    with pytest.raises(SettingError, match="gradients of weight, bias changed"):
        guard.check("step")


def test_gradients_dropped_during_a_forward_do_not_come_back():
    """A window that is reset inside the block stays empty."""
    model = layer()
    guard = GradientGuard(dict(model.named_parameters()), hide=True)
    backward(model)
    guard.record()
    with guard.set_aside():
        guard.forget()
    assert model.weight.grad is None


def test_gradients_that_are_not_in_the_way_stay_where_they_are(guarded):
    """Moving costs a copy, so nobody else pays it."""
    model, guard = guarded
    backward(model)
    before = model.weight.grad
    with guard.set_aside():
        assert model.weight.grad is before
    assert model.weight.grad is before


def test_long_lists_of_names_are_cut():
    """Three names and a count are enough."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    guard = GradientGuard(dict(model.named_parameters()))
    backward(model)
    with pytest.raises(SettingError, match=r"\(0.weight, 0.bias, 1.weight and 5 more\)"):
        guard.check("step")


def test_an_update_without_any_gradient_is_detected(guarded):
    """After unscale() gradients may be edited, and some may be cleared, but not all of them."""
    model, guard = guarded
    backward(model)
    guard.check_present("step")
    model.weight.grad = None
    guard.check_present("step")
    model.zero_grad()
    with pytest.raises(SettingError, match=r"step\(\): all gradients were cleared since engine.unscale\(\)"):
        guard.check_present("step")


def test_a_window_that_was_unscaled_reports_what_came_too_late():
    """unscale() twice and backward() after unscale() are reported as such, not as gradients from elsewhere."""
    model = two_layers()
    engine = engine_of(model, "fp32", accumulate=2)
    loss = model(torch.ones(1, 3)).sum()
    engine.backward(loss, retain_graph=True)
    engine.unscale()
    with pytest.raises(SettingError, match=r"unscale\(\) was already called in this window"):
        engine.unscale()
    with pytest.raises(SettingError, match=r"backward\(\) after unscale\(\): these gradients are already divided"):
        engine.backward(loss)
    model[0].weight.grad.mul_(2)  # an edit is allowed here, and changes none of the messages
    with pytest.raises(SettingError, match=r"backward\(\) after unscale\(\)"):
        engine.backward(loss)
    assert engine.step(last=True).boundary


# --- models that changed ----------------------------------------------------------------------------------------------


CASTS = [
    ("fp32", "half"),
    ("fp32", "double"),
    ("bf16", "bfloat16"),
    ("fp16", "half"),
    ("bf16-lean", "float"),
    ("bf16-lean", "half"),
    ("fp16-lean", "bfloat16"),
]


@pytest.mark.parametrize("when", ["before forward", "before step"])
@pytest.mark.parametrize(("precision", "cast"), CASTS)
def test_a_model_that_is_cast_after_the_engine_was_built_is_rejected(precision, cast, when):
    """Before the update, by name, with both dtypes: masters and states would not follow."""
    model = two_layers()
    engine = engine_of(model, precision)
    train(engine)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    old, new = model[0].weight.dtype, getattr(nn.Linear(1, 1), cast)().weight.dtype
    message = rf"0.weight from {str(old)[6:]} on cpu to {str(new)[6:]} on cpu, .*1 more.*Engine\(precision=...\)"
    with pytest.raises(SettingError, match=message):
        if when == "before forward":
            getattr(model, cast)()
            train(engine)
        else:
            train(engine, between=getattr(model, cast))
    assert all(torch.equal(p, before[name].to(new)) for name, p in model.named_parameters())


def test_casts_that_change_no_trained_parameter_pass():
    """A cast to the dtype that a model already has, and one of its frozen parts."""
    model = two_layers()
    model[0].requires_grad_(False)
    engine = engine_of(model, "bf16")
    train(engine)
    model.float()
    model[0].bfloat16()
    assert not train(engine).skipped
    model[0].requires_grad_(True)
    with pytest.raises(SettingError, match="0.weight from float32 on cpu to bfloat16 on cpu"):
        train(engine)


def test_a_parameter_on_another_device_is_rejected():
    """model.to(device) keeps the Parameter objects, so the optimizer would update them with states of the old device."""
    param = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"), requires_grad=True)
    guard = ModelGuard(nn.Module(), {"weight": param})
    guard.check("step")
    param.device = torch.device("cuda", 0)
    with pytest.raises(SettingError, match=r"step\(\): .*weight from float32 on cpu to float32 on cuda:0"):
        guard.check("step")


class Router(nn.Linear):
    """A layer that casts itself in its forward, as the routers of transformers' Switch Transformers do."""

    def forward(self, x):
        """In fp32, whatever the weights were."""
        return super().to(torch.float32)._linear(x)

    def _linear(self, x):
        return super().forward(x.float())


@pytest.mark.parametrize("mixed", [False, True], ids=["all of a name", "some of a name"])
def test_a_model_that_casts_a_part_of_itself_trains_with_the_patterns_that_the_error_names(mixed):
    """In a lean preset its own cast replaces a 16-bit weight; `keep_fp32` with the error's patterns keeps that part and no other."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), Router(3, 3)) for _ in range(3)))
    model.append(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) if mixed else nn.Linear(3, 3))
    engine = engine_of(copy.deepcopy(model), "bf16-lean")
    with pytest.raises(SettingError, match=r"casts them in its forward, .*keep_fp32=(\S+) in the precision") as raised:
        train(engine)
    patterns = re.search(r"keep_fp32=(\S+)", str(raised.value))[1]
    assert patterns == ("0.1|1.1|2.1" if mixed else "*.1")
    engine = engine_of(model, f"bf16-lean,keep_fp32={patterns}")
    assert not train(engine).skipped
    assert [p.dtype for p in model[2].parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2


def assign_state(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def delete_and_add(model):
    del model[1]
    model.append(nn.Linear(4, 2))  # perhaps in the memory of the old one


REPLACEMENTS = {
    "deleted layer": (delete_and_add, "1.weight, 1.bias"),
    "layer": (lambda model: setattr(model, "1", nn.Linear(4, 2)), "1.weight, 1.bias"),
    "parameter": (lambda model: setattr(model[1], "bias", nn.Parameter(torch.zeros(2))), "1.bias"),
    "added": (lambda model: model.append(nn.Linear(2, 2)), "2.weight, 2.bias"),
    "assigned": (assign_state, "0.weight, 0.bias, 1.weight and 1 more"),
    "parametrized": (
        lambda model: nn.utils.parametrizations.weight_norm(model[0]),
        "0.parametrizations.weight.original0, 0.parametrizations.weight.original1",
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
@pytest.mark.parametrize(("replace", "names"), REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_parameters_that_came_after_the_engine_was_built_are_rejected(replace, names, precision):
    """However late, the first step whose backward reaches them raises: no optimizer would update them."""
    model = two_layers()
    engine = engine_of(model, precision)
    for _ in range(3):
        train(engine)
    replace(model)
    for _ in range(2):  # the second time as well
        with pytest.raises(SettingError, match=rf"step\(\): {names} came into the model after the Engine was built"):
            train(engine)
        engine.reset_window()


def test_changes_of_a_model_that_train_nothing_new_pass():
    """Parts that have no parameters, are frozen, are not used, or were there at the start; and parts that are removed."""
    model = two_layers()
    model.spare = nn.Linear(2, 2)
    model.forward = lambda x: model[1](model[0](x))
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    engine = Engine(model, optimizer, "fp32")
    train(engine)
    model.append(nn.Dropout(0.5))
    model.teacher = nn.Linear(3, 2).requires_grad_(False)
    model.unused = nn.Linear(3, 2)
    prune.identity(model[0], "weight")  # the same parameter under another name
    model.head = model[1]
    model.forward = lambda x: model[1](model[0](x)) + model.spare(model.teacher(x))
    assert not train(engine).skipped
    del model.teacher
    model.forward = lambda x: model.unused(x) + model[1](model[0](x))
    with pytest.raises(SettingError, match=r"unused.weight, unused.bias came into the model"):
        train(engine)


def test_removed_parts_of_a_model_are_freed():
    """A few checks later no reference is left to a part that was there at the start and is in no optimizer."""
    model = two_layers()
    model.teacher = nn.Linear(3, 2).requires_grad_(False)
    guard = ModelGuard(model, dict(model[1].named_parameters()))
    teacher = weakref.ref(model.teacher.weight)
    del model.teacher
    for _ in range(16):
        guard.check("step")
    gc.collect()
    assert teacher() is None


def test_what_is_written_into_a_modules_tables_is_noticed_a_few_checks_later():
    """Registrations are noticed at once; code that bypasses them, like some wrappers, within 16 checks."""
    model = two_layers()
    guard = ModelGuard(model, dict(model.named_parameters()))
    guard.check("step")
    new = nn.Parameter(torch.ones(2))
    new.grad = torch.ones(2)
    model[1]._parameters["bias"] = new
    with pytest.raises(SettingError, match=r"1.bias came into the model"):
        for _ in range(16):
            guard.check("step")


def test_only_registrations_in_the_model_itself_are_counted():
    """A forward that iterates over a slice of its layers makes a new ModuleList, and that changes nothing in the model."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    before = count_registrations(model)
    assert len(model.layers[:3]) == 3
    nn.Sequential(nn.Linear(1, 1))
    assert num_registrations() == before
    model.layers[0].bias = None
    model.layers[1].weight = nn.Parameter(torch.zeros(2, 2))
    model.layers[2].register_buffer("seen", torch.zeros(1))
    model.layers.append(nn.Linear(2, 2))
    assert num_registrations() >= before + 3


class Untouchable:
    """A set of modules that must not be read."""

    def __contains__(self, _):
        raise AssertionError("read while torch.compile traces")


def test_a_compiled_forward_does_not_depend_on_the_models_of_the_process(monkeypatch):
    """A slice of layers registers them in a new list; dynamo follows torch's hooks and would guard on all that is counted."""

    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            for layer in self.layers[:2]:
                x = layer(x)
            return x

    model = Sliced()
    count_registrations(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    monkeypatch.setattr(guards, "_counted", Untouchable())
    assert compiled(torch.ones(1, 2)).shape == (1, 2)
    torch._dynamo.reset()


def test_a_loss_of_another_model_is_reported_once(caplog):
    """A copy of the model is trained in its place: no parameter of the Engine has a gradient, and nothing would be updated."""
    model = two_layers()
    engine = engine_of(model, "fp32")
    train(engine)
    assert "has a gradient" not in caplog.text
    other = copy.deepcopy(model)
    for _ in range(3):
        with engine.forward():
            loss = other(torch.ones(1, 3)).sum()
        engine.backward(loss)
        engine.step()
    assert caplog.text.count("No parameter of the Engine has a gradient, so this update changes nothing") == 1
