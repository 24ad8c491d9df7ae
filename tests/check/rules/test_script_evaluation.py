"""HS137: an evaluation that halves the model it was passed."""

import pytest

from check_scripts import findings

ENGINE = """\
import torch
def train_one_epoch(model, loader, optimizer):
    for x in loader:
        model(x).backward()
        optimizer.step()
def {name}(model, loader, args=None):
    model.eval()
{body}
"""


@pytest.mark.parametrize(
    ("name", "body", "count"),
    [
        ("evaluate", "    if args.fp16_eval:\n        model.half()", 1),
        ("validate", "    model = model.to(torch.bfloat16)", 1),
        ("evaluate", "    model = model.half()\n    run(model)\n    model.float()", 1),
        ("log_validation", "    model.half()", 1),
        ("evaluate", "    if flag == torch.float16:\n        model.half()", 1),
        (
            "evaluate",
            "    dtype = model.head.weight.dtype\n    model.float()\n    if dtype == torch.float16:\n        model.half()",
            0,
        ),
        (
            "evaluate",
            "    was_half = next(model.parameters()).dtype == torch.half\n    model.float()\n    if was_half:\n        model.half()",
            0,
        ),
        ("evaluate", "    model = copy.deepcopy(model)\n    model.half()", 0),
        ("evaluate", "    x = x.half()", 0),
        ("export", "    model.half()", 0),
    ],
)
def test_a_cast_of_the_callers_model_is_reported(name, body, count):
    """The module itself changes, so the training that follows has 16-bit weights, or rounded ones after a cast back; copies are fine."""
    assert len(findings(ENGINE.format(name=name, body=body), "HS137")) == count


def test_a_file_without_training_is_silent():
    """An evaluation script may keep its own model in 16 bits."""
    text = ENGINE.format(name="evaluate", body="    model.half()").replace("model(x).backward()", "model(x)")
    assert findings(text, "HS137") == []


@pytest.mark.parametrize(("cast", "count"), [("self.net.half()", 1), ("self.ema.half()", 0), ("self.vae.half()", 0)])
def test_the_trained_attribute_of_a_trainer_is_reported(cast, count):
    """`validate` of the class that trains `self.net` changes that module; a copy and a frozen part may have 16 bits."""
    text = f"""\
import torch
class Trainer:
    def __init__(self, net, ema, vae):
        self.net, self.ema, self.vae = net, ema, vae
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
    def fit(self, loader):
        for x in loader:
            self.net(x, self.vae).backward()
            self.optimizer.step()
        self.validate(loader)
    def validate(self, loader):
        {cast}
"""
    assert len(findings(text, "HS137")) == count


@pytest.mark.parametrize(
    ("caller", "count"),
    [
        ("evaluate(model, loader)", 1),
        ("evaluate(ema.module, loader)", 0),
        ("evaluate(copy.deepcopy(model), loader)", 0),
    ],
)
def test_what_the_callers_pass_decides(caller, count):
    """A copy that the loop passes may be halved."""
    text = ENGINE.format(name="evaluate", body="    model.half()") + f"def main(model, ema, loader):\n    {caller}\n"
    assert len(findings(text, "HS137")) == count


def test_trained_parameters_that_are_upcast_after_a_pipeline_were_lowered():
    """diffusers' cast_training_params at the end of a validation shows that a cast of the pipeline reached them."""
    text = """\
from diffusers.training_utils import cast_training_params
class Trainer:
    def fit(self, loader):
        for x in loader:
            self.accelerator.backward(self.net(x))
            self.optimizer.step()
    def validate(self):
        pipe = self.build_pipeline()
        pipe = pipe.to(dtype=self.state.weight_dtype)
        pipe()
        cast_training_params([self.net], dtype=torch.float32)
"""
    assert [f.line for f in findings(text, "HS137")] == [9]
    assert findings(text.replace("float32", "bfloat16"), "HS137") == []


GENERATED = """\
import torch
from trl.models import unwrap_model_for_generation
class Rollouts({base}):
    def {method}(self, model, inputs):
        return self.loss(model, inputs)
    def _generate(self, prompts):
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator) as unwrapped, torch.no_grad():
            if self.args.bf16:
                {cast}
            elif self.args.fp16:
                unwrapped.half()
            return unwrapped.generate(prompts)
"""


@pytest.mark.parametrize(
    ("method", "cast", "lines"),
    [
        ("compute_loss", "unwrapped.to(torch.bfloat16)", [9]),
        ("score", "unwrapped.to(torch.bfloat16)", []),
        ("compute_loss", "prompts.to(torch.bfloat16)", [11]),
    ],
)
def test_the_unwrapped_model_of_a_trainer_is_the_one_in_training(method, cast, lines):
    """TRL's context returns the module itself: a cast inside it stays after the rollout, and is reported once per function."""
    text = GENERATED.format(base="BaseTrainer", method=method, cast=cast)
    assert [f.line for f in findings(text, "HS137")] == lines


SHARED = """\
import torch
from diffusers import FluxPipeline
from diffusers.training_utils import cast_training_params
def log_validation(pipeline, accelerator, torch_dtype):
    pipeline = pipeline.to(accelerator.device{dtype})
    return pipeline("a dog").images
def main(args, accelerator, transformer, loader, optimizer):
    dtype = torch.float16 if args.mixed_precision == "fp16" else torch.bfloat16
    transformer.to(accelerator.device, dtype=dtype)
    {upcast}
    for epoch in range(args.epochs):
        for x in loader:
            loss = transformer(x).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        pipeline = FluxPipeline.from_pretrained(args.path, transformer={model}, torch_dtype=dtype)
        log_validation({passed})
        {after}
"""
UPCAST = "cast_training_params([transformer], dtype=torch.float32)"
TRAINED = "accelerator.unwrap_model(transformer)"
PASSED = "pipeline=pipeline, accelerator=accelerator, torch_dtype=dtype"


@pytest.mark.parametrize(
    ("dtype", "upcast", "model", "passed", "after", "expected"),
    [
        (", dtype=torch_dtype", UPCAST, TRAINED, PASSED, "pass", [5]),
        (", dtype=torch_dtype", f"models = [transformer]\n    {UPCAST}", "transformer", PASSED, "pass", [5]),
        (", dtype=torch_dtype", UPCAST, TRAINED, "pipeline, accelerator, dtype", "pass", [5]),
        ("", UPCAST, TRAINED, PASSED, "pass", []),
        (", dtype=torch_dtype", "pass", TRAINED, PASSED, "pass", []),  # the weights have 16 bits already: HS151
        (", dtype=torch_dtype", UPCAST, "load_again(args.path)", PASSED, "pass", []),
        (", dtype=torch_dtype", UPCAST, TRAINED, PASSED, UPCAST, []),  # cast back after each validation
    ],
)
def test_a_pipeline_shares_the_model_in_training(dtype, upcast, model, passed, after, expected):
    """A cast of the pipeline casts the weights that the training has cast to float32."""
    text = SHARED.format(dtype=dtype, upcast=upcast, model=model, passed=passed, after=after)
    assert [f.line for f in findings(text, "HS137")] == expected


def test_a_pipeline_that_the_loop_casts_itself():
    """The cast may be in the loop, without a function; after the loop it is for the final images."""
    inner = SHARED.format(dtype="", upcast=UPCAST, model=TRAINED, passed=PASSED, after="pipeline.to(dtype)")
    assert [f.line for f in findings(inner, "HS137")] == [19]
    final = inner.replace("        pipeline.to(dtype)", "    pipeline.to(dtype)")
    assert findings(final, "HS137") == []


IN_LOOP = """\
import copy
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16")
{setup}
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
for epoch in range(num_epochs):
    for x in loader:
        optimizer.zero_grad()
        accelerator.backward(unet(x))
        optimizer.step()
    {validate}
"""


@pytest.mark.parametrize(
    ("validate", "count"),
    [
        ("accelerator.unwrap_model(unet).half().save_pretrained('out')", 1),
        ("model = accelerator.unwrap_model(unet)\n    model.to('cuda', dtype=torch.float16)\n    sample(model)", 1),
        ("if epoch % 5 == 0:\n        sample(unet.half())\n        unet.float()", 1),
        ("model = copy.deepcopy(accelerator.unwrap_model(unet))\n    model.half()", 0),
        ("if epoch == num_epochs - 1:\n        unet.half()", 0),
        ("if enough:\n        torch.save(unet.half(), 'out')\n        break", 0),
        ("vae.half()\n    images = images.to(torch.float16)", 0),
    ],
)
def test_a_cast_inside_the_training_loop(validate, count):
    """Of the model itself under any name; copies, other modules, tensors and the end of the training are fine."""
    assert len(findings(IN_LOOP.format(setup="unet = Net()", validate=validate), "HS137")) == count


def test_a_cast_of_a_model_that_has_16_bits_anyway_is_silent():
    """Nothing changes in the loop; HS151, HS161 or HS199 reports the first cast."""
    text = IN_LOOP.format(setup="unet = Net().half()", validate="unet.half()")
    assert findings(text, "HS137") == []


FOREIGN = """\
import copy
import torch
from factory import make_model, make_optimizer
def train(cfg, loader):
    model = make_model(cfg)
    optimizer = make_optimizer(model, cfg)
    for epoch in range(cfg.epochs):
        {start}
        model.train()
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        {end}
"""


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        ("pass", "model = model.half().float()", [16]),
        ("pass", "model.half().float()\n        run_eval(model)", [16]),
        ("pass", "if cfg.low:\n            model.to(torch.bfloat16).to(torch.float32)", [17]),
        ("pass", "model.half()\n        run_eval(model)\n        model.float()", [16]),
        # Another optimizer may want these weights; a copy, a new model of each fold and the end change nothing.
        ("pass", "model.half()", []),
        ("pass", "best = copy.deepcopy(model).half().float()", []),
        ("model = make_model(cfg).half().float()", "pass", []),
        ("pass", "if epoch == cfg.epochs - 1:\n            model = model.half().float()", []),
        ("pass", "teacher.half().float()", []),
        ("pass", "model = model.float()", []),
    ],
)
def test_a_model_whose_optimizer_another_file_creates(start, end, expected):
    """A cast to 16 bits and back shows that the loop trains float32 weights, which it rounds."""
    assert [f.line for f in findings(FOREIGN.format(start=start, end=end), "HS137")] == expected


NAMELESS = """\
import torch
from torch.utils.data import DataLoader
def lerne(netz, daten, opt, scaler):
    netz.train()
    for x, y in daten:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(netz(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
def pruefe(netz, daten):
    netz.eval()
    with torch.no_grad():
        for x, y in daten:
            measure(netz(x), y)
netz = torch.nn.Linear(4, 4).cuda()
opt = torch.optim.AdamW(netz.parameters())
lerne(netz, DataLoader(one, 8), opt, torch.amp.GradScaler("cuda"))
other = {source}
pruefe(netz, other)
"""


@pytest.mark.parametrize(("source", "expected"), [("DataLoader(two, 8)", 1), ("[noise() for _ in range(9)]", 0)])
def test_what_creates_a_loader_shows_a_validation(source, expected):
    """A loop over a DataLoader validates, whatever the names of the function, the model and the loader are."""
    assert len(findings(NAMELESS.format(source=source), "HS149")) == expected
