"""transformers' Trainer with fp32 masters and a Watch: the lines marked `# halfstep` are the change.

The weights are bf16, as transformers 5 loads a bf16 checkpoint by default. Without masters an update below half a unit in the
last place of its weight is lost; with `halfstep.optim` none is.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import halfstep.integrations.transformers  # halfstep

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).to(torch.bfloat16)
tokens = (torch.arange(16)[None, :] * torch.arange(1, 33)[:, None]) % 64  # counting in steps of 1 to 32
data = [{"input_ids": row, "labels": row} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model,
        TrainingArguments(folder, max_steps=20, logging_steps=5, report_to=[], save_strategy="no", disable_tqdm=True),
        train_dataset=data,
        optimizers=(halfstep.optim.AdamW(model.parameters(), lr=3e-3, master="split", states="8bit"), None),  # halfstep
        callbacks=[halfstep.integrations.transformers.HalfstepCallback()],  # halfstep
    )
    trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < losses[0]
