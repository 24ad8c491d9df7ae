# Accelerate's FSDP plugin trains float32 copies of the bf16 model.
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM

plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
model = AutoModelForCausalLM.from_pretrained("org/model", torch_dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
