"""Regions, dtypes and weights in the forms of real scripts: helper methods, sibling functions, models for evaluation alone."""

import pytest

from check_scripts import findings, reported
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection


def in_every_way(text: str) -> set[str]:
    """The codes that are reported for a file: by the rules, for single values of settings and in simulated runs."""
    document = read_document("train.py", text.encode(), "python")
    return {f.code for f in check_document(document, Settings(), Selection())}


QLORA = """\
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments
from trl import SFTTrainer

def load():
    bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.{train})
    return AutoModelForCausalLM.from_pretrained("a/b", quantization_config=bnb)

def train():
    model = load()
    trainer = SFTTrainer(model=model, args=TrainingArguments("out", bf16=True), train_dataset=data)
    trainer.train()
    return trainer.model

def main(zero_shot):
    if zero_shot:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
        model = AutoModelForCausalLM.from_pretrained("a/b", quantization_config=config)
    else:
        model = train()
    evaluate(model)
"""


def test_a_quantized_model_that_is_only_evaluated_computes_in_what_it_likes():
    """HS268 is about the 4-bit layers of the model that the Trainer trains, not of another one in the same file."""
    assert findings(QLORA.format(train="bfloat16"), "HS268") == []
    assert [f.line for f in findings(QLORA.format(train="float16"), "HS268")] == [6]


TIMED = """\
import time
import torch
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

def {name}(model_name):
    model = AutoModelForCausalLM.from_pretrained(model_name, torch_dtype=torch.{dtype})
    trainer = DPOTrainer(model=model, args=DPOConfig("out", bf16=True), train_dataset=data)
    start = time.time()
    trainer.train()
    return time.time() - start
"""


@pytest.mark.parametrize("name", ["run_timing_test", "sample_run", "run"])
def test_a_function_that_loads_and_trains_is_no_evaluation(name):
    """HS277 reads what a function does: `run_timing_test` loads a model and trains it."""
    assert [f.line for f in findings(TIMED.format(name=name, dtype="bfloat16"), "HS277")] == [7]
    assert findings(TIMED.format(name=name, dtype="float32"), "HS277") == []


MASKED = """\
import torch
from torch.nn.functional import cross_entropy

def reconstruction(logits, target, mask):
    if mask is None:
        return cross_entropy(logits.float(), target)
    each = cross_entropy(logits, target, reduction="none")
    return (each * mask).sum() / mask.sum()

for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = decoder(x)
    loss = reconstruction(logits, y, {mask})
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_loss_that_no_caller_reaches_is_silent():
    """HS154 reads a branch only if some caller passes what leads there."""
    assert findings(MASKED.format(mask="None"), "HS154") == []
    assert [f.line for f in findings(MASKED.format(mask="mask"), "HS154")] == [7]


HOLDER = """\
import torch

class Holder:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def compute_loss(self, x, y):
        with torch.autocast("cuda", dtype=torch.{dtype}):
            out = self.model(x)
        loss = ((out - y) ** 2).mean()
        return {{"total": loss, "mse": loss}}, {{"norm": out.norm()}}

    def optimizer_step(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train_step(self, x, y):
        losses, stats = self.compute_loss(x, y)
        self.optimizer_step(losses["total"])
        return losses, stats

    def train_epoch(self, loader):
        for x, y in loader:
            self.train_step(x, y)
"""


@pytest.mark.parametrize(("dtype", "code"), [("float32", "HS134"), ("bfloat16", "HS120"), ("float16", "")])
def test_one_method_computes_the_loss_and_its_caller_passes_it_to_another(dtype, code):
    """The region of a loss is found where the method with the backward receives the result of the one with the region."""
    assert reported(HOLDER.format(dtype=dtype)) & {"HS134", "HS120", "HS123"} == ({code} if code else set())


PRECISION = """\
import torch
from typing import NamedTuple

class Losses(NamedTuple):
    total: torch.Tensor
    parts: dict

class Precision:
    def __init__(self, name):
        self.name = name

    @property
    def dtype(self):
        match self.name:
            case "fp16" | "half":
                return torch.float16
            case "bf16":
                return torch.bfloat16
            case _:
                return torch.float32

    def autocast(self):
        return torch.autocast("cuda", dtype=self.dtype, enabled=self.name != "fp32")

    def make_scaler(self):
        return torch.amp.GradScaler("cuda", enabled={enabled})

class Trainer:
    def __init__(self, cfg, gen, disc):
        self.precision = Precision(cfg.precision)
        self.gen, self.disc = gen, disc
        self.opt_g = torch.optim.AdamW(gen.parameters())
        self.opt_d = torch.optim.AdamW(disc.parameters())
        self.scaler_g = self.precision.make_scaler()
        self.scaler_d = self.precision.make_scaler()

    def generator_loss(self, x):
        with self.precision.autocast():
            total = (self.gen(x) - x).abs().mean()
        return Losses(total, {{}})

    def discriminator_loss(self, x):
        with self.precision.autocast():
            return self.disc(x).mean() - self.disc(self.gen(x).detach()).mean()

    def step(self, x):
        losses = self.generator_loss(x)
        self.opt_g.zero_grad()
        self.scaler_g.scale(losses.total).backward()
        self.scaler_g.step(self.opt_g)
        self.scaler_g.update()
        self.opt_d.zero_grad()
        self.scaler_d.scale(self.discriminator_loss(x)).backward()
        self.scaler_d.step(self.opt_d)
        self.scaler_d.update()
"""


@pytest.mark.parametrize(
    ("enabled", "code"),
    [
        ('self.name != "fp32"', "HS120"),
        ('self.name in ("fp16", "bf16")', "HS120"),
        ("False", "HS123"),
        ('self.name in ("fp16", "half")', ""),
    ],
)
def test_one_object_chooses_dtype_and_scalers_by_a_match(enabled, code):
    """A class of precision settings with a `match`, whose method creates the scalers of two optimizers."""
    codes = in_every_way(PRECISION.format(enabled=enabled))
    assert codes & {"HS120", "HS123", "HS122", "HS134"} == ({code} if code else set())


AGENT = """\
import torch

class Agent:
    def __init__(self, actor, critic, use_amp=True):
        self.use_amp = use_amp
        self.actor, self.critic = actor, critic
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.actor_opt = torch.optim.Adam(actor.parameters())
        self.alpha_opt = torch.optim.Adam([self.log_alpha])
        self.scaler = torch.amp.GradScaler("cuda", enabled=use_amp)

    def update(self, obs):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.use_amp):
            action, logp = self.actor.sample(obs)
            loss = (logp - self.critic(obs, action)).mean()
        self.actor_opt.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.actor_opt)
        self.scaler.update()
        alpha_loss = -(self.log_alpha * (logp + 1.0){detach}).mean()
        self.alpha_opt.zero_grad()
        alpha_loss.backward()
        self.alpha_opt.step()

def main(actor, critic, buffer):
    agent = Agent(actor, critic)
    for obs in buffer:
        agent.update(obs)
"""


def test_a_loss_of_detached_values_needs_no_scale():
    """No gradient passes `detach`, so the temperature of SAC is not trained through the region; its flag is read there."""
    assert in_every_way(AGENT.format(detach=".detach()")) & {"HS123", "HS139"} == set()


SPREAD = """import torch
from torch.amp import GradScaler, autocast

def region(args):
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if OLD:
        return {{"enabled": args.amp, "dtype": dtype}}
    return {{"device_type": "cuda", "enabled": args.amp, "dtype": dtype}}

def train_one_epoch(model, loader, optimizer, args):
    if OLD:
        scaler = GradScaler(enabled={enabled})
    else:
        scaler = GradScaler("cuda", enabled={enabled})
    for x in loader:
        with autocast(**region(args)):
            loss = model(x).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

@torch.no_grad()
def evaluate(model, loader, args=None):
    model.eval()
    for x in loader:
        if {test}:
            with autocast(**region(args)):
                out = model(x)
        else:
            out = model(x)
"""


def test_a_region_whose_arguments_a_function_returns():
    """Its variables are those of that function; `args is not None and args.amp` is the flag of mixed precision."""
    text = SPREAD.format(enabled="args.amp", test="args is not None and args.amp")
    assert in_every_way(text) & {"HS120", "HS149"} == {"HS120"}
    other = text.replace("torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else ", "")
    assert in_every_way(other) & {"HS120", "HS149"} == set()


FLIPPED = """import torch
from monai.inferers import sliding_window_inference

def flipped(model, x):
    preds = []
    for axes in ([2], [3]):
        preds.append(torch.flip(sliding_window_inference(torch.flip(x, axes), (96,) * 3, 2, model), axes))
    return torch.stack(preds).mean(0)

def main(model, loader, val_loader):
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(100):
        model.train()
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        with torch.no_grad():
            for x, y in val_loader:
                if epoch % 10 == 0:
                    {flipped}
                else:
                    with torch.autocast("cuda", dtype=torch.float16):
                        out = sliding_window_inference(x, (96,) * 3, 4, model)
"""


def test_another_way_to_validate_is_no_branch_without_mixed_precision():
    """HS149: the branch that runs the model on several inputs has no region, unlike the other one; it is not that of float32."""
    plain = FLIPPED.format(flipped="out = flipped(model, x)")
    assert "HS149" in reported(plain)
    region = FLIPPED.format(flipped='with torch.autocast("cuda"):\n                        out = flipped(model, x)')
    assert "HS149" not in reported(region)


CONTINUED = """import torch

def train(model, optimizer, scaler, start, last):
    step = start
    while step < last:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(next(data)).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        step += 1
    return step

def main(path, model):
    start = 0
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    if path:
        state = torch.load(path)
        start = state.get("global_iter", 0)
        model.load_state_dict(state["model"])
        {load}
    step = train(model, optimizer, scaler, start=start, last=1000)
    torch.save({{"model": model.state_dict(), "scaler": scaler.state_dict(), "global_iter": step}}, "latest.pt")
"""


def test_a_loop_that_starts_at_a_parameter_continues_a_run():
    """HS171: the counter of a checkpoint reaches a `while` loop through a parameter of another function."""
    assert "HS171" in reported(CONTINUED.format(load="pass"))
    assert "HS171" not in reported(CONTINUED.format(load='scaler.load_state_dict(state["scaler"])'))


CONFIGURED = """import torch
from torch.cuda.amp import GradScaler, autocast

class CFG:
    apex = True
    epochs = 3

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.fc(x)

def train_fn(loader, model, criterion, optimizer):
    scaler = GradScaler(enabled=CFG.apex)
    for x, y in loader:
        {region}y_hat = model(x)
        loss = criterion(y_hat, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

model = Net()
train_fn(loader, model, criterion, torch.optim.AdamW(model.parameters()))
"""


def test_a_flag_named_apex_computes_nothing():
    """HS134: notebooks call the flag of mixed precision `CFG.apex`, which is not the package."""
    assert "HS134" in reported(CONFIGURED.format(region=""))
    assert "HS134" not in reported(CONFIGURED.format(region="with autocast(enabled=CFG.apex):\n            "))


def test_a_dtype_in_the_place_of_the_device():
    """HS142: `autocast(dtype)` raises, whatever variable the dtype comes from."""
    text = "import torch\nptdtype = {{'bf16': torch.bfloat16, 'fp16': torch.float16}}[name]\nctx = torch.amp.autocast({})\n"
    assert "HS142" in reported(text.format("ptdtype"))
    assert "HS142" not in reported(text.format("device_type, dtype=ptdtype"))


ENUM = """\
import enum
import torch

class Precision(enum.Enum):
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def torch_dtype(self):
        return {{Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}}[self]

class AmpMixin:
    def setup(self, precision):
        self.precision = Precision(precision)
        self.is_low = self.precision is not Precision.FP32
        self.scaler = torch.amp.GradScaler("cuda", enabled={enabled})

    def region(self):
        return torch.autocast("cuda", dtype=self.precision.torch_dtype, enabled=self.is_low)

class Trainer(AmpMixin):
    def __init__(self, model, optimizer, precision="bf16"):
        self.model, self.optimizer = model, optimizer
        self.setup(precision)

    def step(self, x):
        with self.region():
            loss = self.model(x).mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""


@pytest.mark.parametrize(
    ("enabled", "code"),
    [
        ("self.is_low", "HS120"),
        ("self.precision is Precision.BF16", "HS123"),
        ("self.precision is Precision.FP16", ""),
        ("self.precision == Precision.FP16", ""),
    ],
)
def test_an_enum_of_formats_is_read_as_their_names(enabled, code):
    """Members, conversions, tests by identity and a property of an enum: each run has one of its formats."""
    codes = in_every_way(ENUM.format(enabled=enabled)) & {"HS120", "HS123"}
    assert code in codes if code else not codes


DENOISED = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision=args.mixed_precision)
weight_dtype = torch.float32
if accelerator.mixed_precision == "bf16":
    weight_dtype = torch.bfloat16
for batch in loader:
    timesteps = torch.randint(0, 1000, (8,), device=batch.device)
    pred = unet(noisy, {timesteps}, cond).sample
    loss = torch.nn.functional.mse_loss(pred.float(), noise.float())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_timesteps_in_the_format_of_a_run():
    """HS611 is also checked for each value of a setting, as scripts of diffusers choose `weight_dtype` by one."""
    assert "HS611" in in_every_way(DENOISED.format(timesteps="timesteps.to(weight_dtype)"))
    assert "HS611" not in in_every_way(DENOISED.format(timesteps="timesteps"))
