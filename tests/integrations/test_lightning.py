"""HalfstepPrecision and HalfstepCallback in Lightning's own Trainer, and the plugin of Fabric."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.errors import SettingError
from rank_processes import cases_of_ranks

lightning = pytest.importorskip("lightning", reason="Requires: [lightning]")
integration = pytest.importorskip("halfstep.integrations.lightning")
fabric_plugin = pytest.importorskip("halfstep.integrations.fabric")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the library's own warnings

PRESETS = ["fp32", "bf16", "fp16", "bf16-lean", "fp16-lean"]


class Module(lightning.LightningModule):
    def __init__(self, optimizer, overflows_at=None, dropout=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.LayerNorm(16), nn.Linear(16, 2))
        self.make, self.overflows_at = optimizer, overflows_at
        self.net[4].register_forward_hook(self._overflow)

    def _overflow(self, module, args, output):
        return output * 1e30 * 1e30 if self.training and self.global_step == self.overflows_at else None

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return self.make(self.parameters())


def loader():
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def trainer_of(*, policy=None, callbacks=(), folder=None, **settings):
    settings = {"max_epochs": 2, "gradient_clip_val": 0.5} | settings
    plugins = [] if policy is None else [integration.HalfstepPrecision(policy)]
    shown = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu",
        plugins=plugins,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        default_root_dir=folder,
        **shown,
        **settings,
    )


@pytest.mark.parametrize("policy", PRESETS)
def test_an_overflow_is_named_in_every_preset(policy):
    """With a fused optimizer and clipping; the weights stay finite, and a scale is lowered."""
    module, callback = Module(adamw, overflows_at=4), integration.HalfstepCallback()
    trainer = trainer_of(policy=policy, callbacks=[callback])
    trainer.fit(module, loader())
    (autopsy,) = [a for a in callback.watch.autopsies if a.step == 5]
    assert (autopsy.cause, autopsy.module) == ("forward", "net.4")
    assert ("nan-loss", 5) in [(event.kind, event.step) for event in callback.watch.events]
    assert all(p.isfinite().all() for p in module.parameters())
    scaler = trainer.precision_plugin.scaler
    assert scaler is None or scaler.counts().skips >= 1


def test_the_callback_works_with_lightnings_own_plugins():
    """In its bf16-mixed, the module is named all the same."""
    module, callback = (
        Module(lambda params: torch.optim.SGD(params, lr=0.1), overflows_at=4),
        integration.HalfstepCallback(),
    )
    trainer_of(callbacks=[callback], precision="bf16-mixed").fit(module, loader())
    assert [(a.step, a.module) for a in callback.watch.autopsies] == [(5, "net.4")]


def test_fp32_is_bit_identical_to_lightning_without_the_plugin():
    """Weights after two epochs with clipping; the Watch samples every step."""
    states = []
    for policy, callbacks in ((None, []), ("fp32", [integration.HalfstepCallback(every=1)])):
        module = Module(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        trainer_of(policy=policy, callbacks=callbacks, gradient_clip_val=None).fit(module, loader())
        states.append(module.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("policy", PRESETS)
def test_clipping_is_on_true_gradients(policy):
    """With SGD at lr 1 the norm of the update is max_norm."""
    module = Module(lambda params: torch.optim.SGD(params, lr=1.0), dropout=0.0)
    for param in module.parameters():
        param.data.mul_(8)  # the gradient is larger than max_norm
    before = {name: p.detach().double().clone() for name, p in module.named_parameters()}
    max_norm = 2.0**-3
    if "fp16" in policy:  # a scale at which the first step is not skipped
        policy += ",loss_scale=dynamic(semantics=torch;init_scale=256)"
    trainer = trainer_of(policy=policy, max_epochs=1, limit_train_batches=1, gradient_clip_val=max_norm)
    trainer.fit(module, loader())
    optimizer = trainer.optimizers[0]
    after = {
        name: optimizer.master_of(p).double() if hasattr(optimizer, "master_of") else p.double()
        for name, p in module.named_parameters()
    }
    update = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm()
    assert update.item() == pytest.approx(max_norm, rel=2e-2)


@pytest.mark.parametrize("policy", ["fp16", "bf16-lean,states=8bit", "fp16-lean"])
def test_a_fit_resumes_bit_for_bit(tmp_path, policy):
    """4 epochs at once, and 2 epochs, a checkpoint and 2 more: weights, masters and loss scale.

    Without dropout, because Lightning's checkpoints have no random numbers.
    """
    ends = []
    for stop in (None, 2):
        module, trainer = Module(adamw, dropout=0.0), trainer_of(policy=policy, max_epochs=stop or 4, folder=tmp_path)
        trainer.fit(module, loader())
        if stop is not None:
            trainer.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
            module, trainer = Module(adamw, dropout=0.0), trainer_of(policy=policy, max_epochs=4, folder=tmp_path)
            trainer.fit(module, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
        ends.append(
            (module.state_dict(), trainer.optimizers[0].state_dict()["state"], trainer.precision_plugin.state_dict())
        )
    (weights, states, scale), (resumed, resumed_states, resumed_scale) = ends
    assert scale == resumed_scale
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    for key, state in states.items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(resumed_states[key][k])) for k, v in state.items())


def test_settings_of_another_rule_for_the_scale_are_rejected():
    """Libraries call torch's scaler; DeepSpeed's rule is not available there."""
    module = Module(adamw)
    with pytest.raises(SettingError, match="torch's rule"):
        trainer_of(policy="fp16,loss_scale=dynamic(semantics=deepspeed;init_scale=256)").fit(module, loader())


def test_ranks_of_ddp_train_together():
    """Weights and masters are the same on both ranks, although they start from different ones; all skip what one overflows."""
    program = Path(__file__).parents[1] / "lightning_program.py"
    ranks = cases_of_ranks(program)
    for cases in ranks:
        *fits, rejected = cases
        assert [case["policy"] for case in fits] == ["fp32", "bf16", "bf16-lean", "fp16-lean"]
        for case in fits:
            assert case["weights"], case
            assert case["masters"], case
            assert case["finite"], case
            assert 3 in case["skips"], case
        assert "DistributedDataParallel" in rejected["error"]
    for case in ranks[1][:-1]:
        assert [3, "forward"] in case["causes"]


# --- Fabric -------------------------------------------------------------------------------------------------------------


def run_fabric(policy, optimizer, *, steps, max_norm=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 2))
    fabric = lightning.Fabric(accelerator="cpu", plugins=[fabric_plugin.HalfstepPrecision(policy)])
    model, stepped = fabric.setup(net, optimizer(net.parameters()))
    losses = []
    for (x, y), _ in zip([batch for _ in range(20) for batch in loader()], range(steps), strict=False):
        loss = F.cross_entropy(model(x).float(), y)
        fabric.backward(loss)
        if max_norm is not None:
            fabric.clip_gradients(model, stepped, max_norm=max_norm, error_if_nonfinite=False)
        stepped.step()
        stepped.zero_grad()
        losses.append(loss.item())
    return net, stepped, losses


@pytest.mark.parametrize("policy", [*PRESETS, "bf16-lean,states=8bit"])
def test_fabric_trains_in_every_preset(policy):
    """The loss falls to a third, with a stock fused optimizer, which lean presets adopt."""
    net, optimizer, losses = run_fabric(policy, adamw, steps=60)
    assert losses[-1] < losses[0] / 3
    assert ("low" in next(iter(optimizer.state_dict()["state"].values()))) == ("lean" in policy)
    assert {str(p.dtype) for p in net.parameters()} == {
        {"bf16-lean": "torch.bfloat16", "fp16-lean": "torch.float16"}.get(policy.partition(",")[0], "torch.float32")
    }


def test_fabric_clips_with_fused_optimizers_in_fp16():
    """Fabric's own plugin raises NotImplementedError there; ours clips, and rejects what would be wrong."""
    *_, losses = run_fabric("fp16", adamw, steps=40, max_norm=1.0)
    assert losses[-1] < losses[0] / 2
    with pytest.raises(SettingError, match="clip_by_norm"):
        run_fabric("fp16-lean", adamw, steps=1, max_norm=1.0)


# --- several optimizers on one scaler -------------------------------------------------------------------------------------

# Grows within the run, so that optimizers that step after the first see another scale than that of their backward pass.
GROWING = "fp16,loss_scale=dynamic(init_scale=1024;growth_interval=3;semantics=torch)"


def parts():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def fused(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


class Manual(lightning.LightningModule):
    """Manual optimization: one backward pass, then each optimizer is clipped, and then each steps."""

    def __init__(self, max_norm, optimizer=sgd):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.max_norm, self.make = parts(), max_norm, optimizer

    def training_step(self, batch, batch_idx):
        self.manual_backward(F.cross_entropy(self.net(batch[0]).float(), batch[1]))
        optimizers = self.optimizers()
        for optimizer in optimizers if self.max_norm else ():
            self.clip_gradients(optimizer, gradient_clip_val=self.max_norm, gradient_clip_algorithm="norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [self.make(self.net[0]), self.make(self.net[2])]


def trained_manually(policy, max_norm, optimizer):
    module = Manual(max_norm, optimizer)
    trainer_of(policy=policy, gradient_clip_val=None).fit(module, loader())
    return module.net


def trained_by_fabric(policy, max_norm, optimizer):
    net = parts()
    fabric = lightning.Fabric(accelerator="cpu", plugins=[fabric_plugin.HalfstepPrecision(policy)])
    model, *optimizers = fabric.setup(net, optimizer(net[0]), optimizer(net[2]))
    for x, y in [batch for _ in range(2) for batch in loader()]:
        fabric.backward(F.cross_entropy(model(x).float(), y))
        for each in optimizers if max_norm else ():
            fabric.clip_gradients(model, each, max_norm=max_norm, error_if_nonfinite=False)
        for each in optimizers:
            each.step()
            each.zero_grad()
    return net


@pytest.mark.parametrize("optimizer", [sgd, fused])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("train", [trained_manually, trained_by_fabric])
def test_optimizers_that_share_a_scaler_train_as_in_fp32(train, max_norm, optimizer):
    """Each clips and steps on true gradients, though the scale changes and is updated between them."""
    in_fp32, start = train("fp32", max_norm, optimizer), parts()
    for mine, theirs, first in zip(
        train(GROWING, max_norm, optimizer).parameters(), in_fp32.parameters(), start.parameters(), strict=True
    ):
        assert (mine - theirs).norm() < 0.02 * (theirs - first).norm()
