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


OWN_MODEL = """\
import torch
from transformers import Trainer, TrainingArguments
class Policy(torch.nn.Module):
    {switch}
    def forward(self, x, labels=None, {extra}):
        return {{"loss": self.loss(self.body(x), labels)}}
class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        {labels}
        return model(**inputs)["loss"]
def main(arguments):
    model = {model}
    args = TrainingArguments('out', bf16=True, gradient_accumulation_steps=arguments.accumulate)
    Own(model=model, args=args).train()
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [8]),
        ({"extra": "scale=1.0"}, []),
        ({"labels": "pass"}, []),
        ({"model": "load(arguments)"}, []),
        ({"model": "Policy() if arguments.own else load(arguments)"}, []),
        ({"switch": "accepts_loss_kwargs = False"}, []),
    ],
)
def test_the_model_of_a_trainer_that_the_file_defines(changes, expected):
    """Any model whose forward takes `**kwargs` makes the Trainer leave the division to the loss, where the batch has labels to count."""
    filled = {
        "extra": "**kwargs",
        "labels": "labels = inputs['labels']",
        "model": "Policy()",
        "switch": "pass",
        **changes,
    }
    assert reported(OWN_MODEL.format(**filled)) == expected


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


ITERATION = """\
import torch
scaler = torch.amp.GradScaler('cuda')
{before}
for i, batch in enumerate(loader):
    mask = batch['mask']
    with torch.autocast('cuda', dtype=torch.float16):
        loss = loss_fn(model(batch['x']), batch['y'])
    {loss}
    scaler.scale(loss).backward()
    {after}
    if (i + 1) % accumulation_steps == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("before", "loss", "after", "expected"),
    [
        ("", "loss = loss.sum() / mask.sum()", "", [9]),  # the mean of this micro-batch
        ("tokens = count(loader)", "loss = loss.sum() / tokens", "", []),  # may be the tokens of a window
        ("", "loss = loss / world_size", "", [9]),
        ("", "pass", "meter.update(loss.item() * accumulation_steps)", [9]),
        ("", "loss = rescale(loss, accumulation_steps)", "", []),  # by another file
        ("setup = TrainSetup(loss='l2', steps=accumulation_steps)", "pass", "", [9]),
        ("loss_fn = MeanLoss(accumulation_steps)", "pass", "", []),
        ("", "pass", "metrics['time'] = metrics['time'] + seconds / accumulation_steps", [9]),
        (
            "",
            "if loss.isnan():\n        optimizer.zero_grad()\n        continue",
            "",
            [11],
        ),  # a window that is given up
        ("", "loss = loss * 0.0", "", []),  # no gradient to divide
    ],
)
def test_what_is_no_division_by_the_micro_batches(before, loss, after, expected):
    """A mean over the micro-batch or the processes, a number for the log and a setting that is stored divide by no window."""
    assert reported(ITERATION.format(before=before, loss=loss, after=after)) == expected


TWO_LOSSES = """\
import torch
def adversarial(loader):
    for i, x in enumerate(loader):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss_d, loss_g = criterion(discriminator, generator, x)
        loss_d = loss_d{first}
        loss_d.backward(retain_graph=True)
        loss_g = loss_g{second}
        loss_g.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
def pretrain(loader):
    for i, x in enumerate(loader):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x)
        loss = loss{third}
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("first", "second", "third", "expected"),
    [
        (" / accumulation_steps", " / accumulation_steps", " / accumulation_steps", []),
        (" / accumulation_steps", "", " / accumulation_steps", [9]),
        ("", " / accumulation_steps", " / accumulation_steps", [7]),
        (" / accumulation_steps", " / accumulation_steps", "", [18]),
    ],
)
def test_the_division_of_another_loss(first, second, third, expected):
    """One loss that is divided, in the same loop or in another function, divides no other loss."""
    assert reported(TWO_LOSSES.format(first=first, second=second, third=third)) == expected


FLAG = """\
import torch
pending = 0
for i, x in enumerate(loader):
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x){divided}
    loss.backward()
    pending += 1
    flush = {flag}
    if flush:
        optimizer.step()
        optimizer.zero_grad()
        pending = 0
"""


@pytest.mark.parametrize(
    ("flag", "divided", "expected"),
    [
        ("pending >= accumulation_steps or i + 1 == len(loader)", "", [6]),
        ("pending >= accumulation_steps or i + 1 == len(loader)", " / accumulation_steps", []),
        ("pending == settings.accumulation_steps", "", [6]),
        ("pending >= limit", "", []),
    ],
)
def test_a_flag_that_counts_to_the_length_of_a_window(flag, divided, expected):
    """The step waits for a counter behind a flag, whatever the flag is called."""
    assert reported(FLAG.format(flag=flag, divided=divided)) == expected


ENTRY = """\
import torch
for i, x in enumerate(loader):
    with torch.autocast('cuda', dtype=torch.bfloat16):
        output = model(x)
    output['loss'] /= setup['optimizer']['{divisor}']
    output['loss'].backward()
    if (i + 1) % setup['optimizer']['every'] == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("divisor", "expected"), [("every", []), ("temperature", [6])])
def test_a_window_length_that_is_an_entry(divisor, expected):
    """The divisor is compared with the last key of the entry."""
    assert reported(ENTRY.format(divisor=divisor)) == expected


LAST_APART = """\
import torch
for step in range(steps):
    for k in range(accumulation_steps):
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(next(batches))
        if k < accumulation_steps - 1:
            with model.no_sync():
                (loss{divided}).backward()
        else:
            (loss{divided}).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("divided", "expected"), [("", [8, 10]), (" / accumulation_steps", [])])
def test_the_last_micro_batch_in_a_branch_of_its_own(divided, expected):
    """The branches of all but the last micro-batch and of the last one are one window."""
    assert reported(LAST_APART.format(divided=divided)) == expected


OWN_ENGINE = """\
import torch
class Agent:
    def train(self, loader):
        for i, x in enumerate(loader):
            with torch.autocast('cuda', enabled=self.args.amp):
                loss = self.model(x)
            if self.args.deepspeed:
                self.model.backward(loss)
            elif self.args.amp:
                self.scaler.scale(loss{divided}).backward()
            else:
                (loss{divided}).backward()
            if (i + 1) % self.args.accumulation_steps == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(("divided", "expected"), [("", [10]), (" / self.args.accumulation_steps", [])])
def test_an_engine_in_another_branch(divided, expected):
    """DeepSpeed divides the loss itself, so that its backward is not the one to report."""
    assert reported(OWN_ENGINE.format(divided=divided)) == expected


SECOND_TEST = """\
import torch
scaler = torch.amp.GradScaler('cuda') if amp else None
for i, x in enumerate(loader):
    if scaler is not None:
        with torch.autocast('cuda', dtype=torch.float16):
            {loss} = model(x){first}
    else:
        {loss} = model(x){second}
    if scaler is not None:
        scaler.scale({loss}).backward()
    else:
        {loss}.backward()
    if (i + 1) % accum == 0:
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("loss", ["loss", "total"])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(" / accum", " / accum", []), ("", " / accum", [10]), (" / accum", "", [12]), ("", "", [10])],
)
def test_a_division_in_one_of_two_branches(loss, first, second, expected):
    """The other branch does not divide for this one; the loss may also be called `total`."""
    assert reported(SECOND_TEST.format(loss=loss, first=first, second=second)) == expected


@pytest.mark.parametrize(("divided", "expected"), [("l_total /= accum", []), ("pass", [7])])
def test_a_loss_with_the_name_of_a_count(divided, expected):
    """What backward runs on is a loss, also if it is called a total."""
    text = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor i, x in enumerate(loader):\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        l_total, logs = model(x)\n"
        f"    {divided}\n    scaler.scale(l_total).backward()\n    if (i + 1) % accum == 0:\n"
        "        scaler.step(optimizer)\n        scaler.update()\n        optimizer.zero_grad()\n"
    )
    assert reported(text) == expected
