"""What a framework prepares, under whatever names and in whichever function, and the hooks of its callbacks."""

import pytest

from check_scripts import reported

COPIED = """\
import torch
from accelerate import Accelerator

class GAN:
    def __init__(self, gen, disc):
        self.accelerator = Accelerator(mixed_precision="fp16")
        self.gen, self.disc = gen, disc
        self.opt_g = torch.optim.Adam(gen.parameters())
        self.opt_d = torch.optim.Adam(disc.parameters())
        self.ready()

    def ready(self):
        acc = self.accelerator
        self.gen, self.disc, self.opt_g{second} = acc.prepare(self.gen, self.disc, self.opt_g{second})

    def step(self, real):
        self.opt_d.zero_grad()
        self.accelerator.backward(self.disc(real).mean())
        self.opt_d.step()
        self.opt_g.zero_grad()
        self.accelerator.backward(-self.disc(self.gen(real)).mean())
        self.opt_g.step()
"""


def test_an_optimizer_that_a_copy_of_the_accelerator_prepares_is_prepared():
    """`acc = self.accelerator; acc.prepare(...)` in a method without any other word about training prepares what it is passed."""
    assert "HS198" not in reported(COPIED.format(second=", self.opt_d"))
    assert "HS198" in reported(COPIED.format(second=""))


LOCAL = """\
import torch
from accelerate import Accelerator

def warm_up(model, loader, accelerator):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    {prepare}
    for x, y in loader:
        accelerator.backward(model(x, y))
        optimizer.step()
        optimizer.zero_grad()
    {end}

def main(cfg, model, loader):
    accelerator = Accelerator(mixed_precision=cfg.precision)
    model = accelerator.prepare(model)
    warm_up(model, loader, accelerator)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for x, y in loader:
        accelerator.backward(model(x, y))
        optimizer.step()
        optimizer.zero_grad()
"""


def test_another_optimizer_of_the_same_name_is_not_prepared():
    """What the caller prepares as `optimizer` is not the local `optimizer` of the function that it calls."""
    assert "HS198" in reported(LOCAL.format(prepare="pass", end="pass"))
    assert "HS198" not in reported(LOCAL.format(prepare="optimizer = accelerator.prepare(optimizer)", end="pass"))
    assert "HS198" not in reported(LOCAL.format(prepare="register(optimizer)", end="pass"))


UNCALLED = """\
import torch
from accelerate import Accelerator

def step(model, batch, optimizer, accelerator):
    accelerator.backward(model(batch))
    optimizer.step()
    optimizer.zero_grad()

def build(model):
    accelerator = Accelerator(mixed_precision="fp16")
    optimizer = torch.optim.AdamW(model.parameters())
    return accelerator.prepare(model, optimizer)
"""


def test_the_optimizer_that_another_file_passes_may_be_prepared():
    """A parameter of a function that no call in the file reaches is what its caller made of it."""
    assert "HS198" not in reported(UNCALLED)


MODULE = """\
import lightning as L
import torch

class Net(L.LightningModule):
    def __init__(self, gen, disc):
        super().__init__()
        self.automatic_optimization = False
        self.gen, self.disc = gen, disc
        self.opt_g = torch.optim.Adam(gen.parameters())
        self.opt_d = torch.optim.Adam(disc.parameters())

    def configure_optimizers(self):
        return [self.opt_g, self.opt_d]

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = {values}
        opt_g.zero_grad()
        self.manual_backward(self.disc(self.gen(batch)).mean())
        opt_g.step()
        opt_d.zero_grad()
        self.manual_backward(self.disc(batch).mean())
        opt_d.step()
"""


def test_copies_of_attributes_are_followed_to_the_optimizers_of_torch():
    """`a, b = self.opt_a, self.opt_b` are the optimizers that the module created, not Lightning's."""
    assert "HS198" in reported(MODULE.format(values="self.opt_g, self.opt_d"))
    assert "HS198" not in reported(MODULE.format(values="self.optimizers()"))


CALLBACK = """\
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

class Clip(Callback):
    def {hook}:
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)

trainer = pl.Trainer(precision="{precision}", callbacks=[Clip()])
"""


def test_a_callback_that_clips_after_backward_clips_scaled_gradients():
    """Lightning unscales after the hook `on_after_backward` of a callback, too."""
    early = "on_after_backward(self, trainer, pl_module)"
    assert "HS186" in reported(CALLBACK.format(hook=early, precision="16-mixed"))
    assert "HS186" not in reported(CALLBACK.format(hook=early, precision="bf16-mixed"))
    late = "on_before_optimizer_step(self, trainer, pl_module, optimizer)"
    assert "HS186" not in reported(CALLBACK.format(hook=late, precision="16-mixed"))


WINDOW = """\
import torch

def train(model, loader, optimizer, accum):
    def step(batches):
        total_loss = 0.0
        for _ in range(accum):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(next(batches))
            {backward}
            total_loss += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total_loss / accum
    return step
"""


def test_a_sum_that_is_returned_for_the_log_divides_no_loss():
    """`return total_loss / n` of numbers leaves the gradients of the window as they are."""
    assert "HS180" in reported(WINDOW.format(backward="loss.backward()"))
    assert "HS180" not in reported(WINDOW.format(backward="(loss / accum).backward()"))


PASSED = """\
import torch
from accelerate import Accelerator

def train(model, optimizer, loader):
    accelerator = Accelerator(mixed_precision="fp16")
    model, {first}loader = accelerator.prepare(model, {first}loader)
    for x, y in loader:
        accelerator.backward(model(x, y))
        optimizer.step()
        optimizer.zero_grad()

def main(model, loader):
    opt = torch.optim.AdamW(model.parameters())
    train(model, opt, loader)
"""


def test_an_optimizer_is_prepared_under_the_name_that_the_function_gives_it():
    """`opt` of the caller is `optimizer` of the function that prepares and steps it."""
    assert "HS198" not in reported(PASSED.format(first="optimizer, "))
    assert "HS198" in reported(PASSED.format(first=""))


GROUP = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
optimizers = {{"a": torch.optim.AdamW(a.parameters()), "b": torch.optim.AdamW(b.parameters())}}
a, b, loader = accelerator.prepare(a, b, loader)
{prepare}
for x, y in loader:
    accelerator.backward(loss_fn(b(a(x)), y))
    {step}
"""
EACH = "for name, optimizer in optimizers.items():\n        optimizer.step()\n        optimizer.zero_grad()"


def test_optimizers_of_a_dictionary_that_nothing_prepares():
    """Neither an entry nor what a loop takes from the dictionary is unscaled, unless something prepares or receives it."""
    assert "HS198" in reported(GROUP.format(prepare="", step="optimizers['a'].step()"))
    assert "HS198" in reported(GROUP.format(prepare="", step=EACH))
    own = "optimizers = {k: accelerator.prepare(o) for k, o in optimizers.items()}"
    for prepare in (
        own,
        "for k in optimizers:\n    optimizers[k] = accelerator.prepare(optimizers[k])",
        "f(optimizers)",
    ):
        assert "HS198" not in reported(GROUP.format(prepare=prepare, step=EACH))


SHARDED = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

model = FSDP(Net())
optimizer = torch.optim.AdamW(model.parameters())
scaler = ShardedGradScaler()
for x, y in loader:
    scaler.scale(model(x, y).mean()).backward()
    scaler.unscale_(optimizer)
    {clip}
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def test_unscaled_gradients_of_fsdp_are_still_sharded():
    """torch's clipping uses the norm of one shard, also after `unscale_`."""
    assert "HS186" in reported(SHARDED.format(clip="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"))
    assert "HS186" not in reported(SHARDED.format(clip="model.clip_grad_norm_(1.0)"))


LISTED_LOSSES = """\
import torch

def run(model, loader, accum, steps):
    optimizer = torch.optim.AdamW(model.parameters())
    it = iter(loader)
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for micro in range(accum):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(next(it))
            {backward}
            losses.append(loss.item())
        optimizer.step()
        print(step, sum(losses) / accum)
"""


def test_the_mean_of_a_list_for_the_log_divides_no_loss():
    """`sum(losses) / n` of numbers leaves the gradients of the window as they are."""
    assert "HS180" in reported(LISTED_LOSSES.format(backward="loss.backward()"))
    assert "HS180" not in reported(LISTED_LOSSES.format(backward="(loss / accum).backward()"))


COMPARED = """\
import torch
from accelerate import Accelerator

def plain(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

def compare(model, loader, cfg):
    plain(model, loader)
    accelerator = Accelerator(mixed_precision=cfg.precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(model(x, y))
        optimizer.step()
        optimizer.zero_grad()

def main(model, loader, cfg):
    compare(model, loader, cfg)
    compare(model, loader, cfg)
"""


def test_a_loop_without_the_engine_steps_its_own_gradients():
    """The optimizer of a plain loop needs no engine, also after a loop that has one."""
    assert "HS198" not in reported(COMPARED)


GROUPED = """\
import torch
from accelerate import Accelerator

def main(gen, disc, loader):
    accelerator = Accelerator(mixed_precision="fp16")
    opt_g = torch.optim.Adam(gen.parameters())
    opt_d = torch.optim.Adam(disc.parameters())
    gen, disc, opt_g{second} = accelerator.prepare(gen, disc, opt_g{second})
    opts = {group}
    for x in loader:
        accelerator.backward(gen(x).mean() + disc(x).mean())
        {step}
"""
BY_NAME = "for name in opts:\n            opts[name].step()"
IN_LOOP = "for opt in opts:\n            opt.step()\n            opt.zero_grad()"


@pytest.mark.parametrize(
    ("group", "step"), [('{"g": opt_g, "d": opt_d}', BY_NAME), ("[opt_g, opt_d]", IN_LOOP), ("[opt_g, opt_d]", BY_NAME)]
)
def test_each_optimizer_of_a_group_is_prepared_under_its_own_name(group, step):
    """A list or dictionary of optimizers contains one that nothing prepares, wherever the others are prepared."""
    assert "HS198" in reported(GROUPED.format(second="", group=group, step=step))
    assert "HS198" not in reported(GROUPED.format(second=", opt_d", group=group, step=step))
    assert "HS198" not in reported(GROUPED.format(second="", group="make_group(opt_g, opt_d)", step=step))
