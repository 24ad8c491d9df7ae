"""Small models, optimizers and loops that the engine's tests share."""

import os

import torch
import torch.nn.functional as F

from halfstep.engine.engine import Engine

PRESETS = ("fp32", "bf16", "fp16", "bf16-lean", "fp16-lean")
LEAN = ("bf16-lean", "fp16-lean", "bf16-lean,master=fp32", "bf16-lean,states=bf16")

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd-dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}
ADOPTED = ("adamw", "adam", "sgd", "sgd-dampened", "rmsprop", "nadam")


def pairs():
    """Every preset with every optimizer family it takes; in Triton's interpreter one where the optimizer is torch's."""
    families = ("adamw",) if os.environ.get("TRITON_INTERPRET") == "1" else OPTIMIZERS
    every = [(p, o) for p in PRESETS if "lean" not in p for o in families]
    return every + [(p, o) for p in LEAN for o in ADOPTED]


class Net(torch.nn.Module):
    """Linear layers, layer norm and batch norm, with a buffer of its own."""

    def __init__(self, width=8):
        super().__init__()
        self.inner = torch.nn.Linear(6, width)
        self.norm = torch.nn.LayerNorm(width)
        self.batch = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.head(F.gelu(self.batch(self.norm(self.inner(x)))))


def batches(count, size=8, seed=0):
    """Fixed batches of a learnable problem."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(6, 3, generator=g)
    out = []
    for _ in range(count):
        x = torch.randn(size, 6, generator=g)
        out.append((x, (x @ truth).argmax(-1)))
    return out


def build(precision, optimizer="adamw", *, model=None, seed=0, schedule=True, **options):
    """A model, its optimizer and the engine around them."""
    torch.manual_seed(seed)
    if model is None:
        model = Net()
    else:  # built before the seed: start it from the seed as well
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    opt = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) if schedule else None
    return model, opt, Engine(model, opt, precision, scheduler=scheduler, **options)


def train_step(model, engine, batch, *, poison=False, weight=None):
    """Forward, backward and step on one batch; `poison` makes the forward overflow."""
    x, y = batch
    if poison:
        x = x.clone()
        x[0, 0] = float("inf")
    with engine.forward():
        loss = F.cross_entropy(model(x), y)
    engine.backward(loss, weight)
    return engine.step()


def snapshot(model, engine):
    """Everything promise 1 names, as a flat dictionary of cloned tensors and values."""
    found = {f"model.{n}": t.detach().clone() for n, t in model.state_dict().items()}
    names = {id(p): n for n, p in model.named_parameters()}
    for i, optimizer in enumerate(engine.optimizers):
        for param, state in optimizer.state.items():
            for key, value in state.items():
                copied = value.detach().clone() if isinstance(value, torch.Tensor) else value
                found[f"optimizer{i}.{names[id(param)]}.{key}"] = copied
        found[f"lr{i}"] = [float(g["lr"]) for g in optimizer.param_groups]
    found |= {f"master.{n}": t.clone() for n, t in engine.masters().items()}
    if engine.ema is not None:
        found |= {f"ema.{n}": t.clone() for n, t in engine.ema.averages.items()}
    found["schedulers"] = [s.state_dict() for s in engine.schedulers]
    return found


def same(before, after):
    """Names that differ; a state that did not exist before may be there now with the value it starts from."""
    odd = []
    for name in before.keys() | after.keys():
        a, b = before.get(name), after.get(name)
        if a is None and isinstance(b, torch.Tensor):
            start = 1.0 if name.endswith(".mu_product") else 0.0
            if name.endswith((".low", ".master")) or torch.all(b == start):
                continue
        elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
                continue
        elif a == b:
            continue
        odd.append(name)
    return sorted(odd)
