"""HS170 and HS601 where handlers, engines and methods decide what a checkpoint contains."""

import pytest

from check_scripts import findings

IGNITE = """\
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint
def create(model, optimizer, saver):
    scaler = torch.amp.GradScaler("cuda")
    def train_step(engine, x):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    trainer = Engine(train_step)
    to_save = {{"model": model, {objects}}}
    {attach}
    return trainer
"""
OPTIMIZER = '"optimizer": optimizer'


@pytest.mark.parametrize(
    ("objects", "attach", "severities"),
    [
        (OPTIMIZER, "trainer.add_event_handler(Events.EPOCH_COMPLETED, handler, to_save)", ["advice"]),
        (OPTIMIZER, "handler = Checkpoint(to_save, saver)", ["advice"]),
        (OPTIMIZER, "common.setup_common_training_handlers(trainer, to_save=to_save)", ["advice"]),
        (OPTIMIZER, "Checkpoint(to_save, saver); Checkpoint.load_objects(to_save, saved)", ["warning"]),
        (OPTIMIZER + ', "scaler": scaler', "handler = Checkpoint(to_save, saver)", []),
        (OPTIMIZER, 'to_save["scaler"] = scaler; handler = Checkpoint(to_save, saver)', []),
        ('"rate": rate', "handler = Checkpoint(to_save, saver)", []),
        (OPTIMIZER, "print(to_save)", []),
    ],
)
def test_objects_that_a_handler_of_ignite_saves(objects, attach, severities):
    """A dictionary of objects that a handler saves is a checkpoint: with the optimizer it needs the scaler."""
    text = IGNITE.format(objects=objects, attach=attach)
    assert [f.severity for f in findings(text, "HS170")] == severities


FABRIC = """\
import torch
from lightning import Fabric
class Trainer:
    def __init__(self, model, optimizer, fp16, options):
        if fp16:
            options.update(precision="{precision}")
        self.fabric = Fabric(**options)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
    def save(self, path):
        torch.save(dict(model=self.model.state_dict(), optimizer=self.optimizer.state_dict()), path)
    def load(self, path):
        self.optimizer.load_state_dict(torch.load(path)["optimizer"])
    def train(self, loader):
        for x in loader:
            self.fabric.backward(self.model(x))
            self.optimizer.step()
            self.optimizer.zero_grad()
"""


def test_the_scaler_of_a_fabric():
    """torch.save of the optimizer leaves the scaler of 16-mixed out; bf16-mixed has none."""
    assert [f.line for f in findings(FABRIC.format(precision="16-mixed"), "HS170")] == [10]
    assert not findings(FABRIC.format(precision="bf16-mixed"), "HS170")


METHOD = """\
import torch
class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")
    def active(self):
        return {returned}
    def _save(self, path):
        save_checkpoint(path, self.model, self.optimizer, {passed})
    def fit(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self._save("last.pt")
"""


def test_a_method_that_returns_the_scaler_for_a_checkpoint():
    """What a method of the object returns is passed too: the scaler, or None where it is disabled."""
    active = "self.scaler if self.scaler.is_enabled() else None"
    assert not findings(METHOD.format(returned=active, passed="self.active()"), "HS170")
    assert not findings(METHOD.format(returned="self.scaler", passed="self.active()"), "HS170")
    assert findings(METHOD.format(returned="self.epoch", passed="self.active()"), "HS170")


RESUME = """\
import torch
def main(args):
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    initial_checkpoint = torch.load(args.pretrained)
    saved_args = initial_checkpoint.get("args")
    {asked}
    if args.resume:
        checkpoint = torch.load(args.resume)
        scaler.load_state_dict(checkpoint["scaler"])
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({{"scaler": scaler.state_dict()}}, path)
"""


@pytest.mark.parametrize(
    ("asked", "is_reported"),
    [
        ("if not isinstance(saved_args, dict) or 'fold' not in saved_args: raise ValueError", True),
        ("fold = int(saved_args['fold'])", True),
        ("if 'amp' in saved_args: pass", False),
        ("args = argparse.Namespace(**saved_args)", False),
    ],
)
def test_settings_of_a_checkpoint_that_are_only_asked_for(asked, is_reported):
    """HS601: the type of saved settings, or whether they have an entry of something else, does not make the flag that of the checkpoint."""
    assert bool(findings(RESUME.format(asked=asked), "HS601")) is is_reported


RESTORED = IGNITE.replace('"model": model, {objects}', '"model": model, "optimizer": optimizer, {objects}').replace(
    "    return", "    Checkpoint.load_objects({restored}, saved)\n    return"
)


@pytest.mark.parametrize(
    ("objects", "restored", "codes"),
    [
        ('"scaler": scaler', "to_save", []),
        ('"scaler": scaler', '{"model": model, "optimizer": optimizer}', ["HS171"]),
        ('"scaler": scaler', '{"model": model}', []),
        ('"scaler": scaler', "dict(optimizer=optimizer, scaler=scaler)", []),
        ("**vars(SimpleNamespace(scaler=scaler))", "dict(optimizer=optimizer)", ["HS171"]),
    ],
)  # fmt: skip
def test_objects_that_load_objects_restores(objects, restored, codes):
    """What `Checkpoint.load_objects` gets is what is restored: the scaler belongs to it if a handler saves it."""
    text = RESTORED.format(objects=objects, restored=restored, attach="Checkpoint(to_save, saver)")
    assert [f.code for f in findings(text, "HS170", "HS171")] == codes
