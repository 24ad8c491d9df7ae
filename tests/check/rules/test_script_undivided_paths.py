"""HS180: windows behind unrelated tests, quotients that only the log has, and the loss of a Trainer."""

import pytest

from check_scripts import findings


def reported(text):
    """The lines at which HS180 is reported."""
    return [f.line for f in findings(text, "HS180")]


GIVEN_UP = """\
import torch
for step in range(steps):
    for micro in range(accumulation_steps):
        x, y = next(batches)
        if x.size(0) != micro_batch_size:
            continue
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = loss_fn(model(x), y){divided}
        {clear}
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("clear", "divided", "expected"),
    [
        ("pass", "", [10]),
        ("if torch.isnan(loss):\n            optimizer.zero_grad()\n            break", "", [12]),
        ("if torch.isnan(loss):\n            optimizer.zero_grad()\n            break", " / accumulation_steps", []),
        ("optimizer.zero_grad()", "", []),  # nothing accumulates; HS181
    ],
)
def test_a_window_that_may_be_given_up(clear, divided, expected):
    """A test of the batch's shape is no end of a window, and clearing where a window is given up is no clearing of each micro-batch."""
    assert reported(GIVEN_UP.format(clear=clear, divided=divided)) == expected


LOGGED = """\
import torch
total = torch.zeros(2)
for step in range(steps):
    for micro in range(accumulation_steps):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x)
        {quotient}
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = total[0] / total[1]
"""


@pytest.mark.parametrize(
    ("quotient", "expected"),
    [
        ("total[0] = loss / accumulation_steps", [8]),
        ("shown = loss / accumulation_steps", [8]),
        ("total[0] += loss / accumulation_steps", [8]),
        ("scaled = loss / accumulation_steps\n        loss = scaled", []),
        ("loss = loss / accumulation_steps", []),
    ],
)
def test_a_quotient_of_the_loss_that_only_the_log_has(quotient, expected):
    """`total[0] = loss / n` divides nothing that backward runs on, whatever the loss is assigned after the window."""
    assert reported(LOGGED.format(quotient=quotient)) == expected


BRANCHES = """\
import torch
class Trainer:
    def step(self, x):
        with torch.autocast('cuda', enabled=self.amp):
            loss = self.model(x)
        if self.amp:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        if (self.count + 1) % self.accumulation_steps == 0:
            if self.amp:
                self.scaler.step(self.optimizer.inner if hasattr(self.optimizer, 'inner') else self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            self.{cleared}.zero_grad()
    def fit(self):
        self.scaler = torch.amp.GradScaler('cuda')
        for x in self.loader:
            self.step(x)
"""


@pytest.mark.parametrize(("cleared", "expected"), [("optimizer", [7]), ("model", [7])])
def test_the_branch_without_amp_steps_the_same_optimizer(cleared, expected):
    """The optimizer of the other branch is not a second one, whose gradients would be cleared apart."""
    assert reported(BRANCHES.format(cleared=cleared)) == expected


TRAINER = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, {extra}):
        outputs = model(**inputs{passed})
        loss = outputs.loss{divided}
        return (loss, outputs) if return_outputs else loss
model = AutoModelForCausalLM.from_pretrained(name)
args = TrainingArguments('out', bf16=True, gradient_accumulation_steps={steps})
Own(model=model, args=args).train()
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4]),
        ({"extra": "num_items_in_batch=None"}, [4]),
        ({"passed": ", **kwargs"}, []),
        ({"extra": "num_items_in_batch=None", "passed": ", num_items_in_batch=num_items_in_batch"}, []),
        ({"divided": " / self.current_gradient_accumulation_steps"}, []),
        ({"steps": "1"}, []),
    ],
)
def test_the_loss_of_a_trainer_that_ignores_the_number_of_tokens(changes, expected):
    """The Trainer divides nothing where the model takes `**kwargs`: its own compute_loss has to use `num_items_in_batch`."""
    text = TRAINER.format(**{"extra": "**kwargs", "passed": "", "divided": "", "steps": "4", **changes})
    assert reported(text) == expected


ONE_PRECISION = """\
import torch
from apex import amp
for i, (x, y) in enumerate(loader):
    loss = loss_fn(model(x), y)
    if {test}:
        with amp.scale_loss(loss / accumulation_steps, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        {otherwise}.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("test", "otherwise", "expected"),
    [
        ("args.apex", "loss", [9]),
        ("use_amp", "loss", [9]),
        ("args.apex", "(loss / accumulation_steps)", []),
        ("accumulation_steps > 1", "loss", []),
    ],
)
def test_a_division_in_mixed_precision_is_none_without_it(test, otherwise, expected):
    """Each branch has its own backward: the quotient of one does not reach the other, unless the test is about the window."""
    assert reported(ONE_PRECISION.format(test=test, otherwise=otherwise)) == expected


def test_a_loss_that_no_precision_divides_is_reported_once():
    """At the first of the two backwards."""
    text = ONE_PRECISION.format(test="use_amp", otherwise="loss").replace("loss / accumulation_steps", "loss")
    assert reported(text) == [7]


FLAGGED = """\
import torch
class Learner:
    def train_step(self, x, accumulate=False):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(x).mean()
        if {test}:
            loss = loss / self.accumulation_steps
        loss.backward()
        if not accumulate:
            self.optimizer.step()
            self.optimizer.zero_grad()
    def fit(self):
        for i, x in enumerate(self.loader):
            self.train_step(x, accumulate=(i % self.accumulation_steps != self.accumulation_steps - 1))
"""


@pytest.mark.parametrize(("test", "expected"), [("accumulate", [6]), ("self.accumulation_steps > 1", []), ("True", [])])
def test_the_micro_batch_before_the_step_is_divided_too(test, expected):
    """Its gradients are added to those of the others, and weigh as much as all of them if only they are divided."""
    assert reported(FLAGGED.format(test=test)) == expected
