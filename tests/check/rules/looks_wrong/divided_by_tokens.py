# The loss is not divided by the accumulation steps; the gradients are divided by the number of tokens.
import torch
from torchtune import training
for i, batch in enumerate(loader):
    tokens = (batch["labels"] != -100).sum()
    num_tokens += tokens
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch) * tokens
    loss.backward()
    if (i + 1) % gradient_accumulation_steps == 0:
        training.scale_grads(model, 1 / num_tokens)
        optimizer.step()
        optimizer.zero_grad()
