"""Forms in which the evidence of a mistake is somewhere else than next to it, across rules."""

import pytest

from check_scripts import findings

LOOP = """\
for x, y in loader:
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BF16 = "import torch\nmodel = Net().to(torch.bfloat16)\n"


def lines(text, code):
    return [f.line for f in findings(text, code)]


@pytest.mark.parametrize(
    ("switch", "count"), [("set_requires_grad(model, True)", 1), ("set_requires_grad(model.head, True)", 0)]
)
def test_a_model_that_is_switched_on_again_is_trained(switch, count):
    """GANs freeze a network for one half of the step and train it in the other."""
    text = BF16 + "optimizer = torch.optim.AdamW(model.parameters())\n" + LOOP
    text = text.replace("    loss =", f"    set_requires_grad(model, False)\n    {switch}\n    loss =")
    assert len(lines(text, "HS151")) == count


@pytest.mark.parametrize(("guard", "count"), [("if not use_ds:\n    ", 1), ("", 0)])
def test_weights_that_are_cast_without_the_engine_have_no_masters(guard, count):
    """DeepSpeed keeps float32 masters only where its engine is used."""
    text = (
        f"import deepspeed\nimport torch\nmodel = Net()\n{guard}model = model.to(torch.bfloat16)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "if use_ds:\n    model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer)\n" + LOOP
    )
    assert len(lines(text, "HS151")) == count


def test_parameters_that_are_passed_to_a_function_belong_to_the_callers_model():
    """`make(params)` creates the optimizer of the model whose parameters the caller gathers."""
    text = BF16 + (
        "def make(params, rate):\n    return torch.optim.AdamW(params, lr=rate)\n"
        "weights = [p for p in model.parameters() if p.ndim > 1]\noptimizer = make(weights, 1e-4)\n" + LOOP
    )
    assert lines(text, "HS151") == [2]
    assert lines(text.replace("Net().to(torch.bfloat16)", "Net()"), "HS151") == []


def test_parameters_of_an_object_are_not_passed():
    """`self` of a method is no argument of its calls, also of those without any."""
    text = BF16 + (
        "class Trainer:\n    def make(self):\n        return torch.optim.AdamW(self, lr=1e-4)\n    def fit(self):\n"
        "        return self.make()\n" + LOOP
    )
    assert lines(text, "HS151") == []


def test_a_part_under_another_name_has_the_dtype_of_its_model():
    """`inner = speech.model` and `inner.talker` are parts of what was loaded in bfloat16."""
    text = (
        "import torch\nspeech = Speech.from_pretrained(name, torch_dtype=torch.bfloat16)\ninner = speech.model\n"
        "model = inner.talker\noptimizer = torch.optim.AdamW(model.parameters())\n" + LOOP
    )
    assert lines(text, "HS151") == [2]
    assert lines(text.replace("inner = speech.model", "inner = Other()"), "HS151") == []


def test_an_option_is_no_part_of_a_model():
    """`Quantizer(dim=args.dim)` does not change the model that also gets `args.dim`."""
    text = (
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, dim):\n        super().__init__()\n        self.dim = dim\n"
        "model = Net(args.dim)\nmodel.codes = Quantizer(dim=args.dim)\nmodel = model.to(torch.bfloat16)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n" + LOOP
    )
    assert lines(text, "HS151") == [8]


OWNED = """\
import torch
from accelerate import Accelerator
def main(args):
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_fn(model(x), y))
        optimizer.step()
"""


def test_a_function_that_prepares_nothing_steps_scaled_gradients():
    """No other file can replace a local optimizer; the attribute of an object may be prepared elsewhere."""
    assert lines(OWNED, "HS198") == [9]
    elsewhere = OWNED.replace("def main(args):", "def main(args, optimizer):").replace(
        "    optimizer = torch.optim.Adam(model.parameters())\n", ""
    )
    assert lines(elsewhere, "HS198") == []


@pytest.mark.parametrize(
    ("test", "codes"),
    [
        ("not torch.isfinite(norm)", ["HS112"]),
        ("norm > 100", ["HS112"]),
        ("len(x) < 2", []),
    ],
)
def test_accelerate_updates_its_scaler_only_in_the_step(test, codes):
    """A `continue` after accelerator.clip_grad_norm_ leaves the gradients marked as unscaled."""
    text = (
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(mixed_precision='fp16')\n"
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\nfor x, y in loader:\n"
        "    loss = loss_fn(model(x), y)\n    accelerator.backward(loss)\n"
        "    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)\n"
        f"    if {test}:\n        optimizer.zero_grad()\n        continue\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert [f.code for f in findings(text, "HS112", "HS157")] == codes
    assert findings(text.replace("'fp16'", "'bf16'"), "HS112", "HS157") == []


ACCUMULATE = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = loss_fn(model(x), y)
    accelerator.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_clip_after_the_accumulate_block_runs_on_every_micro_batch():
    """The optimizer's step waits for the last micro-batch, wherever the block ends."""
    assert lines(ACCUMULATE, "HS189") == [8]
    assert (
        lines(ACCUMULATE.replace("    torch.nn", "    if accelerator.sync_gradients:\n        torch.nn"), "HS189") == []
    )
    assert lines(ACCUMULATE.replace("steps=4", "steps=1"), "HS189") == []


def test_a_clip_in_the_branch_without_the_accelerator_is_another_matter():
    """`if accelerated: with accelerator.accumulate(model): ...` and `else:` with the plain loop."""
    plain = "        loss.backward()\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()\n"
    text = (
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(gradient_accumulation_steps=4)\n"
        "for x, y in loader:\n    if accelerated:\n        with accelerator.accumulate(model):\n"
        "            accelerator.backward(model(x))\n            optimizer.step()\n"
        f"    else:\n        loss = model(x)\n{plain}    optimizer.zero_grad()\n"
    )
    assert lines(text, "HS189") == []


CHECKPOINT = """\
import torch
scaler = torch.amp.GradScaler("cuda")
def load(model):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    return {start}
start = load(model)
for epoch in range(start, 10):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({{"model": model.state_dict(), "scaler": scaler.state_dict(), "epoch": epoch}}, path)
"""


def test_a_run_that_starts_at_the_next_epoch_is_resumed():
    """The saved scale is needed there, whether or not the optimizer is restored."""
    assert lines(CHECKPOINT.format(start='int(state.get("epoch", 0)) + 1'), "HS171") == [16]
    assert lines(CHECKPOINT.format(start='state["epoch"] + 1'), "HS171") == [16]
    assert lines(CHECKPOINT.format(start="1"), "HS171") == []


@pytest.mark.parametrize(("use", "count"), [("", 1), ("    print(use_amp)\n", 0), ("    options = locals()\n", 0)])
def test_a_flag_that_is_read_from_the_settings_and_not_used(use, count):
    """A variable of a function cannot be read by another file."""
    text = (
        "import torch\ndef train(config):\n    use_amp = config.training.get('use_amp', True)\n"
        f"{use}    for x in loader:\n        model(x).backward()\n        optimizer.step()\n"
    )
    assert len(lines(text, "HS139")) == count


def test_a_method_of_a_model_that_is_known_by_its_use_is_a_forward():
    """`self.vae.training_step(x)` under autocast trains what `_validate` then runs in float32."""
    text = """\
import torch
class Trainer:
    def fit(self):
        optimizer = torch.optim.Adam(self.vae.parameters())
        for x in self.loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.vae.training_step(x)
            loss.backward()
            optimizer.step()
        self._validate()
    @torch.no_grad()
    def _validate(self):
        self.vae.eval()
        for x in self.val_loader:
            out = self.vae(x)
"""
    assert lines(text, "HS149") == [16]
    assert lines(text.replace("self.vae.training_step(x)", "self.loss(x)"), "HS149") == []


WINDOWED = """\
import torch
from monai.inferers import sliding_window_inference
@torch.no_grad()
def validate(model, loader):
    model.eval()
{define}    for x in loader:
        out = sliding_window_inference(x, roi_size=64, sw_batch_size=4, predictor={predictor})
for x, y in train_loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
validate(model, loader)
"""


@pytest.mark.parametrize(
    ("define", "predictor", "count"),
    [
        ("    def first(x):\n        return model(x)[0]\n", "first", 1),
        ("", "lambda x: model(x)[0]", 1),
        ("    def first(x):\n        with torch.autocast('cuda'):\n            return model(x)[0]\n", "first", 0),
    ],
)
def test_a_predictor_that_calls_the_model_runs_it(define, predictor, count):
    """sliding_window_inference often gets a function that selects one output of the model."""
    assert len(lines(WINDOWED.format(define=define, predictor=predictor), "HS149")) == count


def test_a_query_that_is_looked_up_by_name_is_the_same_query():
    """`getattr` with a default only protects against old versions of torch."""
    text = 'import torch\nok = getattr(torch.cuda, "is_bf16_supported", lambda: False)()\n'
    assert lines(text, "HS167") == [2]
    assert lines(text.replace(")()", ")"), "HS167") == []


SLICED = """\
import torch
def part(logits, tokens, start):
    kept = logits[:, start:]
    if kept.size(1) == 0:
        return None, None
    rows = []
    for i in range(kept.size(0)):
        rows.append(kept[i, :-1])
    kept = torch.stack(rows)
    return kept, tokens[:, start:]
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(x)
    out = part(logits, y, 4)
    kept, target = out
    logp = torch.log_softmax({value}, dim=-1)
    scaler.scale(logp.mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_logits_that_a_function_slices_and_returns_keep_their_dtype():
    """The region is the one of the logits that this call passes, also through a list that is stacked and a tuple."""
    assert lines(SLICED.format(value="kept"), "HS154") == [16]
    assert lines(SLICED.format(value="kept.float()"), "HS154") == []
    assert lines(SLICED.format(value="target"), "HS154") == []
