"""HS101, HS102, HS156: the loop of one optimizer next to that of another, and calls that receive the scaler."""

import pytest

from check_scripts import findings, reported

ACTOR = """\
import torch

class Agent:
    def __init__(self, actor, critic):
        self.actor, self.critic = actor, critic
        self.actor_optimizer = torch.optim.Adam(actor.parameters())
        self.critic_optimizer = torch.optim.Adam(critic.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def learn(self, batches):
        for i, batch in enumerate(batches):
            with torch.autocast("cuda", dtype=torch.float16):
                critic_loss = self.critic(batch)
            self.critic_optimizer.zero_grad()
            {critic}.backward()
            self.scaler.unscale_(self.critic_optimizer)
            self.scaler.step(self.critic_optimizer)
            if i % self.delay == 0:
                with torch.autocast("cuda", dtype=torch.float16):
                    actor_loss = -self.actor(batch)
                self.actor_optimizer.zero_grad()
                {actor}.backward()
                self.scaler.step(self.actor_optimizer)
            self.scaler.update()
"""


@pytest.mark.parametrize(
    ("critic", "actor", "expected"),
    [
        ("self.scaler.scale(critic_loss)", "self.scaler.scale(actor_loss)", []),
        ("critic_loss", "self.scaler.scale(actor_loss)", [15]),
        ("self.scaler.scale(critic_loss)", "actor_loss", [22]),
    ],
)
def test_the_scaled_loss_of_another_optimizer_scales_no_gradients_of_this_one(critic, actor, expected):
    """HS102 reports the one loss that is not scaled, whichever of the two steps has a condition."""
    found = findings(ACTOR.format(critic=critic, actor=actor), "HS102")
    assert [f.line for f in found] == expected


CHOSEN = """\
import torch
scaler = torch.amp.GradScaler("cuda", enabled=scaling)
for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    if scaling:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_branch_without_scaling_before_the_same_step_is_accepted():
    """The scaled backward of the other branch belongs to the same step."""
    assert "HS102" not in reported(CHOSEN)


EPOCHS = """\
import torch
def train_epoch(model, optimizers, scaler, loader, log):
    optim_g, optim_d = optimizers
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss_d, loss_g = model(x)
        optim_d.zero_grad()
        {loss}.backward()
        scaler.unscale_(optim_d)
        scaler.step(optim_d)
        optim_g.zero_grad()
        scaler.scale(loss_g).backward()
        scaler.step(optim_g)
        scaler.update()

scaler = torch.amp.GradScaler("cuda")
for epoch in range(9):
    if rank == 0:
        train_epoch(model, [optim_g, optim_d], scaler, loader, writer)
    else:
        train_epoch(model, [optim_g, optim_d], scaler, loader, None)
"""


@pytest.mark.parametrize(("loss", "expected"), [("loss_d", {8}), ("scaler.scale(loss_d)", set())])
def test_two_calls_of_one_function_are_no_branches_of_it(loss, expected):
    """HS102: the same lines in another call of the function scale nothing here."""
    assert {f.line for f in findings(EPOCHS.format(loss=loss), "HS102")} == expected


WEIGHTED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        {terms}
    {loss}.backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    "terms",
    [
        "entropy = cfg.entropy_loss_scale * policy(x)\n        loss = cfg.value_loss_scale * value(x)",
        "logit_scale = model.logit_scale.exp()\n        loss = contrast(model(x), model(y), logit_scale)",
    ],
)
@pytest.mark.parametrize(("loss", "is_reported"), [("loss", True), ("scaler.scale(loss)", False)])
def test_the_weight_of_a_term_is_no_loss_scale(terms, loss, is_reported):
    """HS102 also reports a loss with a temperature, or with a term that has a weight of its own."""
    assert ("HS102" in reported(WEIGHTED.format(terms=terms, loss=loss))) is is_reported


TWO_LOOPS = """\
import torch
class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")
    def preview(self, batches):
        for x in batches:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            {preview}
    def train(self, loader):
        for x in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            {train}
{more}"""


@pytest.mark.parametrize(
    ("preview", "train", "more", "expected"),
    [
        ("self.scaler.update()", "self.scaler.update()", "", []),
        ("pass", "self.scaler.update()", "", [12]),
        ("self.finish()", "self.finish()", "    def finish(self):\n        self.scaler.update()\n", []),
        ("self.hooks.end(self)", "self.finish()", "    def finish(self):\n        self.scaler.update()\n", []),
    ],
)
def test_an_update_in_the_loop_of_another_method_is_for_that_loop(preview, train, more, expected):
    """HS101; a method that only updates may be called from anywhere."""
    text = TWO_LOOPS.format(preview=preview, train=train, more=more)
    assert [f.line for f in findings(text, "HS101")] == expected


SEQUENTIAL = """\
import torch
from parts import {name}
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss, is_open = {name}(model, x{passed})
    if is_open:
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(("passed", "is_reported"), [("", True), (", scaler", False), (", scaler if amp else None", False)])  # fmt: skip
def test_a_forward_that_receives_the_scaler_may_run_backward(passed, is_reported):
    """HS115 is silent where a function of another file may have computed the gradients."""
    text = SEQUENTIAL.format(name="contrastive_forward", passed=passed)
    assert ("HS115" in reported(text)) is is_reported


SAVED = """\
import torch
from parts import load_checkpoint, save_checkpoint
scaler = torch.amp.GradScaler("cuda", enabled=amp)
start = load_checkpoint(path, model, optimizer{loaded})
for epoch in range(start, 9):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    save_checkpoint(path, model, optimizer, epoch{saved})
"""


@pytest.mark.parametrize(
    ("loaded", "saved", "expected"),
    [
        ("", "", {"HS170"}),
        (", scaler if amp else None", ", scaler if amp else None", set()),
        (", amp and scaler", ", amp and scaler", set()),
    ],
)
def test_a_scaler_that_is_passed_only_with_a_flag_is_saved(loaded, saved, expected):
    """HS170: `scaler if amp else None` is the scaler, as far as a checkpoint is concerned."""
    codes = reported(SAVED.format(loaded=loaded, saved=saved))
    assert codes & {"HS170", "HS171", "HS172"} == expected


MICRO = """\
import torch
scaler = torch.amp.GradScaler("cuda")
while True:
    for micro in range(accumulation_steps):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(next(batches)) / accumulation_steps
        scaler.scale(loss).backward()
    # the gradients of the window
    {before}
    scaler.step(optimizer)
    scaler.update()
    {after}
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [("optimizer.zero_grad()", "pass", [9]), ("pass", "optimizer.zero_grad()", [])],
)
def test_clearing_after_the_loop_over_micro_batches_and_before_the_step(before, after, expected):
    """HS156, also where a comment between backward and step is about gradients."""
    found = findings(MICRO.format(before=before, after=after), "HS156")
    assert [f.line for f in found] == expected


@pytest.mark.parametrize(("clear", "expected"), [("pass", {10, 13}), ("optim_d.zero_grad()", set())])
def test_optimizers_out_of_a_parameter_leave_the_gradients(clear, expected):
    """HS156 reports steps without any clearing, also of optimizers that are passed in together."""
    text = EPOCHS.format(loss="scaler.scale(loss_d)")
    text = text.replace("optim_d.zero_grad()", clear).replace("optim_g.zero_grad()", clear.replace("_d", "_g"))
    assert {f.line for f in findings(text, "HS156")} == expected


@pytest.mark.parametrize(
    ("call", "is_reported"),
    [
        ("files.checkpoint(path, model, optimizer)", True),
        ("files.write_checkpoint(path, model, optimizer)", True),
        ("files.checkpoint(path, model, optimizer, scaler)", False),
        ("files.checkpoint(model, x)", False),
    ],
)
def test_a_function_that_is_called_checkpoint_saves(call, is_reported):
    """HS170 also reports a checkpoint that another file writes under that name alone."""
    text = SAVED.format(loaded=", scaler" if "scaler" in call else "", saved="")
    text = text.replace("save_checkpoint(path, model, optimizer, epoch)", call)
    assert ("HS170" in reported(text)) is is_reported
