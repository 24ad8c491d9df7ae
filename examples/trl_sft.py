"""TRL's SFTTrainer with fp32 masters and a Watch: the lines marked `# halfstep` are the change."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import halfstep.integrations.transformers  # halfstep

letters = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "]
names = dict(zip(["pad_token", "eos_token", "unk_token"], letters, strict=False))
words = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=letters[2]))
words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=len(letters), pad_token_id=0, eos_token_id=1, bos_token_id=1, **sizes)
model = LlamaForCausalLM(config).to(torch.bfloat16)
data = Dataset.from_dict({"text": ["the quick brown fox jumps over the lazy dog"] * 64})

with tempfile.TemporaryDirectory() as folder:
    settings = {"max_steps": 12, "per_device_train_batch_size": 2, "logging_steps": 3, "save_strategy": "no"}
    trainer = SFTTrainer(
        model,
        args=SFTConfig(folder, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, **settings),
        train_dataset=data,
        processing_class=tokenizer,
        optimizers=(halfstep.optim.AdamW(model.parameters(), lr=3e-3, master="split"), None),  # halfstep
        callbacks=[halfstep.integrations.transformers.HalfstepCallback()],  # halfstep
    )
    trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < losses[0]
