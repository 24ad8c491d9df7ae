"""Fine-tuning a bf16 checkpoint at a small learning rate: what moves, with and without masters.

    python benchmarks/finetune_masters.py [--library trainer|trl] [--device cuda] [--steps 200] [--size small] [--json FILE]
    torchrun --nproc-per-node 2 benchmarks/finetune_masters.py --library fsdp

With `fsdp` the Trainer shards the model by FSDP2, on gloo ranks.

The checkpoint is made in the run: a Llama of random weights learns to count in fp32 and is saved in bf16. transformers loads it as
it was saved, and it then learns to count in other steps, from the same data in the same order, in four ways:

    bf16 weights, torch's AdamW          what happens by default
    bf16 weights, halfstep.optim         split masters; and the same with 8-bit moments
    fp32 weights, torch's AdamW          the reference: the checkpoint loaded with dtype=torch.float32

Reported: the share of weights that differ from the checkpoint at the end (for masters, of the masters), the loss on held-out
sequences before and after, and bytes per parameter of weights and optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import halfstep

VOCABULARY = 64
SIZES = {  # hidden, intermediate, layers, heads, sequence, batch
    "tiny": (32, 64, 2, 2, 16, 4),
    "small": (64, 128, 2, 4, 24, 8),
    "large": (768, 2048, 12, 12, 256, 16),
}
WAYS = {
    "bf16 weights, torch AdamW": (torch.bfloat16, None, None),
    "bf16 weights, halfstep AdamW, split masters": (torch.bfloat16, "split", "fp32"),
    "bf16 weights, halfstep AdamW, split masters, 8-bit states": (torch.bfloat16, "split", "8bit"),
    "fp32 weights, torch AdamW": (torch.float32, None, None),
}


def sequences(num: int, length: int, steps: range, seed: int) -> list[dict[str, torch.Tensor]]:
    """Counting modulo the vocabulary, from random starts in random steps."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCABULARY, (num, 1), generator=generator)
    step = torch.randint(steps.start, steps.stop, (num, 1), generator=generator)
    rows = (start + step * torch.arange(length)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


def build(size: str) -> LlamaForCausalLM:
    """A Llama of random weights."""
    hidden, intermediate, layers, heads, length, _ = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def arguments(folder: str, size: str, steps: int, lr: float, device: str, **settings: Any) -> dict[str, Any]:
    """What every run has in common."""
    shared = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "seed": 0}
    sizes = {"per_device_train_batch_size": SIZES[size][5], "max_steps": steps, "learning_rate": lr}
    schedule = {"lr_scheduler_type": "constant", "use_cpu": device == "cpu", "dataloader_pin_memory": device != "cpu"}
    return {"output_dir": folder, **shared, **sizes, **schedule, **settings}


class Sharded(Trainer):
    """Accelerate chooses FSDP on GPUs only; what it then does with model and optimizer also runs on gloo ranks."""

    def create_accelerator_and_postprocess(self) -> None:
        """Build the accelerator, and have it shard."""
        super().create_accelerator_and_postprocess()
        from accelerate import DistributedType
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
        self.accelerator.state.distributed_type, self.accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        self.is_fsdp_enabled = True


def train(model: Any, data: Any, kind: tuple[Any, dict[str, Any]], library: str, settings: dict[str, Any]) -> Any:
    """Fine-tune with the library's own trainer; returns the optimizer."""
    if library == "fsdp":
        trainer = Sharded(model, TrainingArguments(**settings), train_dataset=data, optimizer_cls_and_kwargs=kind)
        trainer.train()
        optimizer = trainer.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return optimizer
    optimizer = kind[0](model.parameters(), **kind[1])
    optimizers = (optimizer, None)
    if library == "trl":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in data])
        tokenizer = letters()
        config = SFTConfig(**settings, max_length=None, dataset_kwargs={"skip_prepare_dataset": False}, bf16=False)
        SFTTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer, optimizers=optimizers).train()
    else:
        Trainer(model, TrainingArguments(**settings), train_dataset=data, optimizers=optimizers).train()
    return optimizer


def letters() -> Any:
    """A tokenizer that TRL wants to have; the data has its tokens already."""
    from tokenizers import Tokenizer, models

    names = [f"t{i}" for i in range(VOCABULARY)]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    special = dict(zip(["pad_token", "eos_token", "unk_token"], names, strict=False))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


@torch.no_grad()
def evaluate(model: Any, data: list[dict[str, torch.Tensor]], device: str) -> float:
    """The mean loss, computed in fp32 from the model's weights."""
    copy = build_like(model).to(device).eval()
    batch = torch.stack([row["input_ids"] for row in data]).to(device)
    return float(copy(input_ids=batch, labels=batch).loss)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be sharded, in one piece."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank stores of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def build_like(model: Any) -> Any:
    """The model with its weights in fp32."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict({name: whole(value).float() for name, value in model.state_dict().items()})
    return copy


def run_way(name: str, checkpoint: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    dtype, master, states = WAYS[name]
    keep = {} if dtype is torch.bfloat16 else {"dtype": torch.float32}  # the default is what was saved
    model = LlamaForCausalLM.from_pretrained(checkpoint, **keep).to(options.device)
    assert model.dtype is dtype
    start = {key: p.detach().double().clone() for key, p in model.named_parameters()}
    length = SIZES[options.size][4]
    data, held_out = sequences(4096, length, range(5, 9), 1), sequences(256, length, range(5, 9), 2)
    before = evaluate(model, held_out, options.device)
    own = {} if master is None else {"master": master, "states": states}
    kind = (
        torch.optim.AdamW if master is None else halfstep.optim.AdamW,
        {"lr": options.lr, "weight_decay": 0.0, **own},
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = arguments(folder, options.size, options.steps, options.lr, options.device)
        optimizer = train(model, data, kind, options.library, settings)
    value_of = optimizer.master_of if master else (lambda p: p.detach())
    ends = {key: whole(value_of(p)).double() for key, p in model.named_parameters()}
    moved = sum(int((ends[key] != start[key]).sum()) for key in ends) / sum(v.numel() for v in ends.values())
    parts = [part(p) for p in model.parameters()]
    states_of = [part(v) for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    stored = sum(t.numel() * t.element_size() for t in (*parts, *states_of))
    return {
        "way": name,
        "moved": moved,
        "loss before": before,
        "loss after": evaluate(model, held_out, options.device),
        "bytes per parameter": stored / sum(t.numel() for t in parts),
    }


def shared_path(path: str) -> str:
    """Rank 0's path, on every rank."""
    paths = [path]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(paths)
    return paths[0]


def main() -> None:
    """Make the checkpoint, fine-tune it in each way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["trainer", "trl", "fsdp"], default="trainer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--pretrain-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.library == "fsdp":
        os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    with tempfile.TemporaryDirectory() as folder:
        model = build(options.size).to(options.device)
        data = sequences(8192, SIZES[options.size][4], range(1, 5), 0)
        settings = arguments(folder, options.size, options.pretrain_steps, 3e-3, options.device)
        train(model, data, (torch.optim.AdamW, {"lr": 3e-3}), "trainer", settings)
        checkpoint = shared_path(str(Path(folder) / "checkpoint"))
        model.to(torch.bfloat16).save_pretrained(checkpoint)  # rank 0 writes
        shared_path(checkpoint)  # which waits for it
        rows = [run_way(name, checkpoint, options) for name in WAYS]
        shared_path(checkpoint)  # rank 0 removes it
    if int(os.environ.get("RANK", "0")):
        return
    num = sum(p.numel() for p in model.parameters())
    print(f"{options.library}, transformers {transformers.__version__}, torch {torch.__version__}, {options.device}")
    print(f"Llama of {num:,} parameters, {options.steps} steps at lr {options.lr:g}")
    print("| | weights that moved | loss before | loss after | bytes per parameter |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['way']} | {row['moved']:.1%} | {row['loss before']:.4f} | {row['loss after']:.4f} | {row['bytes per parameter']:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps({"library": options.library, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
