"""HalfstepCallback in transformers' own Trainer, and halfstep.optim in its checkpoints."""

import math

import pytest
import torch
import torch.nn.functional as F

import halfstep
from halfstep.errors import OverflowStop, SettingError

transformers = pytest.importorskip("transformers", reason="Requires: [transformers]")
pytest.importorskip("accelerate", reason="Requires: [accelerate]")
integration = pytest.importorskip("halfstep.integrations.transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the library's own warnings


def build(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).to(dtype)


def examples():
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (16,), generator=generator) for _ in range(64)]
    return [{"input_ids": each, "labels": each.clone()} for each in tokens]


class Overflow(transformers.TrainerCallback):
    """Makes a layer's output overflow on the batches of some steps, counted from 0: on a GPU a replay comes a step later."""

    def __init__(self, model, layer, steps):
        self.steps, self.batches, self.is_due, self.now = steps, [], False, False
        model.transformer.wte.register_forward_pre_hook(self._look)
        module = model.transformer.h[layer].mlp.c_fc
        module.register_forward_hook(lambda m, a, output: output * 1e30 * 1e30 if self.now else None)

    def _look(self, module, args):
        if self.is_due:
            self.batches.append(args[0])
        self.now = any(torch.equal(args[0], batch) for batch in self.batches)

    def on_train_begin(self, args, state, control, **_):
        self.batches.clear()

    def on_step_begin(self, args, state, control, **_):
        self.is_due = state.global_step in self.steps

    def on_step_end(self, args, state, control, **_):
        self.is_due = False


def trainer_of(model, folder, callbacks=(), optimizer=None, kind=transformers.Trainer, **settings):
    settings = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no"} | settings
    settings.setdefault("use_cpu", True)
    args = transformers.TrainingArguments(
        str(folder), report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **settings
    )
    return kind(
        model,
        args,
        train_dataset=examples(),
        callbacks=list(callbacks),
        optimizers=(optimizer, None) if optimizer else (None, None),
    )


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_an_overflow_is_named_and_does_not_reach_the_weights(tmp_path, optim):
    """The module, the step and the micro-batch, whichever optimizer the Trainer makes."""
    model = build()
    callback = integration.HalfstepCallback()
    overflow = Overflow(model, 1, {2})
    trainer_of(model, tmp_path, [overflow, callback], gradient_accumulation_steps=2, optim=optim).train()
    (autopsy,) = callback.watch.autopsies
    assert (autopsy.step, autopsy.cause, autopsy.module) == (3, "forward", "transformer.h.1.mlp.c_fc")
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_in_fp16_on_a_gpu_scale_changes_and_skips_are_reported(tmp_path, optim):
    """The scaler is torch's own, inside Accelerate's optimizer; a sample has the gradients unscaled."""
    model = build()
    callback = integration.HalfstepCallback(every=1)
    overflow = Overflow(model, 1, {3})
    trainer = trainer_of(
        model, tmp_path, [overflow, callback], max_steps=8, optim=optim, fp16=True, use_cpu=False, max_grad_norm=0.0
    )
    trainer.create_optimizer()
    before = trainer.accelerator.scaler.get_scale()
    trainer.train()
    watch = callback.watch
    assert [(a.step, a.cause, a.module) for a in watch.autopsies] == [(4, "forward", "transformer.h.1.mlp.c_fc")]
    assert {e.kind for e in watch.events} >= {"skip", "scale", "nan-loss"}
    assert trainer.accelerator.scaler.get_scale() == before / 2
    assert all(p.isfinite().all() for p in model.parameters())
    largest = max(stats.largest for stats in watch.samples[-1].gradients.values())
    assert 0 < largest < 10  # of gradients times the scale it would be thousands


def test_a_nan_loss_is_reported_although_the_log_hides_it(tmp_path):
    """`logging_nan_inf_filter` logs a finite number for the step whose loss was NaN."""
    model = build()
    callback = integration.HalfstepCallback()
    trainer = trainer_of(model, tmp_path, [Overflow(model, 0, {3}), callback])
    trainer.train()
    assert [(e.kind, e.step) for e in callback.watch.events if e.kind == "nan-loss"] == [("nan-loss", 4)]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert not any(math.isnan(loss) for loss in losses)


def test_a_run_that_only_skips_is_stopped_and_can_be_repeated(tmp_path):
    """OverflowStop ends train(); the next train() of the same Trainer is watched again, by one set of hooks."""
    model = build()
    callback = integration.HalfstepCallback(max_skips=3)
    overflow = Overflow(model, 0, set(range(100)))
    trainer = trainer_of(model, tmp_path, [overflow, callback])
    with pytest.raises(OverflowStop, match=r"3 steps.*transformer"):
        trainer.train()
    overflow.steps = {1}
    trainer.train()
    assert [a.step for a in callback.watch.autopsies] == [2]
    assert not model._forward_pre_hooks


def test_a_healthy_run_is_bit_identical_with_the_callback(tmp_path):
    """Weights after training, with dropout, sampled at every step."""
    states = []
    for callbacks in ([], [integration.HalfstepCallback(every=1, activations=True)]):
        model = build()
        trainer_of(model, tmp_path, callbacks, max_grad_norm=0.5).train()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class OwnLoss(transformers.Trainer):
    """As in TRL: the loss is not the model's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("given", [True, False])
def test_a_trainer_with_its_own_loss_is_passed_to_the_callback(tmp_path, given):
    """With the trainer the module is named; without it the report says what to do."""
    model = build()
    trainer = trainer_of(model, tmp_path, [Overflow(model, 1, {2})], kind=OwnLoss)
    callback = integration.HalfstepCallback(trainer if given else None)
    trainer.add_callback(callback)
    trainer.train()
    (autopsy,) = callback.watch.autopsies
    if given:
        assert (autopsy.cause, autopsy.module) == ("forward", "transformer.h.1.mlp.c_fc")
        assert [e.step for e in callback.watch.events if e.kind == "nan-loss"] == [3]
    else:
        assert "returned no loss" in autopsy.sentence
    assert "compute_loss" not in vars(trainer)


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_training_resumes_bit_for_bit_from_the_trainers_checkpoints(tmp_path, states):
    """bf16 weights with split masters: 6 steps, and 3 steps, a checkpoint and 3 more, give the same weights and masters."""
    ends = []
    for stop in (None, 3):
        model = build(torch.bfloat16)
        optimizer = halfstep.optim.AdamW(model.parameters(), lr=1e-3, master="split", states=states)
        folder = tmp_path / f"{stop}"
        trainer_of(model, folder, optimizer=optimizer, save_strategy="steps", save_steps=3).train()
        if stop is not None:
            model = build(torch.bfloat16)
            optimizer = halfstep.optim.AdamW(model.parameters(), lr=1e-3, master="split", states=states)
            trainer = trainer_of(model, folder, optimizer=optimizer, save_strategy="no")
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        ends.append([optimizer.master_of(p) for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_something_else_than_a_trainer_is_rejected():
    """A model, for example; and there is no Watch before training begins."""
    with pytest.raises(SettingError, match="Trainer"):
        integration.HalfstepCallback(build())
    with pytest.raises(SettingError, match="before training"):
        integration.HalfstepCallback().watch  # noqa: B018


def test_events_of_a_resumed_run_have_the_trainers_steps(tmp_path):
    """The step after a checkpoint of step 3 is step 4, in autopsies, events and what loggers get."""
    settings = {"save_strategy": "steps", "save_steps": 3}
    trainer_of(build(), tmp_path, max_steps=3, **settings).train()
    model, events = build(), []
    callback = integration.HalfstepCallback(every=1, outlets=[events.append])
    overflow = Overflow(model, 1, {4})
    trainer_of(model, tmp_path, [overflow, callback], **settings).train(resume_from_checkpoint=True)
    assert [a.step for a in callback.watch.autopsies] == [5]
    assert {(e.kind, e.step) for e in events} == {("skip", 5), ("autopsy", 5), ("nan-loss", 5)}
    assert [sample.step for sample in callback.watch.samples] == [4, 5, 6]
