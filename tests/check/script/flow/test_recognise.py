"""What calls do, from what is known about their receiver."""

import pytest

from check_scripts import script


def kinds(text):
    facts = script(f"import torch\nfrom torch import optim\n# autocast\nloss.backward()\n{text}\n")
    return [e.kind for t in facts.traces for e in t if e.kind not in {"backward", "set_model", "set_optimizer"}]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("optimizer.step()", "opt_step"),
        ("self.optimizer_g.step()", "opt_step"),
        ("solver = optim.SGD(p, 0.1)\nsolver.step()", "opt_step"),
        ("scheduler.step()", "sched_step"),
        ("lr_warmup.step()", "sched_step"),
        ("s = optim.lr_scheduler.StepLR(o, 3)\ns.step()", "sched_step"),
        ("scaler = torch.amp.GradScaler('cuda')\nscaler.step(optimizer)", "scaler_step"),
        ("gs = torch.amp.GradScaler('cuda')\ngs.update()", "update"),
        ("scaler.scale(loss).backward()", "scale"),
        ("torch.nn.utils.clip_grad_norm_(p, 1)", "clip"),
        ("from torch.nn.utils import clip_grad_value_\nclip_grad_value_(p, 1)", "clip"),
        ("model.clip_grad_norm_(1.0)", "clip"),
        ("accelerator.clip_grad_norm_(p, 1.0)", "owned_clip"),
        ("loss_scaler(loss, optimizer)", "owned_step"),
        ("model.half()", "cast"),
        ("model.to('cuda', torch.float16)", "cast"),
        ("p.grad.data.norm(2)", "grad_read"),
        ("torch.norm(p.grad)", "grad_read"),
        ("optimizer.state_dict()", "save_optimizer"),
        ("optimizer.load_state_dict(s)", "load_optimizer"),
    ],
)
def test_a_call_is_recognised(text, kind):
    """A call becomes an event of the right kind."""
    assert kinds(text)[-1] == kind


@pytest.mark.parametrize(
    "text",
    [
        "env.step(action)",
        "pbar.update(1)",
        "config.update(options)",
        "model.to(device)",
        "x.norm()",
        "p.grad is None",
        "best = find_optimal_threshold(x)\nbest.state_dict()",
        "bar.step()",
    ],
)
def test_a_call_that_only_shares_a_name_is_no_event(text):
    """Steps and updates of other objects are not events."""
    assert kinds(text) == []


def test_results_of_a_call_are_distinguished_by_name():
    """`optimizer, scheduler = make_optimizer()` gives one of each."""
    assert kinds("optimizer, scheduler = make_optimizer()\noptimizer.step()\nscheduler.step()") == [
        "opt_step",
        "sched_step",
    ]


def test_a_parameter_used_as_a_scaler_is_one():
    """A parameter on which unscale_ is called is a scaler, whatever its name."""
    text = "def f(helper):\n    helper.unscale_(optimizer)\n    helper.step(optimizer)\n    helper.update()"
    assert kinds(text) == ["unscale", "scaler_step", "update"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("model_out.loss.backward()", "backward"),
        ("model_out['loss'].backward()", "backward"),
        ("self.model.loss.backward()", "backward"),
        ("model.backward(loss)", "owned_backward"),
        ("model_engine.backward(out.loss)", "owned_backward"),
        ("self.model.backward()", "owned_backward"),
    ],
)
def test_a_loss_that_a_model_returns_is_not_a_model(text, kind):
    """`backward` of a loss is torch's, whatever the name of the model that returned it; of a model it is the model's."""
    facts = script(f"import torch\n# autocast\n{text}\n")
    assert [e.kind for t in facts.traces for e in t] == [kind]


@pytest.mark.parametrize(
    ("loss", "subject", "scaled"),
    [
        ("sum(losses.values())", "losses", "no"),
        ("criterion(out, y)", "out", "no"),
        ("(loss * loss_scale)", "loss", "maybe"),
        ("(loss + scaled_kl)", "loss", "no"),
        ("(scale * loss + scale * aux)", "scale", "maybe"),
    ],
)
def test_what_backward_is_called_on(loss, subject, scaled):
    """The subject is a variable and not the function around it; a sum carries a scale only if all of it does."""
    facts = script(f"import torch\n# autocast\n{loss}.backward()\n")
    (event,) = [e for t in facts.traces for e in t if e.kind == "backward"]
    assert (event.subject, event.scaled) == (subject, scaled)
