"""HS149 where validation is in another method, is run by an engine, or leaves out the argument that enables the region."""

import pytest

from check_scripts import findings


def reported(text):
    """The lines of HS149."""
    return [f.line for f in findings(text, "HS149")]


IMPORTED = """\
import torch
from {module} import {region}
def evaluate(G, noise):
    G.eval()
    for z in noise:
        with torch.no_grad():
            {forward}
    G.train()
def train(G, D, loader, scaler, optimizer):
    for x in loader:
        with {region}(torch.float16, "cuda"):
            loss = adversarial(G, D, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("module", "region", "forward", "lines"),
    [
        ("src.amp", "autocast_ctx", "fake = G(z)", [7]),
        ("src.amp", "autocast_ctx", "with autocast_ctx(torch.float16, 'cuda'): fake = G(z)", []),
        ("src.amp", "autocast_ctx", "fake = H(z)", []),  # a model that nothing trains here
        ("src.timing", "timed", "fake = G(z)", []),
    ],
)
def test_regions_that_a_function_of_another_module_returns(module, region, forward, lines):
    """A function named for autocast is a region, and a model is what a function switches to evaluation and training uses in a region."""
    assert reported(IMPORTED.format(module=module, region=region, forward=forward)) == lines


METHODS = """\
import torch
class Trainer:
    def _train_epoch(self, loader):
        for x in loader:
            with torch.autocast("cuda"):
                loss = self.model.calculate_loss(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
    def _rank_all(self, batch):
        {all}
    def _rank_some(self, batch):
        {some}
    @torch.no_grad()
    def evaluate(self, data, full):
        self.model.eval()
        if full:
            rank = self._rank_all
        else:
            rank = self._rank_some
        for batch in data:
            scores = rank(batch)
"""
PREDICT = "return self.model.predict(batch)"


def test_validation_by_a_method_that_a_variable_chooses():
    """A loop that calls one of the object's methods by a variable runs the model, unless one of them opens a region."""
    assert reported(METHODS.format(all=PREDICT, some=PREDICT)) == [22]
    assert not reported(METHODS.format(all=f"with torch.autocast('cuda'): {PREDICT}", some=PREDICT))
    assert not reported(METHODS.format(all="return len(batch)", some="return len(batch)"))


PHASES = """\
import torch
def run_epoch(model, loader, optimizer=None, scaler=None):
    train = optimizer is not None
    for x in loader:
        with torch.set_grad_enabled(train), torch.autocast("cuda", dtype=torch.float16, enabled={enabled}):
            loss = model.rollout(x)
        if train:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
for epoch in range(9):
    run_epoch(model, train_loader, optimizer, scaler)
    run_epoch(model, {validation})
"""


@pytest.mark.parametrize(
    ("enabled", "validation", "lines"),
    [
        ("(scaler is not None)", "val_loader, None, None", [13]),
        ("scaler is not None", "val_loader", [13]),
        ("scaler is not None", "val_loader, scaler=scaler", []),
        ("use_amp", "val_loader, None, None", []),
        ("scaler is not None", "images", []),  # no name of validation
    ],
)
def test_calls_that_leave_out_what_enables_the_region(enabled, validation, lines):
    """A region that depends on the scaler is off where validation passes none."""
    assert reported(PHASES.format(enabled=enabled, validation=validation)) == lines


ENGINE = """\
import torch
from ignite.engine import Engine
scaler = torch.amp.GradScaler("cuda")
def update(engine, x):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = generator_a(x)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
def {name}(engine, x):
    generator_a.eval()
    with torch.no_grad():
        return generator_a(x)
trainer = Engine(update)
evaluator = Engine({name})
"""


def test_functions_that_an_engine_runs_for_each_batch():
    """The loop of an evaluation is the engine's; one that is named for samples is no validation."""
    assert reported(ENGINE.format(name="evaluate_step")) == [14]
    assert not reported(ENGINE.format(name="draw_step"))


DIAGNOSTIC = """\
import torch
scaler = torch.amp.GradScaler("cuda")
def evaluate(model, loader):
    with torch.no_grad():
        for x in loader:
            {validation}
def main(model, loader, val_loader, pictures):
    for epoch in range(9):
        for x in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        evaluate(model, val_loader)
        with torch.no_grad():
            embedded = model(pictures)
        log(drift(embedded))
"""


def test_one_batch_per_epoch_next_to_a_validation_under_autocast():
    """A diagnostic forward per epoch is no validation where the validation is under autocast; otherwise that one is reported."""
    region = "with torch.autocast('cuda', dtype=torch.float16): model(x).mean()"
    kept = region.replace("model(x).mean()", "out = model(x)")
    assert not reported(DIAGNOSTIC.format(validation=kept))
    assert reported(DIAGNOSTIC.format(validation="out = model(x)"))
