"""HS149 without a trace: validation through other methods of a model than training, and log-probabilities that an update compares."""

import pytest

from check_scripts import findings

VALIDATED = """\
import torch

def run_epoch(model, loader, optimizer, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

@torch.no_grad()
def {name}(model, loader):
    {before}
    return sum(score({call}, y) for x, y in loader)

def main(model, loader, valid, optimizer, scaler):
    run_epoch(model, loader, optimizer, scaler)
    {around}
        print({name}(model, valid))
"""


def reported(name="validate_epoch", before="model.eval()", call="model.reconstruct(x)", around="if valid:"):
    """The lines at which HS149 is reported."""
    text = VALIDATED.format(name=name, before=before, call=call, around=around)
    return [f.line for f in findings(text, "HS149")]


@pytest.mark.parametrize("call", ["model.reconstruct(x)", "model.encode(x)", "model.decode(model.encode(x))"])
def test_validation_through_another_method_of_the_model_is_reported(call):
    """Training calls the model, validation one of its methods."""
    assert reported(call=call) == [15]


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "sample_images"},
        {"name": "export_model"},
        {"call": "x.mean()"},
        {"call": "model.state_dict()"},
        {"call": "model.vocabulary(x)"},
        {"before": "model = load_model(loader.path)"},
        {"before": "ctx = open_context()"},
        {"around": "with torch.autocast('cuda', dtype=torch.float16):"},
        {"around": "with accelerator.autocast():"},
    ],
    ids=str,
)
def test_what_validates_nothing_or_may_run_in_a_region_is_not_reported(changed):
    """Functions with other names, calls that compute nothing, models of their own, and whatever may open a region."""
    assert reported(**changed) == []


def test_a_copy_of_the_model_is_still_the_model():
    """A cast for the type checker makes no model."""
    assert reported(before="net = cast(Autoencoder, model)", call="net.reconstruct(x)") == [15]


def test_a_region_in_a_function_that_validation_calls_is_found():
    """The region may be in a helper."""
    helper = '\ndef run(model, x):\n    with torch.autocast("cuda", dtype=torch.float16):\n        return model.reconstruct(x)\n'
    text = VALIDATED.format(
        name="validate", before="model.eval()", call="model.encode(run(model, x))", around="if valid:"
    )
    assert findings(text + helper, "HS149") == []


POLICY = """\
import torch

@torch.no_grad()
def roll_out(policy, ref_model, prompt):
    old_logps = []
    for _ in range(32):
        {rollout}
        old_logps.append(logits.log_softmax(-1).max())
    return old_logps

def train(policy, ref_model, optimizer, prompts):
    for prompt in prompts:
        old_logp = torch.stack(roll_out(policy, ref_model, prompt))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logp = policy(prompt).log_softmax(-1)
            {ratio}
            loss = -ratio.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
RATIO = "ratio = torch.exp(logp - old_logp)"


@pytest.mark.parametrize(
    ("rollout", "ratio", "expected"),
    [
        ("logits = policy(prompt)", RATIO, [7]),
        ("logits = ref_model(prompt)", RATIO, []),
        ("logits = policy(prompt)", "ratio = logp", []),
        ("with torch.autocast('cuda', dtype=torch.bfloat16): logits = policy(prompt)", RATIO, []),
    ],
)
def test_old_probabilities_are_computed_as_the_new_ones(rollout, ratio, expected):
    """The ratio of an update compares float32 with bfloat16, unless the rollout has the region as well."""
    assert [f.line for f in findings(POLICY.format(rollout=rollout, ratio=ratio), "HS149")] == expected


TWINS = """\
import torch

class Trainer:
    def train_iteration(self, batch):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.pipeline.get_train_loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def eval_iteration(self, batch):
        {start}
            return self.pipeline.{call}(batch)
"""


@pytest.mark.parametrize(
    ("start", "call", "expected"),
    [
        ("if batch:", "get_eval_loss", [14]),
        ("with self.autocast():", "get_eval_loss", []),
        ("if batch:", "get_statistics", []),
    ],
)
def test_method_whose_twin_training_calls_under_autocast(start, call, expected):
    """Validation calls the method of the same object that has the same name but for the phase, outside any region."""
    assert [f.line for f in findings(TWINS.format(start=start, call=call), "HS149")] == expected
