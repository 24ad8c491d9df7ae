"""Check a training script from Python. Findings are values; a finding has a fix if a safe one exists."""

import tempfile
from pathlib import Path

import halfstep

SCRIPT = """
import torch
from torch.amp import GradScaler, autocast

def train(model, optimizer, loader, loss_fn):
    scaler = GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""

with tempfile.TemporaryDirectory() as directory:
    path = Path(directory) / "train.py"
    path.write_text(SCRIPT)
    findings = halfstep.check_path(path, ignore=["advice"])

for finding in findings:
    print(f"line {finding.line}: {finding.code} {finding.name}: {finding.message}")
    if finding.fix is not None:
        print(f"  fixable: {finding.fix.title}")
assert [finding.name for finding in findings] == ["clip-before-unscale"]
