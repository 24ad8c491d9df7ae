"""HS270 where the script's own loop runs an overflowing model under float16 autocast."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
from transformers import T5ForConditionalGeneration

model = T5ForConditionalGeneration.from_pretrained("{name}").cuda()
optimizer = torch.optim.AdamW({trained}.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda"{enabled})
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype={dtype}{enabled}):
        {forward}
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
CASE = {
    "name": "google/flan-t5-large",
    "trained": "model",
    "enabled": "",
    "dtype": "torch.float16",
    "forward": "loss = model(x, labels=y).loss",
}


@pytest.mark.parametrize("changes", [{}, {"name": "google/mt5-base"}, {"enabled": ", enabled=args.fp16"}])
def test_float16_region_around_the_model(changes):
    """HS270 at the load, also where an option enables the region."""
    assert [f.line for f in findings(LOOP.format(**CASE | changes), "HS270")] == [4]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "torch.bfloat16"},
        {"dtype": "DTYPES[args.dtype]"},
        {"name": "t5-small"},
        {"enabled": ", enabled=False"},
        {
            "trained": "unet",
            "forward": "with torch.no_grad(): c = model(x)\n        loss = unet(c, y).mean()",
        },  # a text encoder
    ],
)
def test_other_formats_and_models(changes):
    """No finding in bfloat16, for a model that stays in range, or for one that runs without gradients."""
    assert findings(LOOP.format(**CASE | changes), "HS270") == []
