"""HS161: weights that a flag casts to float16, and the plain step that follows."""

import pytest

from check_scripts import codes, findings

MAIN = """\
import torch

def main(args):
    model = Net().cuda()
    {cast}
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    if args.evaluate:
        return validate(model)
    for epoch in range(args.epochs):
        train(model, loader, optimizer, args)

def train(model, loader, optimizer, args):
    for x, y in loader:
        optimizer.zero_grad()
        {forward}
        {backward}
        {step}
"""


def main(cast, *, forward="loss = model(x.half(), y)", backward="loss.backward()", step="optimizer.step()"):
    return MAIN.format(cast=cast, forward=forward, backward=backward, step=step)


@pytest.mark.parametrize(
    "text",
    [
        main("if args.fp16: model.half()"),
        main("if args.precision == 'fp16': model = model.half()"),
        main("if args.half: model.to(torch.float16)", forward="loss = model(x, y) + scaled_kl"),
        main("if args.fp16: model.half()", step="if args.fp16: optimizer.step()"),
    ],
)
def test_cast_under_a_flag_is_reported(text):
    """A model cast to float16 under a flag and stepped regardless of the flag is reported at the cast."""
    assert codes(text) == ["HS161:5"]


@pytest.mark.parametrize(
    "text",
    [
        main("if args.evaluate: model.half()"),
        main("if args.export: model.half()"),
        main("if not args.fp16: model.half()"),
        main("if args.fp16: model.half()", step="if not args.fp16: optimizer.step()"),
        main("if args.fp16: model.half()", step="(fp16_step() if args.fp16 else optimizer.step())"),
        main("if args.fp16: model.half()", backward="(loss * args.loss_scale).backward()"),
        main("if args.fp16: model.half()", backward="(optimizer.backward(loss) if args.fp16 else loss.backward())"),
        main("if args.fp16: model.half()", step="optimizer.step(); copy_back(master_params, model)"),
        main("if args.fp16: model.half(); wrap = FP16_Optimizer"),
        main("if args.fp16: teacher.half()"),
    ],
)
def test_cast_that_is_not_trained_is_silent(text):
    """Unrelated flags, the opposite branch, master weights and loss scaling give no finding."""
    assert codes(text) == []


PROMPTS = """\
import torch
from torch.amp import GradScaler, autocast

class Prompts(torch.nn.Module):
    def __init__(self, clip_model):
        super().__init__()
        dtype = clip_model.dtype
        self.ctx = torch.nn.Parameter(torch.empty(16, 512, dtype=dtype))

class Runner(Base):
    def check(self, cfg):
        assert cfg.PREC in ["fp16", "fp32", "amp"]

    def build(self, cfg):
        clip_model = load_clip(cfg)
        if {test}:
            clip_model.float()
        self.model = Prompts(clip_model)
        self.optim = build_optimizer(self.model, cfg)
        self.scaler = GradScaler("cuda") if cfg.PREC == "amp" else None

    def train(self, image, label):
        if self.cfg.PREC == "amp":
            with autocast("cuda"):
                loss = loss_fn(self.model(image), label)
            self.optim.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optim)
            self.scaler.update()
        else:
            loss = loss_fn(self.model(image), label)
            {update}
"""
LIFTED = 'cfg.PREC == "fp32" or cfg.PREC == "amp"'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PROMPTS.format(test=LIFTED, update="self.model_backward_and_update(loss)"), True),
        (PROMPTS.format(test='cfg.PREC in ["fp32", "amp"]', update="loss.backward(); self.optim.step()"), True),
        (PROMPTS.format(test="True", update="loss.backward(); self.optim.step()"), False),
        (PROMPTS.format(test=LIFTED, update="pass"), False),
        (PROMPTS.format(test=LIFTED, update="self.scaler.scale(loss).backward()"), False),
        (PROMPTS.format(test=LIFTED, update="loss.backward()").replace('["fp16", ', "["), False),
        (PROMPTS.format(test=LIFTED, update="loss.backward()").replace("clip_model.dtype", "torch.float32"), False),
        # Other models are float32 unless something casts them.
        (
            PROMPTS.format(test=LIFTED, update="loss.backward()").replace(
                "load_clip(cfg)", "getattr(models, cfg.name)()"
            ),
            False,
        ),
    ],
)
def test_a_checkpoint_in_float16_is_trained_where_no_option_casts_it(text, expected):
    """With 'fp16' neither `.float()` nor the scaler of 'amp' runs, and parameters of the model's dtype are stepped."""
    assert [c for c in codes(text) if c.startswith("HS161")] == (["HS161:32"] if expected else [])


@pytest.mark.parametrize(
    ("loss", "test", "expected"),
    [
        ("F.cross_entropy(self.model(image), label)", LIFTED, ["HS154:31"]),
        ("F.cross_entropy(self.model(image).float(), label)", LIFTED, []),
        ("F.cross_entropy(self.model(image), label)", "True", []),
    ],
)
def test_the_loss_of_a_checkpoint_in_float16(loss, test, expected):
    """Where no option casts the model, its logits and the cross-entropy are float16 too."""
    text = PROMPTS.format(test=test, update="self.model_backward_and_update(loss)")
    text = text.replace("import torch\n", "import torch, torch.nn.functional as F\n", 1)
    head, _, tail = text.rpartition("loss_fn(self.model(image), label)")
    assert [c for c in codes(head + loss + tail) if c.startswith("HS154")] == expected


TWO = """\
import torch
model = Net().cuda(){first}
critic = Critic().cuda(){second}
optimizer = torch.optim.AdamW(model.parameters())
critic_optimizer = torch.optim.AdamW(critic.parameters())
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    critic_optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    critic_loss = critic(x.half())
    critic_loss.backward()
    critic_optimizer.step()
"""


def test_the_scaler_of_one_optimizer_is_none_of_the_other():
    """float16 weights whose optimizer steps by itself are reported next to a scaler that steps another one."""
    assert [code for code in codes(TWO.format(first="", second=".half()")) if code.startswith("HS16")] == ["HS161:3"]
    assert [code for code in codes(TWO.format(first=".half()", second="")) if code.startswith("HS16")] == ["HS160:2"]
    assert [code for code in codes(TWO.format(first="", second="")) if code.startswith("HS16")] == []


LOADED = """\
import torch
model = Net().cuda()
if {condition}:
    model = load_weights(model, path).half()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("config['pretrained_model']", ["HS160:4"]),
        ("args.fp16", ["HS160:4"]),
        ("args.inference", []),
        ("device == 'cpu'", []),
    ],
)
def test_a_condition_of_the_cast_leaves_a_scaler_that_is_always_on(condition, expected):
    """A model that is float16 only with an option meets the scaler in that run, unless the run does not train."""
    assert [code for code in codes(LOADED.format(condition=condition)) if code.startswith("HS160")] == expected


ACCELERATED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator({options})
model = Net(){cast}
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(loss_fn(model(x), y))
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("options", "cast", "expected"),
    [
        ("mixed_precision='bf16'", ".half()", ["HS161:4"]),
        ("mixed_precision=args.mixed_precision", ".half()", ["HS161:4"]),
        ("mixed_precision='fp16'", ".half()", ["HS199:4"]),
        ("mixed_precision='bf16', deepspeed_plugin=plugin", ".half()", []),
        ("mixed_precision='bf16'", "", []),
    ],
)
def test_float16_weights_of_an_accelerator(options, cast, expected):
    """An Accelerator without DeepSpeed or FSDP keeps no master weights of a float16 model."""
    assert codes(ACCELERATED.format(options=options, cast=cast)) == expected


MANAGED = """\
import torch
from adapters import Manager
class Trainer:
    def load(self):
        precision = self.config.mixed_precision.lower()
        self.dtype = torch.float32
        if precision == 'fp16':
            self.dtype = torch.float16
        elif precision == 'bf16':
            self.dtype = torch.bfloat16
    def attach(self):
        self.manager = Manager(rank=8)
        {cast}
    def setup(self):
        params = {params}
        self.optimizer = torch.optim.AdamW(params, lr=1e-4)
        mode = self.config.mixed_precision.lower()
        self.scaler = None
        if mode == '{mode}':
            self.scaler = torch.amp.GradScaler('cuda')
    def fit(self):
        for x in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast('cuda', dtype=self.dtype):
                loss = self.model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""
EACH = "for part in self.manager.parts.values():\n            part.to(self.device, dtype=self.dtype)"


@pytest.mark.parametrize(
    ("cast", "params", "mode", "expected"),
    [
        (EACH, "self.manager.get_lora_parameters()", "fp16", True),
        (EACH.replace(".values()", ""), "self.manager.trainable_parameters()", "fp16", True),
        (
            EACH.replace("part.to(self.device, dtype=self.dtype)", "part.half()"),
            "self.manager.lora_params()",
            "fp16",
            True,
        ),
        (EACH, "self.manager.get_lora_parameters()", "amp", False),  # another value creates the scaler
        (EACH, "self.other.get_lora_parameters()", "fp16", False),
        (EACH, "self.manager.groups()", "fp16", False),
        (EACH.replace("dtype=self.dtype", "dtype=torch.float32"), "self.manager.get_lora_parameters()", "fp16", False),
        (
            EACH.replace("part.to", "if part.is_frozen:\n                part.to"),
            "self.manager.get_lora_parameters()",
            "fp16",
            False,
        ),
    ],
)
def test_modules_of_an_object_that_returns_their_parameters(cast, params, mode, expected):
    """A loop over the modules of an object casts what the optimizer gets from it; the setting may have other local names."""
    assert bool(findings(MANAGED.format(cast=cast, params=params, mode=mode), "HS160")) == expected
