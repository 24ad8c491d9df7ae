"""Practice scripts in further styles: closures, hooks, generators, a module like Lightning's, comments that are wrong, odd names.

RIGHT is (task, name, script); WRONG is (task, name, the rows that must fail, script).
"""

RIGHT = [
    (
        1,
        "lightningish",
        '''
"""Benchmark written like a Lightning module: training_step / configure_optimizers, driven by a tiny Trainer."""
import contextlib, time, torch, torch.nn.functional as F
from torch import nn

class LitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))
    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.body(x), y)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

class Trainer:
    def __init__(self, precision, steps=3):
        self.precision, self.steps = precision, steps
    def ctx(self):
        return torch.autocast("cuda", dtype=torch.bfloat16) if self.precision == "bf16-mixed" else contextlib.nullcontext()
    def fit(self, module, batches):
        module.cuda().train()
        opt = module.configure_optimizers()
        torch.cuda.reset_peak_memory_stats()
        t0 = time.monotonic()
        for x, y in batches:
            with self.ctx():
                loss = module.training_step((x.cuda(), y.cuda()))
            loss.backward()
            opt.step()
            opt.zero_grad()
        torch.cuda.synchronize()
        return {"s": time.monotonic() - t0, "MB": torch.cuda.max_memory_allocated() / 2**20}

def make_batches():
    g = torch.Generator().manual_seed(3)
    return [(torch.randn(128, 20, generator=g), torch.randint(5, (128,), generator=g)) for _ in range(3)]

report = {}
for p in ("32-true", "bf16-mixed"):
    torch.manual_seed(7)
    report[p] = Trainer(p).fit(LitNet(), make_batches())
for p, r in report.items():
    print("%-12s time %.5fs  memory %.3f MB" % (p, r["s"], r["MB"]))
''',
    ),
    (
        1,
        "events",
        """
import torch, argparse
ap = argparse.ArgumentParser(); ap.add_argument("--iters", type=int, default=4); args = ap.parse_args([])
dev = torch.device("cuda")
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)).to(dev)
def bench(amp):
    m = build(); o = torch.optim.Adam(m.parameters(), 1e-3); s = torch.cuda.amp.GradScaler(enabled=amp)
    torch.cuda.reset_peak_memory_stats(dev)
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(args.iters):
        x = torch.rand(100, 32, device=dev); y = torch.rand(100, 2, device=dev)
        with torch.cuda.amp.autocast(enabled=amp):
            l = ((m(x) - y) ** 2).mean()
        o.zero_grad(); s.scale(l).backward(); s.step(o); s.update()
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b), torch.cuda.max_memory_allocated(dev)
(t32, m32), (t16, m16) = bench(False), bench(True)
print(f"fp32  {t32:.2f} ms  {m32} B"); print(f"amp   {t16:.2f} ms  {m16} B"); print("ratio", t32 / t16, m32 / m16)
""",
    ),
    (
        2,
        "closure",
        """
# A closure that owns scaler and model; odd names on purpose.
import torch
from torch import nn
def forge(limit):
    torch.manual_seed(11)
    kettle = nn.Linear(12, 3).cuda()
    spoon = torch.optim.SGD(kettle.parameters(), lr=1.0)
    whisk = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    def stir(soup, taste):
        spoon.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16):
            bitterness = nn.functional.mse_loss(kettle(soup), taste)
        whisk.scale(bitterness).backward()
        whisk.unscale_(spoon)
        n = nn.utils.clip_grad_norm_(kettle.parameters(), limit)
        whisk.step(spoon)
        whisk.update()
        return float(n)
    return stir
stir = forge(1.0)
for k in range(6):
    print("before clipping:", stir(torch.randn(32, 12).cuda(), 30 * torch.randn(32, 3).cuda()))
""",
    ),
    (
        2,
        "foreach_total_norm",
        """
import torch
class Loop:
    max_norm = 1.0
    def __init__(self):
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)).to("cuda")
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.scaler = torch.cuda.amp.GradScaler()
    def clip(self):
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        total = torch.nn.utils.get_total_norm(grads)
        torch.nn.utils.clip_grads_with_norm_(self.net.parameters(), self.max_norm, total)
    def epoch(self, batches):
        for x in batches:
            with torch.autocast(device_type="cuda"):
                out = self.net(x)
                loss = (out.float() - x * 40).pow(2).mean()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            self.clip()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()
torch.manual_seed(5)
Loop().epoch([torch.randn(16, 8, device="cuda") for _ in range(7)])
print("done")
""",
    ),
    (
        3,
        "scale_compare_method",
        '''
import torch, sys
class Monitor:
    """Watches the scale: it falls exactly when a step was skipped."""
    def __init__(self, scaler): self.scaler, self.bad = scaler, 0
    def __enter__(self): self.before = self.scaler.get_scale(); return self
    def __exit__(self, *exc): self.bad += int(self.scaler.get_scale() < self.before)
def main(argv=None):
    torch.manual_seed(1)
    m = torch.nn.Linear(6, 2).cuda(); o = torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9)
    s = torch.amp.GradScaler("cuda"); mon = Monitor(s)
    for i in range(9):
        x = torch.randn(10, 6, device="cuda")
        o.zero_grad()
        with torch.autocast("cuda", dtype=torch.half):
            l = m(x).float().square().mean()
        s.scale(l).backward()
        with mon:
            s.step(o)
            s.update()
    print(f"{mon.bad} of 9 optimizer steps were skipped; scale is now {s.get_scale():.0f}")
    return 0
if __name__ == "__main__":
    sys.exit(main())
''',
    ),
    (
        3,
        "step_hook",
        """
import torch
torch.manual_seed(2)
model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.SiLU(), torch.nn.Linear(10, 1)).to("cuda")
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
applied = 0
def note(optimizer, args, kwargs):
    global applied
    applied += 1
opt.register_step_post_hook(note)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
tried = 0
while tried < 8:
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        pred = model(torch.randn(20, 10, device="cuda"))
    loss = torch.nn.functional.l1_loss(pred.float(), torch.zeros_like(pred, dtype=torch.float32))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    tried += 1
print("tried", tried)
print("applied", applied)
print("skipped", tried - applied)
""",
    ),
    (
        4,
        "dict_hooks",
        """
import functools, torch
from torch import nn
class Block(nn.Module):
    def __init__(self, gain):
        super().__init__(); self.lin = nn.Linear(24, 24)
        with torch.no_grad(): self.lin.weight.mul_(gain)
    def forward(self, x): return self.lin(x)
class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleDict({"one": Block(1), "two": Block(4000), "three": Block(60)})
        self.norm = nn.LayerNorm(24); self.out = nn.Linear(24, 3)
    def forward(self, x):
        for s in self.stages.values(): x = s(x)
        return self.out(self.norm(x))
def probe(names, name, mod, args, out):
    if torch.is_tensor(out) and not torch.isfinite(out).all() and all(torch.isfinite(a).all() for a in args if torch.is_tensor(a)):
        names.setdefault(name, 0); names[name] += 1
def fit(dtype):
    torch.manual_seed(4)
    t = Tower().to("cuda"); o = torch.optim.SGD(t.parameters(), lr=1e-3)
    sc = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    culprits = {}
    hs = [m.register_forward_hook(functools.partial(probe, culprits, n)) for n, m in t.named_modules() if not list(m.children())]
    for _ in range(4):
        o.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            l = nn.functional.cross_entropy(t(100 * torch.randn(16, 24, device="cuda")), torch.randint(3, (16,), device="cuda"))
        sc.scale(l).backward(); sc.step(o); sc.update()
    for h in hs: h.remove()
    return culprits
for d in (torch.float16, torch.bfloat16):
    c = fit(d)
    print(str(d).split(".")[1], "->", ", ".join(c) if c else "stable")
""",
    ),
    (
        5,
        "printed_fn",
        """
FP32_LOSS_FALLS = "yes"
FP16_LOSS_FALLS = "no"
FP16_WITH_SCALER_LOSS_FALLS = "yes"
BF16_LOSS_FALLS = "yes"
def lines():
    yield "Half precision has five exponent bits: gradients smaller than about 6e-8 are flushed to zero, so the weights do not move."
    yield "The GradScaler multiplies the loss, hence every gradient, by a large factor, and divides it out again before the optimizer step."
    yield "bfloat16 keeps the eight exponent bits of float32, so its range is the same and such gradients survive without scaling."
EXPLANATION = " ".join(lines())
""",
    ),
    (
        2,
        "function_params",
        '''
import torch, torch.nn as nn
def train_step(model, opt, scaler, x, y, *, clip=1.0):
    """comment that lies: this function does NOT clip anything and never unscales"""
    opt.zero_grad()
    with torch.amp.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.unscale_(opt)  # wrong comment: clips the scaled gradient
    params = [p for group in opt.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(params, max_norm=clip)
    scaler.step(opt); scaler.update()
    return loss.detach()
def main():
    torch.manual_seed(0)
    net = nn.Linear(10, 10, bias=False).cuda()
    opt = torch.optim.SGD([{"params": [net.weight], "lr": 1.0}], lr=0.1)
    sc = torch.amp.GradScaler()
    for _ in range(5):
        w = net.weight.detach().clone()
        train_step(net, opt, sc, torch.randn(8, 10).cuda(), 50 * torch.randn(8, 10).cuda())
        print("update norm", (net.weight - w).norm().item())
main()
''',
    ),
    (
        3,
        "two_param_groups_generator",
        """
import itertools, torch
torch.manual_seed(0)
a, b = torch.nn.Linear(5, 7).cuda(), torch.nn.Linear(7, 1).cuda()
opt = torch.optim.AdamW([{"params": a.parameters(), "weight_decay": 0.0}, {"params": b.parameters()}], lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
def batches():
    while True:
        yield torch.randn(12, 5).cuda(), torch.randn(12, 1).cuda()
history = []
for x, y in itertools.islice(batches(), 10):
    for p in itertools.chain(a.parameters(), b.parameters()): p.grad = None
    with torch.autocast("cuda", dtype=torch.float16):
        z = b(torch.relu(a(x)))
    scaler.scale(torch.nn.functional.mse_loss(z.float(), y)).backward()
    s0 = scaler.get_scale(); scaler.step(opt); scaler.update(); history.append(scaler.get_scale() < s0)
n = sum(history)
print("no step was skipped" if n == 0 else "one step was skipped" if n == 1 else f"{n} steps were skipped")
""",
    ),
    (
        1,
        "fp16_is_only_an_option",
        """
import argparse, time, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

class Loop:
    def __init__(self, mixed: bool):
        torch.manual_seed(0)
        self.mixed, self.model = mixed, nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
    def fit(self):
        for _ in range(4):
            x, y = torch.randn(64, 32, device=device), torch.randint(4, (64,), device=device)
            self.opt.zero_grad(set_to_none=True)
            with torch.autocast(device_type=device, dtype=getattr(torch, args.dtype), enabled=self.mixed):
                loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.opt.step()

for mixed in (False, True):
    torch.cuda.reset_peak_memory_stats()
    begin = time.monotonic()
    Loop(mixed).fit()
    print("mixed" if mixed else "fp32", "time", time.monotonic() - begin, "peak", torch.cuda.max_memory_allocated())
""",
    ),
    (
        2,
        "pinned_batches",
        """
import torch
from torch import nn
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = nn.Linear(16, 4).to(device)
opt = torch.optim.SGD(model.parameters(), lr=1.0)
scaler = torch.amp.GradScaler()
for i in range(5):
    x = torch.randn(32, 16, pin_memory=True).to(device, non_blocking=True)
    y = (20 * torch.randn(32, 4)).pin_memory().to(device, non_blocking=True)
    opt.zero_grad()
    with torch.amp.autocast(device.type, torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    print(f"{loss.item():.3f}")
""",
    ),
]

WRONG = [
    (
        1,
        "prints_only",
        {"autocast", "fp32"},
        """
import torch
# prints what the grader may look for, trains nothing
print("fp32: 0.0120 s, peak 123456 bytes")
print("amp: 0.0060 s, peak 61234 bytes")
print("speed-up 2.0x, memory 0.5x")
""",
    ),
    (
        1,
        "no_autocast_inside",
        {"autocast"},
        """
import time, torch
def go(mixed):
    torch.manual_seed(0)
    net = torch.nn.Linear(16, 16).cuda(); opt = torch.optim.SGD(net.parameters(), 0.1)
    torch.cuda.reset_peak_memory_stats(); t = time.time()
    for _ in range(3):
        x = torch.randn(8, 16, device="cuda")
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):  # mixed precision (it is not)
            loss = net(x).square().mean()
        loss.backward(); opt.step()
    return time.time() - t, torch.cuda.max_memory_allocated()
print("fp32", *go(False)); print("bf16 mixed", *go(True))
""",
    ),
    (
        1,
        "no_memory",
        {"memory"},
        """
import time, torch
def go(mixed):
    torch.manual_seed(0)
    net = torch.nn.Linear(16, 16).cuda(); opt = torch.optim.SGD(net.parameters(), 0.1)
    t = time.time()
    for _ in range(3):
        x = torch.randn(8, 16, device="cuda")
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mixed):
            loss = net(x).square().mean()
        loss.backward(); opt.step()
    return time.time() - t
print("fp32 seconds", go(False), "memory 4 GB"); print("bf16 seconds", go(True), "memory 2 GB")
""",
    ),
    (
        1,
        "one_mode_only",
        {"fp32"},
        """
import time, torch
class B:
    def run(self):
        net = torch.nn.Linear(16, 16).cuda(); opt = torch.optim.SGD(net.parameters(), 0.1)
        torch.cuda.reset_peak_memory_stats(); t = time.perf_counter()
        for _ in range(4):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = net(torch.randn(8, 16, device="cuda")).square().mean()
            opt.zero_grad(); loss.backward(); opt.step()
        return time.perf_counter() - t, torch.cuda.max_memory_allocated()
for name in ("fp32", "amp"): print(name, B().run())
""",
    ),
    (
        1,
        "fp16_no_scaler",
        {"check", "scaled-loss"},
        """
import time, torch
def one(amp):
    torch.manual_seed(1)
    net = torch.nn.Linear(16, 16).cuda(); opt = torch.optim.SGD(net.parameters(), 0.1)
    torch.cuda.reset_peak_memory_stats(); t = time.perf_counter()
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
            loss = net(torch.randn(8, 16, device="cuda")).square().mean()
        opt.zero_grad(); loss.backward(); opt.step()
    return time.perf_counter() - t, torch.cuda.max_memory_allocated()
for amp in (False, True): print(amp, one(amp))
""",
    ),
    (
        2,
        "clip_before_unscale_in_class",
        {"check", "clipping"},
        """
import torch
class T:
    def __init__(self):
        torch.manual_seed(0)
        self.m = torch.nn.Linear(8, 8).cuda(); self.o = torch.optim.SGD(self.m.parameters(), lr=1.0); self.s = torch.amp.GradScaler("cuda")
    def _clip(self):  # gradients are unscaled here (they are not)
        torch.nn.utils.clip_grad_norm_(self.m.parameters(), 1.0)
    def step(self, x, y):
        self.o.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16): l = (self.m(x) - y).pow(2).mean()
        self.s.scale(l).backward()
        self._clip()
        self.s.unscale_(self.o)
        self.s.step(self.o); self.s.update()
t = T()
for _ in range(5):
    t.step(torch.randn(4, 8).cuda(), 30 * torch.randn(4, 8).cuda()); print("norm of the update: 1.0000")
""",
    ),
    (
        2,
        "clip_value",
        {"clipping"},
        """
import torch
torch.manual_seed(0)
m = torch.nn.Linear(8, 8).cuda(); o = torch.optim.SGD(m.parameters(), lr=1.0); s = torch.amp.GradScaler("cuda")
for _ in range(5):
    o.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16): l = (m(torch.randn(4, 8).cuda()) - 30).pow(2).mean()
    s.scale(l).backward(); s.unscale_(o)
    torch.nn.utils.clip_grad_value_(m.parameters(), 1.0)
    s.step(o); s.update()
print("clipped at max_norm = 1.0")
""",
    ),
    (
        2,
        "per_param",
        {"clipping"},
        """
import torch
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda(); o = torch.optim.SGD(m.parameters(), lr=1.0); s = torch.amp.GradScaler("cuda")
for _ in range(5):
    o.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16): l = (m(torch.randn(4, 8).cuda()) - 30).pow(2).mean()
    s.scale(l).backward(); s.unscale_(o)
    for p in m.parameters(): torch.nn.utils.clip_grad_norm_(p, 1.0)   # each its own norm
    s.step(o); s.update()
""",
    ),
    (
        2,
        "clip_after_step",
        {"check", "clipping"},
        """
import torch
def go():
    torch.manual_seed(0)
    m = torch.nn.Linear(8, 8).cuda(); o = torch.optim.SGD(m.parameters(), lr=1.0); s = torch.amp.GradScaler("cuda")
    for _ in range(5):
        o.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16): l = (m(torch.randn(4, 8).cuda()) - 30).pow(2).mean()
        s.scale(l).backward()
        s.unscale_(o)
        s.step(o)
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        s.update()
go()
""",
    ),
    (
        3,
        "counts_nan_loss",
        {"count"},
        """
import math, torch
torch.manual_seed(0)
m = torch.nn.Linear(8, 1).cuda(); o = torch.optim.SGD(m.parameters(), lr=0.01); s = torch.amp.GradScaler("cuda", init_scale=512.0)
skipped = 0
for _ in range(8):
    o.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16): l = m(torch.randn(4, 8).cuda()).float().pow(2).mean()
    s.scale(l).backward(); s.step(o); s.update()
    if not math.isfinite(l.item()): skipped += 1     # the loss is finite when gradients are not
print("skipped steps:", skipped)
""",
    ),
    (
        3,
        "constant",
        {"count"},
        """
import torch
torch.manual_seed(0)
m = torch.nn.Linear(8, 1).cuda(); o = torch.optim.SGD(m.parameters(), lr=0.01); s = torch.amp.GradScaler("cuda", init_scale=512.0)
for _ in range(8):
    o.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16): l = m(torch.randn(4, 8).cuda()).float().pow(2).mean()
    s.scale(l).backward(); s.step(o); s.update()
print("skipped: 0, 1, 2, 3, 4, 5")
""",
    ),
    (
        3,
        "new_scaler_each_step",
        {"check", "scale", "update"},
        """
import torch
torch.manual_seed(0)
m = torch.nn.Linear(8, 1).cuda(); o = torch.optim.SGD(m.parameters(), lr=0.01)
skipped = 0
for _ in range(8):
    s = torch.amp.GradScaler("cuda", init_scale=512.0)   # a new one each step, so update() is not missed
    o.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16): l = m(torch.randn(4, 8).cuda()).float().pow(2).mean()
    s.scale(l).backward()
    r = s.step(o)
    skipped += r is None and any(not p.grad.isfinite().all() for p in m.parameters())
print("skipped steps", skipped)
""",
    ),
    (
        4,
        "names_all_layers",
        {"layer"},
        """
import torch
from torch import nn
def fit(dtype):
    torch.manual_seed(0)
    n = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)).cuda()
    with torch.no_grad(): n[1].weight.mul_(1e6)
    o = torch.optim.SGD(n.parameters(), lr=1e-3); s = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for _ in range(3):
        o.zero_grad()
        with torch.autocast("cuda", dtype=dtype): l = n(torch.randn(4, 8).cuda()).float().square().mean()
        s.scale(l).backward(); s.step(o); s.update()
    return n
fit(torch.float16); n = fit(torch.bfloat16)
print("the unstable layer is one of", [k for k, _ in n.named_modules() if k])
""",
    ),
    (
        4,
        "last_not_first",
        {"layer"},
        """
import torch
from torch import nn
def fit(dtype):
    torch.manual_seed(0)
    n = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)).cuda()
    with torch.no_grad(): n[1].weight.mul_(1e6)
    o = torch.optim.SGD(n.parameters(), lr=1e-3); s = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    bad = []
    for k, m in n.named_modules():
        if k: m.register_forward_hook(lambda mod, a, out, k=k: bad.append(k) if not out.isfinite().all() else None)
    for _ in range(3):
        o.zero_grad()
        with torch.autocast("cuda", dtype=dtype): l = n(torch.randn(4, 8).cuda()).float().square().mean()
        s.scale(l).backward(); s.step(o); s.update()
    return bad
b = fit(torch.float16); fit(torch.bfloat16)
print("first unstable layer:", b[-1])   # the last one that was inf
""",
    ),
    (
        5,
        "words_no_sense",
        None,
        '''
FP32_LOSS_FALLS = "yes"; FP16_LOSS_FALLS = "no"; FP16_WITH_SCALER_LOSS_FALLS = "yes"; BF16_LOSS_FALLS = "yes"
EXPLANATION = """In float16 large gradients overflow to infinity because it has more exponent bits than bfloat16. The scaler divides the loss
by a factor so that gradients get smaller, and bfloat16 needs no scaler since it has more mantissa bits and rounds more precisely."""
''',
    ),
]
