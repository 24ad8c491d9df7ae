"""HS185-HS189, HS198, HS199, HS131: loops that Accelerate, Fabric, Lightning, a Trainer or DeepSpeed owns."""

import pytest

from check_scripts import findings

ACCELERATE = """\
import torch
from accelerate import Accelerator
{before}accelerator = Accelerator({options})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
{body}
    optimizer.step()
"""
MANUAL = """\
import torch
import lightning as L
class Net(L.LightningModule):
    def __init__(self):
        self.automatic_optimization = {manual}
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        loss = self.compute(batch)
{body}
        opt.step()
{rest}
"""
OWN = ("HS185", "HS186", "HS187", "HS188", "HS189", "HS198", "HS199", "HS131")


def reported(text):
    return [f"{f.code}:{f.severity}" for f in findings(text, *OWN)]


def accelerate(body, options="", before=""):
    return ACCELERATE.format(
        options=options, before=before, body="\n".join(f"    {line}" for line in body.splitlines())
    )


def manual(body, rest="", flag="False"):
    return MANUAL.format(manual=flag, rest=rest, body="\n".join(f"        {line}" for line in body.splitlines()))


@pytest.mark.parametrize(
    ("options", "severity"),
    [
        ("mixed_precision='fp16'", "error"),
        ("mixed_precision='bf16'", "warning"),
        ("", "warning"),
        ("mixed_precision=args.mixed_precision", "warning"),
        ("mixed_precision='no'", "advice"),
        ("deepspeed_plugin=plugin, mixed_precision='bf16'", "error"),
    ],
)
def test_a_bare_backward_is_as_bad_as_the_precision_makes_it(options, severity):
    """In fp16 and with DeepSpeed a bare backward is certainly wrong; elsewhere it depends on the launcher."""
    assert reported(accelerate("loss.backward()", options)) == [f"HS185:{severity}"]


@pytest.mark.parametrize(
    "body",
    [
        "accelerator.backward(loss)",
        "if accelerator is None:\n    loss.backward()\nelse:\n    accelerator.backward(loss)",
        "if use_accelerate:\n    accelerator.backward(loss)\nelse:\n    loss.backward()",
        "if not args.accelerate:\n    loss.backward()",
    ],
)
def test_the_path_without_the_accelerator_is_silent(body):
    """A bare backward in the branch that does not use the Accelerator is right."""
    assert reported(accelerate(body, "mixed_precision='fp16'")) == []


def test_an_optimizer_that_nobody_prepares_steps_as_usual():
    """A second optimizer with its own backward, outside the Accelerator, is not the Accelerator's."""
    text = accelerate("accelerator.backward(loss)", "mixed_precision='fp16'")
    text += "latent_optimizer = make(z)\nfor _ in range(3):\n    other = f(z)\n    other.backward()\n    latent_optimizer.step()\n"
    assert reported(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "class Trainer:\n    def __init__(self):\n        self.accelerator = Accelerator(mixed_precision='fp16')\n"
        "        self.model, self.opt = self.accelerator.prepare(self.model, self.opt)\n"
        "    def train(self):\n        for x in self.loader:\n            loss = self.model(x)\n"
        "            loss.backward()\n            self.opt.step()\n",
        "def train_epoch(model, loader, optimizer):\n    for x in loader:\n        loss = model(x)\n"
        "        loss.backward()\n        optimizer.step()\n"
        "def main():\n    accelerator = Accelerator(mixed_precision='fp16')\n"
        "    net, opt, loader = accelerator.prepare(net, opt, loader)\n    train_epoch(net, loader, opt)\nmain()\n",
        "accelerator = Accelerator(mixed_precision='fp16')\n"
        "optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters()))\n"
        "def step(x):\n    model(x).loss.backward()\n    optimizer.step()\n",
    ],
)
def test_prepared_optimizers_are_followed(text):
    """A prepared optimizer is recognized in another method, behind a parameter, and as a global variable."""
    assert reported(f"import torch\nfrom accelerate import Accelerator\n{text}") == ["HS185:error"]


def test_a_training_function_that_is_passed_the_accelerator_is_checked():
    """Without `prepare` in the file, the accelerator among the parameters decides, if the function uses it."""
    text = (
        "import torch\nfrom accelerate import Accelerator\n"
        "def train(model, optimizer, loader, accelerator: Accelerator):\n    for x in loader:\n        loss = model(x)\n"
        "        loss.backward()\n        optimizer.step()\n        accelerator.print(loss)\n"
    )
    assert reported(text) == ["HS185:warning"]
    assert reported(text.replace("        accelerator.print(loss)\n", "")) == []


def test_functions_of_one_file_are_not_mixed_up():
    """A function with plain optimizers is silent although another one prepares a variable of the same name."""
    text = (
        "import torch\nfrom accelerate import Accelerator\n"
        "def plain():\n    accelerator = Accelerator()\n    loss.backward()\n    optimizer.step()\n"
        "def owned():\n    accelerator = Accelerator()\n    model, optimizer = accelerator.prepare(model, optimizer)\n"
        "    accelerator.backward(loss)\n    optimizer.step()\n"
    )
    assert reported(text) == []


FABRIC = """\
import torch
from lightning.fabric import Fabric
fabric = Fabric({options})
model, optimizer = fabric.setup(model, optimizer)
for x in loader:
    loss = model(x)
    {backward}
    {clip}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("precision='16-mixed'", ["HS185:error"]),
        ("precision='bf16-mixed'", ["HS185:error"]),
        ("precision=p", ["HS185:warning"]),
        ("", []),
        ("strategy='deepspeed_stage_2'", ["HS185:error"]),
        ("strategy='fsdp'", []),
    ],
)
def test_fabric_requires_its_own_backward_in_mixed_precision(options, expected):
    """Fabric raises for a bare backward in mixed precision and with DeepSpeed; in plain fp32 both are the same."""
    assert reported(FABRIC.format(options=options, backward="loss.backward()", clip="")) == expected


def test_fabric_clips_what_it_unscales():
    """torch's clipping after fabric.backward is reported in fp16 and where the precision is open, not in bf16."""
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    for options, expected in {
        "precision='16-mixed'": ["HS186:error"],
        "precision=p": ["HS186:warning"],
        "precision='bf16-mixed'": [],
        "precision='bf16-mixed', strategy='fsdp'": ["HS186:warning"],
    }.items():
        assert reported(FABRIC.format(options=options, backward="fabric.backward(loss)", clip=clip)) == expected


CLIP = "accelerator.backward(loss)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("mixed_precision='fp16'", ["HS186:error"]),
        ("", ["HS186:warning"]),
        ("mixed_precision='bf16'", ["HS186:advice"]),
        ("mixed_precision='bf16', fsdp_plugin=plugin", ["HS186:warning"]),
        ("mixed_precision='bf16' if on_ampere else 'no'", ["HS186:advice"]),
        ("mixed_precision='bf16' if on_ampere else 'fp16'", ["HS186:warning"]),
        ("mixed_precision='bf16' if on_ampere else None", ["HS186:warning"]),
    ],
)
def test_torch_clips_gradients_that_accelerate_scaled(options, expected):
    """torch's clipping after accelerator.backward is wrong in fp16 and with shards."""
    assert reported(accelerate(CLIP, options)) == expected


def test_gradients_that_were_unscaled_first_may_be_clipped():
    """accelerator.unscale_gradients before torch's clipping is the documented alternative."""
    body = CLIP.replace("\ntorch", "\naccelerator.unscale_gradients()\ntorch")
    assert reported(accelerate(body, "mixed_precision='fp16'")) == []


def test_lightning_unscales_inside_the_step():
    """In manual optimization clipping in training_step comes before Lightning unscales."""
    clip = "self.manual_backward(loss)\ntorch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)"
    own = "self.manual_backward(loss)\nself.clip_gradients(opt, gradient_clip_val=1.0)"
    fp16, bf16 = "trainer = L.Trainer(precision='16-mixed')", "trainer = L.Trainer(precision='bf16-mixed')"
    assert reported(manual(clip)) == ["HS186:warning"]
    assert reported(manual(clip, fp16)) == reported(manual(own, fp16)) == ["HS186:error"]
    assert reported(manual(clip, bf16)) == reported(manual(own)) == []


def test_manual_optimization_has_its_own_backward():
    """A bare backward in manual optimization skips the loss scale; with fp32 it is only advice."""
    assert reported(manual("loss.backward()")) == ["HS185:warning"]
    assert reported(manual("loss.backward()", "trainer = L.Trainer(precision='16-mixed')")) == ["HS185:error"]
    assert reported(manual("loss.backward()", "trainer = L.Trainer(max_epochs=3)")) == ["HS185:advice"]
    assert reported(manual("self.manual_backward(loss)")) == []
    assert reported(manual("loss.backward()", flag="args.auto")) == []


def test_automatic_optimization_runs_backward_itself():
    """A bare backward on the returned loss is a second one; on another tensor it may be meant."""
    head = "import lightning.pytorch as pl\nclass Net(pl.LightningModule):\n    def training_step(self, batch):\n        loss = f(batch)\n"
    assert reported(head + "        loss.backward()\n        return {'loss': loss}\n") == ["HS185:error"]
    assert reported(head + "        penalty.backward(retain_graph=True)\n        return loss\n") == []
    assert reported(head.replace("training_step", "backward") + "        loss.backward()\n        return loss\n") == []


def test_trainer_subclasses_use_the_accelerator_of_the_trainer():
    """A bare backward in training_step of a Trainer skips its loss scale; older code with a branch for it is silent."""
    head = "from transformers import Trainer, TrainingArguments\nclass T(Trainer):\n    def training_step(self, model, inputs):\n"
    bare = (
        head
        + "        loss = self.compute_loss(model, inputs)\n        loss.backward()\n        return loss.detach()\n"
    )
    assert reported(bare) == ["HS185:warning"]
    assert reported(bare + "args = TrainingArguments('out', fp16=True)\n") == ["HS185:error"]
    branch = "        if self.use_amp:\n            self.scaler.scale(loss).backward()\n        else:\n            loss.backward()\n"
    assert reported(head + branch) == []
    assert reported(bare.replace("training_step", "attack")) == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("with accelerator.autocast():\n    loss = f(model(x))\n    accelerator.backward(loss)", ["HS187:warning"]),
        ("with accelerator.autocast():\n    loss = f(model(x))\naccelerator.backward(loss)", []),
        ("accelerator.backward(loss)\nwith accelerator.autocast():\n    optimizer.step()", ["HS187:warning"]),
        ("with accelerator.accumulate(model):\n    accelerator.backward(loss)", []),
        (
            "autocast = pipe.autocast or accelerator.autocast\nwith autocast():\n    accelerator.backward(loss)\n    optimizer.step()",
            ["HS187:warning"],
        ),
        ("autocast = pipe.autocast\nwith autocast():\n    accelerator.backward(loss)", []),
    ],
)
def test_backward_belongs_outside_the_frameworks_autocast(body, expected):
    """Backward and step inside accelerator.autocast() are reported once."""
    assert reported(accelerate(body, "mixed_precision='fp16'")) == expected


DIVIDED = "accelerator.backward(loss)"


@pytest.mark.parametrize(
    ("options", "body", "expected"),
    [
        ("gradient_accumulation_steps=4", "accelerator.backward(loss / 4)", ["HS188:warning"]),
        ("gradient_accumulation_steps=args.accum", f"loss = loss / args.accum\n{DIVIDED}", ["HS188:warning"]),
        ("gradient_accumulation_steps=args.accum", f"loss /= args.accum\n{DIVIDED}", ["HS188:warning"]),
        ("gradient_accumulation_steps=n", f"if n > 1:\n    loss = loss / n\n{DIVIDED}", ["HS188:warning"]),
        (
            "gradient_accumulation_steps=4",
            f"loss = loss / accelerator.gradient_accumulation_steps\n{DIVIDED}",
            ["HS188:warning"],
        ),
        ("", f"loss = loss / args.accum\n{DIVIDED}", []),
        ("gradient_accumulation_steps=args.accum", f"loss = loss / num_tokens\n{DIVIDED}", []),
        ("gradient_accumulation_steps=args.accum", f"shown = loss / args.accum\n{DIVIDED}", []),
        ("deepspeed_plugin=DeepSpeedPlugin(gradient_accumulation_steps=n)", f"loss /= n\n{DIVIDED}", ["HS188:warning"]),
        (
            "deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds, gradient_accumulation_steps=n)",
            f"loss /= n\n{DIVIDED}",
            [],
        ),
        ("gradient_accumulation_steps=n, deepspeed_plugin=DeepSpeedPlugin(ds)", f"loss /= n\n{DIVIDED}", []),
        ("deepspeed_plugin=DeepSpeedPlugin(ds, n)", f"loss /= n\n{DIVIDED}", []),
        ("gradient_accumulation_steps=1", "accelerator.backward(loss / 1)", []),
        (
            "gradient_accumulation_steps=1",
            f"loss = loss / accelerator.gradient_accumulation_steps\n{DIVIDED}",
            [],
        ),
        ("gradient_accumulation_steps=n", f"if plain:\n    loss /= n\n    f(loss)\nelse:\n    {DIVIDED}", []),
    ],
)
def test_accelerate_divides_by_its_accumulation_steps(options, body, expected):
    """A loss divided by the same number of steps is divided twice; other divisions are the script's own."""
    assert [r for r in reported(accelerate(body, options)) if "HS188" in r] == expected


DEEPSPEED = """\
import deepspeed
{before}engine, _, _, _ = deepspeed.initialize(model=model, config=ds)
for i, x in enumerate(loader):
    loss = engine(x)
    engine.backward(loss{divided})
{step}
"""
CONFIG = "ds = {'train_micro_batch_size_per_gpu': 4, 'gradient_accumulation_steps': args.accum}\n"
GUARDED = "    if (i + 1) % args.accum == 0:\n        engine.step()"


@pytest.mark.parametrize(
    ("before", "divided", "step", "expected"),
    [
        (CONFIG, " / args.accum", "    engine.step()", ["HS188:warning"]),
        ("", " / args.accum_steps", "    engine.step()", ["HS188:advice"]),
        ("", " / args.accum_steps", GUARDED, []),
        ("", " / num_tokens", "    engine.step()", []),
        (CONFIG, "", GUARDED, ["HS188:error"]),
        ("", "", GUARDED, []),
        (CONFIG, "", "    engine.step()", []),
        (CONFIG, " / args.accum, scale_wrt_gas=False", "    engine.step()", []),
        (CONFIG, " / ds['gradient_accumulation_steps']", "    engine.step()", ["HS188:warning"]),
        (CONFIG, " / ds.get('gradient_accumulation_steps', 1)", "    engine.step()", ["HS188:warning"]),
        (CONFIG, " / engine.gradient_accumulation_steps()", "    engine.step()", ["HS188:warning"]),
        (CONFIG, " / ds['world_size']", "    engine.step()", []),
        (
            CONFIG,
            "",
            "    if (i + 1) % ds['gradient_accumulation_steps'] == 0:\n        engine.step()",
            ["HS188:error"],
        ),
    ],
)
def test_deepspeed_counts_and_divides(before, divided, step, expected):
    """engine.backward divides and engine.step counts; certain where the configuration in the script has the steps."""
    assert reported(DEEPSPEED.format(before=before, divided=divided, step=step)) == expected


ACCUMULATE = "with accelerator.accumulate(model):\n    accelerator.backward(loss)\n    {clip}"
OWN_CLIP = "accelerator.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("options", "clip", "expected"),
    [
        ("mixed_precision='fp16', gradient_accumulation_steps=4", OWN_CLIP, ["HS189:error"]),
        ("mixed_precision='bf16', gradient_accumulation_steps=4", OWN_CLIP, ["HS189:warning"]),
        ("gradient_accumulation_steps=args.accum", OWN_CLIP, ["HS189:warning"]),
        ("mixed_precision='bf16', gradient_accumulation_steps=args.accum", OWN_CLIP, ["HS189:advice"]),
        ("mixed_precision='fp16'", OWN_CLIP, []),
        ("mixed_precision='fp16', gradient_accumulation_steps=4", f"if accelerator.sync_gradients: {OWN_CLIP}", []),
    ],
)
def test_clipping_waits_for_the_end_of_the_window(options, clip, expected):
    """accelerator.clip_grad_norm_ inside accumulate belongs under sync_gradients, if anything is accumulated."""
    assert reported(accelerate(ACCUMULATE.format(clip=clip), options)) == expected


@pytest.mark.parametrize(
    ("prepare", "options", "expected"),
    [
        ("model = accelerator.prepare(model)", "mixed_precision='fp16'", ["HS198:error"]),
        ("model = accelerator.prepare(model)", "", ["HS198:warning"]),
        (
            "model = accelerator.prepare(model)\nfor k in optimizer.parts:\n    optimizer.parts[k] = accelerator.prepare(optimizer.parts[k])",
            "",
            [],
        ),
        ("model = accelerator.prepare(model)", "mixed_precision='bf16'", []),
        ("model, optimizer = accelerator.prepare(model, optimizer)", "mixed_precision='fp16'", []),
        ("parts = accelerator.prepare(*parts)", "mixed_precision='fp16'", []),
        ("", "mixed_precision='fp16'", ["HS198:error"]),
        ("", "", []),
        ("optimizer = wrap(accelerator, optimizer)", "mixed_precision='fp16'", []),
    ],
)
def test_an_optimizer_outside_the_accelerator_gets_scaled_gradients(prepare, options, expected):
    """A plain optimizer after accelerator.backward is reported where everything else is visibly prepared."""
    text = (
        "import torch\nfrom accelerate import Accelerator\n"
        f"accelerator = Accelerator({options})\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n{prepare}\n"
        "for x in loader:\n    accelerator.backward(model(x))\n    optimizer.step()\n"
    )
    assert reported(text) == expected


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("model = Net().half()", "mixed_precision='fp16'", ["HS199:error"]),
        ("model = M.from_pretrained('x', dtype=torch.half)", "mixed_precision='fp16'", ["HS199:error"]),
        ("model = M.from_pretrained('x', torch_dtype=torch.bfloat16)", "mixed_precision='fp16'", []),
        ("model = M.from_pretrained('x', torch_dtype=torch.float16)", "mixed_precision='bf16'", []),
        ("model = M.from_pretrained('x', torch_dtype=torch.float16).float()", "mixed_precision='fp16'", []),
        ("model = M.from_pretrained('x', dtype=torch.half)\nmodel.requires_grad_(False)", "mixed_precision='fp16'", []),
        (
            "import peft\nmodel = peft.get_peft_model(M.from_pretrained('x', dtype=torch.half), config)",
            "mixed_precision='fp16'",
            [],
        ),
    ],
)
def test_the_scaler_rejects_float16_weights(model, options, expected):
    """float16 weights in an fp16 Accelerator are reported, unless only adapters are trained."""
    before = f"{model}\noptimizer = torch.optim.AdamW(model.parameters())\n"
    assert reported(accelerate("accelerator.backward(loss)", options, before)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("mixed_precision='fp16'", ["HS131:error"]),
        ("", ["HS131:warning"]),
        ("mixed_precision='no'", []),
        ("mixed_precision='bf16', deepspeed_plugin=plugin", ["HS131:error"]),
    ],
)
def test_a_second_scaler_depends_on_the_accelerator(options, expected):
    """An own scaler next to an Accelerator is wrong in fp16 and with DeepSpeed; it is reported once, where it is created."""
    body = "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"
    text = accelerate(body, options, "scaler = torch.amp.GradScaler('cuda')\n").replace("    optimizer.step()\n", "")
    both = (
        text
        + "for x in loader:\n    scaler.scale(model(x)).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
    )
    assert reported(text) == reported(both) == expected
    assert all(f.line == 3 for f in findings(both, "HS131"))


def test_two_loops_in_one_file_have_each_their_own_scaler():
    """A class with a GradScaler and another with an Accelerator, as in a file that compares both."""
    one = "class {name}:\n    def __init__(self):\n        {made}\n    def step(self, loss):\n        {steps}\n"
    by_hand = one.format(
        name="ByHand",
        made="self.scaler = torch.amp.GradScaler('cuda')",
        steps="self.scaler.scale(loss).backward(); self.scaler.step(self.optimizer); self.scaler.update()",
    )
    library = one.format(
        name="Library",
        made="self.accelerator = Accelerator(mixed_precision='fp16'); self.accelerator.prepare(self.optimizer)",
        steps="self.accelerator.backward(loss); self.optimizer.step()",
    )
    head = "import torch\nfrom accelerate import Accelerator\n"
    assert not findings(head + by_hand + library, "HS131")
    loaded = library.replace("Accelerator(", "load('accelerate').Accelerator(").replace(
        "self.accelerator.backward(loss)", "self.accelerator.clip_grad_norm_(w, 1.0); self.accelerator.backward(loss)"
    )
    assert not findings(head + by_hand + loaded, "HS131")
    mixed = library.replace("self.accelerator = ", "self.scaler = torch.amp.GradScaler('cuda'); self.accelerator = ")
    mixed = mixed.replace("self.optimizer.step()", "self.scaler.step(self.optimizer)")
    assert findings(head + mixed, "HS131")


FABRIC_WINDOW = """\
import lightning as L
fabric = L.Fabric(precision="16-mixed"{strategy})
model, optimizer = fabric.setup(model, optimizer)
for i, (x, y) in enumerate(loader):
    fabric.backward(loss_fn(model(x), y){divided})
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
MANUAL_WINDOW = """\
import lightning as L
class Net(L.LightningModule):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch){divided}
        self.manual_backward(loss)
        if (batch_idx + 1) % self.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FABRIC_WINDOW.format(strategy="", divided=""), ["HS180"]),
        (FABRIC_WINDOW.format(strategy="", divided=" / accumulation_steps"), []),
        (FABRIC_WINDOW.format(strategy=", strategy='deepspeed_stage_2'", divided=""), []),
        (MANUAL_WINDOW.format(divided=""), ["HS180"]),
        (MANUAL_WINDOW.format(divided=" / self.accumulate"), []),
    ],
)
def test_fabric_and_manual_optimization_do_not_divide(text, expected):
    """Neither fabric.backward nor manual_backward divides the loss by the length of a window."""
    assert [f.code for f in findings(text, "HS180")] == expected


TRAINER = """\
import torch
from {package} import {base}
class Own({base}):
    def training_step(self, model, inputs):
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_({clipped}, 1.0)
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("package", "base", "clipped", "expected"),
    [
        ("transformers", "Trainer", "model.parameters()", ["HS186:warning"]),
        ("trl", "PPOTrainer", "filter(lambda p: p.requires_grad, model.parameters())", ["HS186:warning"]),
        ("transformers", "Trainer", "amp.master_params(self.optimizer)", []),
        ("mylib", "Loop", "model.parameters()", []),
    ],
)
def test_the_accelerator_of_a_trainer_scales_gradients(package, base, clipped, expected):
    """A Trainer's own accelerator leaves gradients scaled in fp16, so torch's clip after its backward is reported."""
    assert reported(TRAINER.format(package=package, base=base, clipped=clipped)) == expected


LISTED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator({options})
optimizers = []
for part in parts:
    optimizers.append(torch.optim.AdamW(part.parameters()))
{prepare}
for i, x in enumerate(loader):
    accelerator.backward(model(x))
    {step}
"""


@pytest.mark.parametrize(
    ("options", "prepare", "step", "expected"),
    [
        (
            "mixed_precision='fp16'",
            "model, optimizers = accelerator.prepare(model, optimizers)",
            "optimizers[0].step()",
            "error",
        ),
        ("", "model, optimizers = accelerator.prepare(model, optimizers)", "optimizers[i].step()", "warning"),
        (
            "",
            "model, optimizers = accelerator.prepare(model, optimizers)",
            "for optimizer in optimizers: optimizer.step()",
            "warning",
        ),
        (
            "mixed_precision='bf16'",
            "model, optimizers = accelerator.prepare(model, optimizers)",
            "optimizers[0].step()",
            "",
        ),
        ("", "model, *optimizers = accelerator.prepare(model, *optimizers)", "optimizers[0].step()", ""),
        ("", "optimizers = [accelerator.prepare(o) for o in optimizers]", "optimizers[0].step()", ""),
    ],
)
def test_prepare_does_not_look_into_lists(options, prepare, step, expected):
    """Optimizers in a list that is passed to prepare stay plain optimizers, which step scaled gradients in fp16."""
    text = LISTED.format(options=options, prepare=prepare, step=step)
    assert [f.severity for f in findings(text, "HS198")] == ([expected] if expected else [])


CHOSEN = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision=args.mixed_precision)
{create}
model, loader{target} = accelerator.prepare(model, loader{target})
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(loss_fn(model(x), y))
    optimizer.step()
"""


@pytest.mark.parametrize(
    "create",
    [
        "if args.use_8bit:\n    import bitsandbytes as bnb\n    optimizer_cls = bnb.optim.AdamW8bit\nelse:\n    optimizer_cls = torch.optim.AdamW\n"
        "optimizer = optimizer_cls(model.parameters())",
        "optimizer = None\noptimizer = torch.optim.AdamW(model.parameters())",
        "from helpers import get_optimizer\noptimizer = get_optimizer(model.parameters(), lr=1e-4)",
    ],
)
def test_chosen_optimizer_that_is_not_prepared(create):
    """An optimizer of a chosen class, or of a factory, needs `prepare` as well."""
    assert [f.severity for f in findings(CHOSEN.format(create=create, target=""), "HS198")] == ["warning"]
    assert findings(CHOSEN.format(create=create, target=", optimizer"), "HS198") == []


def test_optimizer_that_a_helper_may_prepare():
    """A factory that receives the accelerator may prepare its optimizer."""
    create = "from helpers import get_optimizer\noptimizer = get_optimizer(model.parameters(), accelerator)"
    assert findings(CHOSEN.format(create=create, target=""), "HS198") == []


def test_bare_backward_in_a_trainer_with_its_own_accelerator():
    """A class that derives from a Trainer but creates its Accelerator steps with that."""
    text = (
        "from accelerate import Accelerator\nfrom trl import BaseTrainer\nclass PPO(BaseTrainer):\n    def __init__(self, model, optimizer):\n"
        "        self.accelerator = Accelerator()\n        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)\n"
        "    def train_minibatch(self, batch):\n        loss = self.model(batch)\n        self.optimizer.zero_grad()\n"
        "        {}\n        self.optimizer.step()\n"
    )
    assert [f.line for f in findings(text.format("loss.backward()"), "HS185")] == [10]
    assert findings(text.format("self.accelerator.backward(loss)"), "HS185") == []


@pytest.mark.parametrize(
    ("test", "expected"), [("accelerator.unwrap_model(model).dtype != torch.float32", ["HS185"]), ("accelerator", [])]
)
def test_a_property_of_the_accelerator_is_no_choice_against_it(test, expected):
    """`if accelerator.is_main_process` does not ask whether there is an accelerator."""
    body = f"    if {test}:\n        raise ValueError\n    loss.backward()"
    text = ACCELERATE.format(before="", options="mixed_precision='fp16'", body=body)
    assert [f.code for f in findings(text, "HS185")] == expected


SECOND = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator({options})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scaler = torch.amp.GradScaler("cuda"{enabled})
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("options", "enabled", "expected"),
    [
        ("mixed_precision='fp16'", "", ["error"]),
        ("deepspeed_plugin=plugin", "", ["error"]),
        ("mixed_precision=args.precision", "", ["warning"]),
        ("", "", ["warning"]),
        ("mixed_precision='no'", "", []),
        ("mixed_precision='fp16'", ", enabled=False", []),
    ],
)
def test_a_second_scaler_next_to_an_accelerator(options, enabled, expected):
    """A GradScaler that steps a prepared optimizer conflicts with the scaler of an Accelerator in fp16."""
    assert [f.severity for f in findings(SECOND.format(options=options, enabled=enabled), "HS131")] == expected


WORKER = """\
import torch
from accelerate import Accelerator
class Worker{base}:
    def __init__(self, model, amp=True, precision="fp16"):
        self.model = model
        self.accelerator = Accelerator(mixed_precision=precision if amp else "no")
        {optimizer}
    def train(self, loader):
        for x, y in loader:
            self.opt.zero_grad()
            loss = loss_fn(self.model(x), y)
            self.accelerator.backward(loss)
            self.opt.step()
"""
OPTIMIZER = "self.opt = torch.optim.Adam(model.parameters())"


@pytest.mark.parametrize(
    ("base", "optimizer", "expected"),
    [
        ("", OPTIMIZER, ["HS198:warning"]),
        ("(object)", f"if hasattr(self, 'model'): {OPTIMIZER}", ["HS198:warning"]),
        ("(Base)", OPTIMIZER, []),  # may prepare both
        ("", f"{OPTIMIZER}\n        self.model, self.opt = self.accelerator.prepare(model, self.opt)", []),
        ("", f"{OPTIMIZER}\n        wrap(self)", []),
        ("", f"{OPTIMIZER}\n        self.model, self.opt = wrap(self.accelerator, model, self.opt)", []),
        ("", "self.opt = model.optimizer", []),
    ],
)
def test_a_class_with_its_own_accelerator_prepares_its_optimizer(base, optimizer, expected):
    """A class that creates an Accelerator with an option for fp16 and an optimizer, and prepares nothing, steps scaled gradients."""
    assert reported(WORKER.format(base=base, optimizer=optimizer)) == expected
