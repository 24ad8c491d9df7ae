"""Lean optimizers: bf16 weights with exact fp32 masters and 8-bit moments, starting from the state of torch's AdamW.

Run it with `python examples/lean_optimizer.py`.
"""

import torch
import torch.nn.functional as F

import halfstep

torch.manual_seed(0)
x, y = torch.randn(512, 32), torch.randint(0, 4, (512,))


def build():
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))


def train(engine, model, steps):
    for _ in range(steps):
        with engine.forward():
            loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        engine.step()
    return loss.item()


# Start in fp32 with torch's AdamW.
model = build()
engine = halfstep.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision="fp32")
print("fp32:", train(engine, model, 20))

# Continue in a lean preset: about 8 bytes per parameter instead of 16, with bit-identical masters.
lean_model = build()
lean = halfstep.Engine(lean_model, torch.optim.AdamW(lean_model.parameters(), lr=1e-2), "bf16-lean,states=8bit")
lean.load_state_dict(engine.state_dict())
print("bf16-lean, 8-bit moments:", train(lean, lean_model, 20))
print(lean.optimizers[0])

# Gradient release: parameters are updated inside backward, so that about 32 MiB of gradients exist at a time.
released = build()
optimizer = halfstep.optim.Lion(released.parameters(), lr=1e-3, weight_decay=0.1)
engine = halfstep.Engine(released, optimizer, "bf16-lean", gradient_release=True)
print("Lion with gradient release:", train(engine, released, 40))
print("\n".join(engine.truth().waived_guarantees))
