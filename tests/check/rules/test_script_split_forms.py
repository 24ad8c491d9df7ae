"""Pairs of a mistake and right code where a branch, a short function or an attribute decides about the gradients of a loop."""

import pytest

from check_scripts import findings

BRANCHES = (
    "import torch\noptimizer = torch.optim.AdamW(model.parameters())\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n"
    "    if {test}:\n{start}        with torch.autocast('cuda', dtype=torch.float16):\n            loss = model(x)\n"
    "        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()\n    else:\n"
    "        optimizer.zero_grad()\n        loss = model(x)\n        loss.backward()\n        optimizer.step()\n"
    "    print(model.head.weight.grad.norm())\n    # optimizer.zero_grad()\n"
)
APEX = (
    "import torch\nfrom apex import amp\nif args.apex:\n    model, optimizer = amp.initialize(model, optimizer, opt_level=args.level)\n"
    "for x in loader:\n    optimizer.zero_grad()\n    loss = model(x)\n{backward}    optimizer.step()\n"
)
SCALED = (
    "    if args.apex:\n        with amp.scale_loss(loss, optimizer) as scaled_loss:\n            scaled_loss.backward()\n"
    "    else:\n        loss.backward()\n"
)
CALLED = (
    "import torch\n\ndef is_last(i):\n    if i == 0:\n        return False\n    if i % args.accumulation_steps == 0:\n        return True\n"
    "    return i == len(loader)\n\ndef clip():\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n\n"
    "for i, x in enumerate(loader):\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = model(x) / args.accumulation_steps\n"
    "    loss.backward()\n{always}    if is_last(i):\n{last}        optimizer.step()\n        optimizer.zero_grad()\n"
).replace("return i == len(loader)", "return False")
PREPARED = (
    "from accelerate import Accelerator\naccelerator = Accelerator(mixed_precision='bf16', gradient_accumulation_steps=4)\n"
    "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\nfor i, x in enumerate(loader):\n{start}"
    "    with accelerator.accumulate(model):\n        accelerator.backward(model(x))\n    if (i + 1) % 4 == 0:\n"
    "        optimizer.step()\n{end}"
)
COMBINED = (
    "import torch\nscaler = torch.amp.GradScaler('cuda')\noptimizer = Combined(model)\nfor x in loader:\n    optimizer.zero_grad()\n"
    "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(x)\n    scaler.scale(loss).backward()\n{unscale}"
    "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n{step}    scaler.update()\n"
)
SCHEDULED = (
    "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    optimizer.zero_grad()\n"
    "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(x)\n    scaler.scale(loss).backward()\n"
    "    scaler.unscale_(optimizer)\n    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    scaler.step(optimizer)\n"
    "    scaler.update()\n    if not torch.isfinite({tested}):\n        continue\n    scheduler.step()\n"
)
DRAWN = (
    "import torch\nfrom torchvision.utils import make_grid\nscaler = torch.amp.GradScaler('cuda')\nfor epoch in range(epochs):\n"
    "    for x, y in train_loader:\n        optimizer.zero_grad()\n        with torch.autocast('cuda', dtype=torch.float16):\n"
    "            loss = loss_fn(model(x), y)\n        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n"
    "        scaler.update()\n    with torch.no_grad():\n        for i, (x, y) in enumerate(valid_loader):\n            out = model(x)\n"
    "            losses.append(loss_fn(out, y).item())\n{draw}"
)
SAVED = (
    "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(**options)\n"
    "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\nif resume:\n"
    "    optimizer.load_state_dict(torch.load('optimizer.pt'))\nfor x in loader:\n    accelerator.backward(model(x))\n    optimizer.step()\n"
    "    if {test}:\n        scheduler.step()\n    optimizer.zero_grad()\n    torch.save(optimizer.state_dict(), 'optimizer.pt')\n"
)
LOOKED_UP = (
    "import torch\nDTYPES = {{'bf16': torch.bfloat16, '{half}': torch.float16}}\n\n"
    "def train(cfg, model, optimizer, scheduler, loader):\n    dtype = DTYPES[cfg.dtype]\n"
    "    scaler = torch.amp.GradScaler('cuda', enabled=cfg.dtype == 'float16')\n    for x in loader:\n        optimizer.zero_grad()\n"
    "        with torch.autocast('cuda', dtype=dtype):\n            loss = model(x)\n        scaler.scale(loss).backward()\n"
    "        scaler.step(optimizer)\n        scaler.update()\n        scheduler.step()\n"
    "        torch.save({{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}}, 'x.pt')\n\n"
    "def load(optimizer):\n    optimizer.load_state_dict(torch.load('x.pt')['optimizer'])\n"
)
WINDOWS = (
    "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor i, x in enumerate(loader):\n"
    "    scaler.scale(loss_g(x) / accumulate).backward()\n    if (i + 1) % accumulate == 0:\n        scaler.step(opt_g)\n{update}"
    "        opt_g.zero_grad()\n{clear}    scaler.scale(loss_d(x) / accumulate).backward()\n    if (i + 1) % accumulate == 0:\n"
    "        scaler.step(opt_d)\n        scaler.update()\n        opt_d.zero_grad()\n"
)
UNSLOTH = (
    "import torch\nfrom trl import SFTConfig, SFTTrainer\nfrom unsloth import FastModel\n"
    "model, tokenizer = FastModel.from_pretrained(name, dtype=torch.bfloat16, full_finetuning={all}{more})\n"
    "trainer = SFTTrainer(model=model, args=SFTConfig('out', bf16=True), train_dataset=data)\ntrainer.train()\n"
)
# rule: the mistake, and right code, or code that decides nothing
PAIRS = {
    "one branch clears": (
        "HS156", BRANCHES.format(test="args.use_amp", start=""),
        BRANCHES.format(test="args.use_amp", start="        optimizer.zero_grad()\n"),
    ),
    "a branch of the loop's own count clears": (
        "HS156", BRANCHES.format(test="args.use_amp", start=""), BRANCHES.format(test="i % 2", start=""),
    ),
    "Apex is an option, and nothing scales": (
        "HS184", APEX.format(backward="    loss.backward()\n"), APEX.format(backward=SCALED),
    ),
    "a function ends the window": (
        "HS189", CALLED.format(always="    clip()\n", last=""), CALLED.format(always="", last="        clip()\n"),
    ),
    "the model clears in every iteration": (
        "HS181", PREPARED.format(start="    model.zero_grad()\n", end=""),
        PREPARED.format(start="", end="        model.zero_grad()\n"),
    ),
    "the parts of an optimizer are unscaled": (
        "HS105", COMBINED.format(unscale="    scaler.unscale_(optimizer.optimizers[0])\n", step="    scaler.step(optimizer)\n"),
        COMBINED.format(unscale="    scaler.unscale_(optimizer)\n", step="    scaler.step(optimizer)\n"),
    ),
    "the parts of an optimizer are unscaled in a loop": (
        "HS105",
        COMBINED.format(
            unscale="    for part in optimizer.optimizers:\n        scaler.unscale_(part)\n", step="    scaler.step(optimizer)\n"
        ),
        COMBINED.format(
            unscale="    for part in optimizer.optimizers:\n        scaler.unscale_(part)\n",
            step="    for part in optimizer.optimizers:\n        scaler.step(part)\n",
        ),
    ),
    "a finite loss": ("HS196", SCHEDULED.format(tested="loss"), SCHEDULED.format(tested="norm")),
    "one batch is drawn": (
        "HS149", DRAWN.format(draw="            if i == 0:\n                show(make_grid(out))\n"),
        DRAWN.format(draw="            show(make_grid(out))\n"),
    ),
    "only drawn batches": (
        "HS149", DRAWN.format(draw="            if i == 0:\n                show(make_grid(out))\n"),
        DRAWN.format(draw="            if i == 0:\n                show(make_grid(out))\n").replace(
            "            losses.append(loss_fn(out, y).item())\n", ""
        ),
    ),
    "the first batches are drawn": (
        "HS149", DRAWN.format(draw="            if i == 0:\n                show(make_grid(out))\n"),
        DRAWN.format(draw="            if i < 4:\n                show(make_grid(out))\n            else:\n                break\n"),
    ),
    "a step that may be skipped": (
        "HS170", SAVED.format(test="not accelerator.optimizer_step_was_skipped"), SAVED.format(test="accelerator.is_main_process"),
    ),
    "two optimizers accumulate over one window": (
        "HS108", WINDOWS.format(update="        scaler.update()\n", clear=""), WINDOWS.format(update="", clear=""),
    ),
    "only the first optimizer accumulates": (
        "HS108", WINDOWS.format(update="        scaler.update()\n", clear=""),
        WINDOWS.format(update="        scaler.update()\n", clear="    opt_d.zero_grad()\n"),
    ),
    "Unsloth trains all weights": ("HS277", UNSLOTH.format(all=True, more=""), UNSLOTH.format(all=False, more="")),
    "Unsloth trains float32 weights": (
        "HS277", UNSLOTH.format(all=True, more=""), UNSLOTH.format(all=True, more=", float32_mixed_precision=True"),
    ),
    "the scale of a scaler that is never enabled": ("HS170", LOOKED_UP.format(half="float16"), LOOKED_UP.format(half="fp16")),
    "the skips of a scaler that is never enabled": ("HS196", LOOKED_UP.format(half="float16"), LOOKED_UP.format(half="fp16")),
    "a scaler that its table of dtypes never enables": ("HS123", LOOKED_UP.format(half="fp16"), LOOKED_UP.format(half="float16")),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "wrong", "right"), PAIRS.values(), ids=PAIRS.keys())
def test_mistake_is_reported_and_its_repair_is_not(rule, wrong, right):
    """The mistake has one finding of the rule, and the other script has none."""
    assert [f.code for f in findings(wrong, rule)] == [rule]
    assert not list(findings(right, rule))


def test_clipping_is_reported_where_the_loop_calls_it():
    """HS189 reports the call of a function that clips, not the function."""
    text = CALLED.format(always="    clip()\n", last="")
    assert [f.line for f in findings(text, "HS189")] == [text.split("\n").index("    clip()") + 1]
