"""Scripts of practice readers: right ones in different styles, and ones with a mistake of the lesson put in on purpose.

RIGHT is (task, name, script); WRONG is (task, name, the rows that must fail, script).
"""

SPEED = """
import time
import torch
from torch import nn
from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"

def run(use_amp):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler(device, enabled=use_amp)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(4):
        x, y = torch.randn(256, 16, device=device), torch.randint(4, (256,), device=device)
        optimizer.zero_grad(set_to_none=True)
        with autocast(device_type=device, dtype=torch.float16, enabled=use_amp):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated()

for use_amp in (False, True):
    seconds, peak = run(use_amp)
    print(f"amp={use_amp}: {seconds:.4f} s, peak {peak} bytes")
"""

# The old names, a class, argparse, a main function, bf16, memory by the tensors saved for backward.
SPEED_CLASS = """
import argparse
from time import time
import torch
import torch.nn as nn

class Bench:
    def __init__(self, dtype=None):
        torch.manual_seed(1)
        self.dtype = dtype
        self.net = nn.Linear(16, 8)
        self.opt = torch.optim.SGD(self.net.parameters(), 0.01)
        self.saved = 0

    def _pack(self, t):
        self.saved += t.numel() * t.element_size()
        return t

    def one(self):
        self.opt.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
            with torch.autocast("cpu", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                out = self.net(torch.randn(8, 16)).float().pow(2).mean()
        out.backward()
        self.opt.step()

def main():
    args = argparse.ArgumentParser()
    args.add_argument("--steps", type=int, default=5)
    args = args.parse_args()
    for name, dtype in {"bf16": torch.bfloat16, "fp32": None}.items():
        bench = Bench(dtype)
        t = time()
        for _ in range(args.steps):
            bench.one()
        print(name, round((time() - t) / args.steps * 1e3, 3), "ms per step;", bench.saved // args.steps, "bytes saved")

if __name__ == "__main__":
    main()
"""

CLIP = """
import torch
from torch import nn
from torch.amp import GradScaler, autocast
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scaler = GradScaler()
for _ in range(4):
    x, y = torch.randn(32, 8, device="cuda"), 10 * torch.randn(32, 3, device="cuda")
    optimizer.zero_grad(set_to_none=True)
    with autocast(device_type="cuda"):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
print("clipped")
"""

# The old names, clipping by hand, Adam, gradients that never reach max_norm by themselves.
CLIP_BY_HAND = """
import torch
from torch.cuda.amp import GradScaler, autocast

def clip(params, limit):
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
    for g in grads:
        g *= min(1.0, limit / (norm.item() + 1e-6))

def main():
    net = torch.nn.Linear(8, 2).cuda()
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    grad_scaler = GradScaler(init_scale=1024.0)
    for step in range(3):
        batch = torch.randn(16, 8).cuda()
        with autocast():
            out = net(batch)
        grad_scaler.scale(out.float().square().mean() * 0.01).backward()
        grad_scaler.unscale_(adam)
        clip(list(net.parameters()), 1.0)
        grad_scaler.step(adam)
        grad_scaler.update()
        adam.zero_grad()

if __name__ == "__main__":
    main()
"""

# Accumulation, another max_norm, a function that only gets objects.
CLIP_ACCUMULATED = """
import torch
from torch.nn.utils import clip_grad_norm_
def train(net, opt, amp, batches):
    for i, (x, y) in enumerate(batches):
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.mse_loss(net(x), y) / 2
        amp.scale(loss).backward()
        if i % 2:
            amp.unscale_(opt)
            clip_grad_norm_(net.parameters(), 0.25)
            amp.step(opt)
            amp.update()
            opt.zero_grad()
net = torch.nn.Linear(8, 2)
train(net, torch.optim.SGD(net.parameters(), 0.5, momentum=0.9), torch.amp.GradScaler("cpu"),
      [(torch.randn(16, 8), 30 * torch.randn(16, 2)) for _ in range(8)])
raise SystemExit(0)
"""

SKIP = """
import torch
from torch import nn
from torch.amp import GradScaler, autocast
torch.manual_seed(0)
model = nn.Linear(8, 3).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
skipped = 0
for step in range(8):
    optimizer.zero_grad()
    with autocast("cuda"):
        loss = nn.functional.mse_loss(model(torch.randn(16, 8, device="cuda")), torch.zeros(16, 3, device="cuda"))
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped += scaler.get_scale() < before
    print(f"step {step} loss {loss.item():.4f}")
print(f"skipped steps: {skipped}")
"""

# Counts by the norm after unscale_, prints only if something was skipped, in words that depend on the number.
SKIP_BY_NORM = """
import math
import torch
class Trainer:
    def __init__(self):
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.opt = torch.optim.AdamW(self.net.parameters(), fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        self.history = []
    def step(self):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.net(torch.randn(4, 8)).float().abs().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 5.0).item()
        self.history.append(norm)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)
trainer = Trainer()
while len(trainer.history) < 7:
    trainer.step()
bad = [n for n in trainer.history if not math.isfinite(n)]
if bad:
    print(f"{len(bad)} step{'s were' if len(bad) > 1 else ' was'} skipped of {len(trainer.history)}")
"""

NET = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.wide = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 2)
        with torch.no_grad():
            self.wide.weight.mul_(1e6)
    def forward(self, x):
        return self.last(self.norm(self.wide(self.first(x))))
"""

UNSTABLE = (
    NET
    + """
from torch.amp import GradScaler, autocast
device = "cuda" if torch.cuda.is_available() else "cpu"
def train(dtype):
    torch.manual_seed(0)
    model = Net().to(device)
    names = {module: name for name, module in model.named_modules()}
    bad = []
    def look(module, inputs, output):
        if torch.isfinite(inputs[0]).all() and not torch.isfinite(output).all() and names[module]:
            bad.append(names[module])
    for module in model.modules():
        module.register_forward_hook(look)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler(device, enabled=dtype == torch.float16)
    for _ in range(3):
        optimizer.zero_grad()
        with autocast(device_type=device, dtype=dtype):
            loss = model(torch.randn(4, 8, device=device)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item(), bad
for dtype in (torch.float16, torch.bfloat16):
    loss, bad = train(dtype)
    print(f"{dtype}: loss {loss}, unstable layers: {sorted(set(bad))}")
"""
)

# A Sequential, a table of all layers, no hooks: the layers are called one by one.
UNSTABLE_TABLE = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1))
net[1].weight.data *= 1e6
opt = torch.optim.Adam(net.parameters())
gs = torch.amp.GradScaler("cpu")
for dtype in [torch.bfloat16, torch.float16]:
    for step in range(2):
        opt.zero_grad()
        h = torch.randn(4, 8)
        with torch.autocast("cpu", dtype=dtype):
            for name, layer in net.named_children():
                h = layer(h)
                if step == 1:
                    print(f"{dtype} layer {name} max {h.abs().max().item()}")
            loss = h.float().mean()
        if dtype is torch.float16:
            gs.scale(loss).backward()
            gs.step(opt)
            gs.update()
        else:
            loss.backward()
            opt.step()
"""

EXPLANATION = '''
EXPLANATION = """
fp16 has only 5 exponent bits, so small gradients underflow to zero. The scaler multiplies the loss by a large factor before backward, which
multiplies every gradient, and divides the gradients by it before the optimizer steps. bf16 has the same exponent range as fp32, at lower
precision, so its gradients rarely underflow.
"""
FP32_LOSS_FALLS = "yes"
FP16_LOSS_FALLS = "no"
FP16_WITH_SCALER_LOSS_FALLS = "yes"
BF16_LOSS_FALLS = "yes"
'''

EXPLANATION_PRINTED = """
def main():
    print("In float16 anything below about 6e-8 is rounded to 0, and many gradients are that tiny.")
    print("Loss scaling shifts them up into the representable range; unscale_ undoes it in fp32 before the update.")
    print("Unlike float16, bfloat16 spends 8 bits on the exponent, the same range as float32, at the cost of mantissa bits.")
main()
"""

# No scaler and no clipping call of its own: halfstep.Engine does both.
ENGINE = """
import torch, halfstep
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
opt = torch.optim.SGD(model.parameters(), lr=1.0)
engine = halfstep.Engine(model, opt, precision="fp16", max_norm=1.0)
skipped = 0
for _ in range(8):
    x, y = torch.randn(16, 8), 5 * torch.randn(16, 3)
    with engine.forward():
        loss = torch.nn.functional.mse_loss(model(x), y)
    engine.backward(loss)
    result = engine.step()
    skipped += bool(result.skipped)
print("skipped:", skipped)
engine.close()
"""

SKIP_COUNTED_BY_HALFSTEP = (
    SKIP.replace('scaler = GradScaler("cuda")', 'import halfstep\nscaler = halfstep.GradScaler("cuda")')
    .replace("    skipped += scaler.get_scale() < before\n", "")
    .replace("{skipped}", "{scaler.counts()}")
)

RIGHT = [
    (1, "speed", SPEED),
    (1, "speed_class", SPEED_CLASS),
    (2, "clip", CLIP),
    (2, "clip_by_hand", CLIP_BY_HAND),
    (2, "clip_accumulated", CLIP_ACCUMULATED),
    (3, "skip", SKIP),
    (3, "skip_by_norm", SKIP_BY_NORM),
    (2, "engine", ENGINE),
    (3, "engine", ENGINE.replace("lr=1.0", "lr=0.1")),
    (3, "skip_counted_by_halfstep", SKIP_COUNTED_BY_HALFSTEP),
    (4, "unstable", UNSTABLE),
    (4, "unstable_table", UNSTABLE_TABLE),
    (5, "explanation", EXPLANATION),
    (5, "explanation_printed", EXPLANATION_PRINTED),
]


def changed(script, *changes):
    """A script with (old, new) replaced, each of which must be in it."""
    for old, new in changes:
        assert old in script, old
        script = script.replace(old, new)
    return script


SCALED, PLAIN = "scaler.scale(loss).backward()", "loss.backward()"
WRONG = [
    (1, "only_fp32", {"autocast"}, changed(SPEED, ("enabled=use_amp)", "enabled=False)"))),
    (1, "only_mixed", {"fp32"}, changed(SPEED, ("(False, True)", "(True, True)"))),
    (1, "fp16_without_scaler", {"check", "scaled-loss"},
     changed(SPEED, (SCALED, PLAIN), ("scaler.step(optimizer)", "optimizer.step()"), ("scaler.update()", "pass"),
             ("scaler = GradScaler(device, enabled=use_amp)", "pass"))),
    (1, "unscaled_backward", {"check", "run", "scaled-loss"}, changed(SPEED, (SCALED, PLAIN))),
    (1, "no_update", {"check", "run"}, changed(SPEED, ("        scaler.update()\n", ""))),
    (1, "another_model", {"model"}, changed(SPEED, ("nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)",
                                                    "nn.Linear(16, 32 + 8 * use_amp), nn.ReLU(), nn.Linear(32 + 8 * use_amp, 4)"))),
    (1, "no_clock", {"speed"}, changed(SPEED, ("time.perf_counter()", "123.5"))),
    (1, "no_memory", {"memory"}, changed(SPEED, ("torch.cuda.max_memory_allocated()", "4096"))),
    (1, "peak_not_reset", {"memory"}, changed(SPEED, ("    torch.cuda.reset_peak_memory_stats()\n", ""))),
    (1, "prints_nothing", {"report"}, changed(SPEED, ("    print(", "    str("))),
    (1, "expects_speed", {"run"}, SPEED + "\nassert run(True)[0] < 0.01 * run(False)[0], 'mixed precision is faster'\n"),
    (1, "half_weights", {"check", "run"}, changed(SPEED, (".to(device)\n    optimizer", ".to(device)\n    model = model.half() if use_amp else model\n    optimizer"))),
    (2, "no_clipping", {"clipping"}, changed(CLIP, ("    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n", ""))),
    (2, "clip_without_unscale", {"check", "clipping"}, changed(CLIP, ("    scaler.unscale_(optimizer)\n", ""))),
    (2, "clip_by_hand_without_unscale", {"clipping"}, changed(CLIP_BY_HAND, ("        grad_scaler.unscale_(adam)\n", ""))),
    (2, "clip_after_step", {"check", "clipping"},
     changed(CLIP, ("    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n    scaler.step(optimizer)\n",
                    "    scaler.step(optimizer)\n    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n"))),
    (2, "clips_half_of_the_model", {"clipping"}, changed(CLIP, ("model.parameters(), max_norm", "model[0].parameters(), max_norm"))),
    (2, "no_update", {"check", "run"}, changed(CLIP, ("    scaler.update()\n", ""))),
    (2, "one_step_without_update", {"check", "update"}, changed(CLIP, ("    scaler.update()\n", ""), ("range(4)", "range(1)"), ("GradScaler()", "GradScaler(init_scale=64.0)"))),
    (2, "unscaled_backward", {"check", "scaled-loss"}, changed(CLIP, (SCALED, PLAIN + "; scaler.scale(torch.zeros(1))"))),
    (2, "step_without_scaler", {"check", "gradient"},
     changed(CLIP, ("    scaler.unscale_(optimizer)\n", ""), ("scaler.step(optimizer)", "optimizer.step()"), ("    scaler.update()\n", ""),
             ("    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n", ""))),
    (2, "backward_under_autocast", {"backward"}, changed(CLIP, ("    scaler.scale(loss)", "        scaler.scale(loss)"))),
    (2, "no_scaler", {"check", "scaled-loss"},
     changed(CLIP, (SCALED, PLAIN), ("    scaler.unscale_(optimizer)\n", ""), ("scaler.step(optimizer)", "optimizer.step()"),
             ("    scaler.update()\n", ""), ("scaler = GradScaler()\n", ""))),
    (2, "no_autocast", {"autocast"}, changed(CLIP, ('autocast(device_type="cuda")', "torch.enable_grad()"))),
    (3, "not_counted", {"count"}, changed(SKIP, ("    skipped += scaler.get_scale() < before\n", ""))),
    (3, "counts_nan_losses", {"count"}, changed(SKIP, ("scaler.get_scale() < before", "bool(loss.isnan())"))),
    (3, "not_printed", {"count"}, changed(SKIP, ('print(f"skipped steps: {skipped}")', ""))),
    (3, "steps_anyway", {"check", "gradient", "skip", "count"},
     changed(SKIP, ("scaler.step(optimizer)", "optimizer.step()"), ("    scaler.update()\n", ""))),
    (3, "no_update", {"check", "run"}, changed(SKIP, ("    scaler.update()\n", ""))),
    (3, "unscaled_backward", {"check", "scaled-loss"}, changed(SKIP, (SCALED, PLAIN + "; scaler.scale(torch.zeros(1))"))),
    (4, "names_the_layer_after_it", {"layer"}, UNSTABLE.replace("unstable layers: {sorted(set(bad))}", "unstable layer: norm")),
    (4, "names_nothing", {"layer"}, UNSTABLE.replace(", unstable layers: {sorted(set(bad))}", "")),
    (4, "stable_model", {"layer"}, UNSTABLE.replace("mul_(1e6)", "mul_(1.0)")),
    (4, "fp16_twice", {"bf16"}, UNSTABLE.replace("(torch.float16, torch.bfloat16)", "(torch.float16, torch.float16)")),
    (4, "fp16_without_scaler", {"scaled-loss"},
     changed(UNSTABLE, (SCALED, PLAIN), ("scaler.step(optimizer)", "optimizer.step()"), ("        scaler.update()\n", ""),
             ("    scaler = GradScaler(device, enabled=dtype == torch.float16)\n", ""))),
    (5, "bf16_is_more_precise", {"range", "contradictions"},
     "EXPLANATION = 'In fp16 gradients underflow to zero; the scaler multiplies the loss and divides later. bf16 has higher precision.'\n"),
    (5, "only_overflow", {"underflow", "unscaling"},
     "print('The scaler multiplies the loss, since fp16 cannot represent numbers above 65504 and bf16 has a larger range, like fp32.')\n"),
    (5, "wrong_prediction", {"fp16-loss-falls"}, EXPLANATION.replace('FP16_LOSS_FALLS = "no"', 'FP16_LOSS_FALLS = "yes"')),
    (5, "too_short", {"explanation"}, "EXPLANATION = 'underflow'\n"),
]  # fmt: skip

# Not a training script at all: (name, the rows that must fail in tasks 1 to 4, script).
ODD = [
    ("crashes", {"run"}, "import torch\nraise ValueError('my own mistake')\n"),
    ("exits", {"run"}, "import sys\nsys.exit(4)\n"),
    ("exits_hard", {"run"}, "import os\nos._exit(4)\n"),
    ("hangs", {"run"}, "while True:\n    pass\n"),
    (
        "needs_arguments",
        {"run"},
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()\n",
    ),
    ("asks", {"run"}, "input('name? ')\n"),
    ("imports_nothing", {"autocast"}, "x = 1\nprint(x)\n"),
    ("empty", {"code"}, ""),
    ("only_a_comment", {"code"}, "# nothing yet\n"),
    ("only_a_docstring", {"code"}, '"""Nothing yet."""\n'),
    ("not_python", {"code"}, "for x in loader\n    train!\n"),
]
