"""HS149: the model as `self`, autocast of another file, and forwards that are not validation."""

import pytest

from check_scripts import findings


def reported(text):
    """The lines at which HS149 is reported."""
    return [f.line for f in findings(text, "HS149")]


OWN = """\
import torch
class Model(torch.nn.Module):
    def fit(self, loader):
        for x in loader:
            with torch.autocast('cuda', enabled=self.amp):
                loss = self.criterion({call}(x))
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
    def {name}(self, loader):
        self.eval()
        for x in loader:
            with torch.no_grad(){region}:
                out = {call}(x)
"""


@pytest.mark.parametrize(
    ("call", "name", "region", "expected"),
    [
        ("self.forward", "evaluate", "", [14]),
        ("self", "validate", "", [14]),
        ("self", "test_step", "", [14]),
        ("self.forward", "evaluate", ", torch.autocast('cuda')", []),
        ("self", "generate", "", []),
        ("self", "plot_examples", "", []),
    ],
)
def test_a_model_that_trains_itself_is_a_model(call, name, region, expected):
    """`self(x)` and `self.forward(x)` in a method are forwards of the model that the class is."""
    assert reported(OWN.format(call=call, name=name, region=region)) == expected


IMPORTED = """\
import torch
from project.device import {context}
def evaluate(model, loader):
    with torch.no_grad():
        for x in loader:
            {inner}
                out = model(x)
for x in loader:
    with {context}(device, precision):
        loss = model(x)
    loss.backward()
    optimizer.step()
evaluate(model, val_loader)
"""


@pytest.mark.parametrize(
    ("context", "inner", "expected"),
    [
        ("autocast_context", "if True:", [7]),
        ("get_autocast", "if True:", [7]),
        ("make_autocast_ctx", "if True:", [7]),
        ("autocast_context", "with autocast_context(device, precision):", []),
        ("get_context", "if True:", []),  # unknown
    ],
)
def test_an_autocast_helper_of_another_file_is_autocast(context, inner, expected):
    """A context that is named for autocast is one, wherever it is written."""
    assert reported(IMPORTED.format(context=context, inner=inner)) == expected


TRAIN = """\
import torch
def train(model):
    for x in loader:
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x)
        loss.backward()
        optimizer.step()
model = Net()
train(model)
"""
PREDICT = """\
@torch.no_grad()
def predict(model, x):
    for view in views:
        out = model(view(x))
def run():
    {model}
    predict({name}, x)
run()
"""


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        ("model = Net(); model.load_state_dict(torch.load(path))", "model", []),
        ("best = Net()", "best", []),
        ("pass", "model", [13]),
    ],
)
def test_a_model_that_inference_creates_is_not_the_trained_one(model, name, expected):
    """A function that loads a model for predictions passes another object to its helpers than training has."""
    assert reported(TRAIN + PREDICT.format(model=model, name=name)) == expected


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        ("axes[i].imshow(overlay)", []),
        ("overlay = explain.gradcam_overlay(model, x)", []),
        ("save_image(x, path)", []),
        ("losses.append(p)", [12]),
        ("correct += (p > 0).sum()", [12]),
    ],
)
def test_pictures_of_some_examples_are_no_validation(draw, expected):
    """A loop that draws each of its results needs no autocast."""
    loop = f"for i, x in enumerate(examples):\n    with torch.no_grad():\n        p = model(x)\n    {draw}\n"
    assert reported(TRAIN + loop) == expected


METHOD = """\
import torch
for x in loader:
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = {model}(x)
    loss.backward()
    optimizer.step()
def {name}({model}, {data}):
    {model}.eval()
    with torch.no_grad():
        for x in {data}:
            out = {call}(x)
"""


@pytest.mark.parametrize(
    ("model", "name", "data", "call", "expected"),
    [
        ("model", "test_accuracy", "test_loader", "model.generate", [11]),
        ("model", "evaluate", "loader", "model.predict_all_targets", [11]),
        ("model", "rollout", "prompts", "model.generate", []),
        ("encoder", "embed", "gallery_loader", "encoder", [11]),
        ("generator", "show", "noises", "generator", []),
        ("model_train_eval", "fit_one_epoch", "gen_val", "model_train_eval", [11]),
    ],
)
def test_methods_and_other_models(model, name, data, call, expected):
    """Methods of the model count in validation, and any model that goes through a data loader without gradients."""
    assert reported(METHOD.format(model=model, name=name, data=data, call=call)) == expected


@pytest.mark.parametrize(
    "validation",
    [
        "test_questions = ['a', 'b']\nwith torch.no_grad():\n    for q in test_questions:\n        out = model.generate(encode(q))\n",
        "model.eval()\nwith torch.no_grad():\n    probe = model(dummy_input).mean()\n",
    ],
)
def test_prompts_and_dummies_are_not_validation(validation):
    """A few texts of the script itself, and a forward for its output's shape."""
    assert reported(TRAINED.format(before="", after=validation)) == []
    real = validation.replace("['a', 'b']", "load()").replace("dummy_input", "valid[0]")
    assert reported(TRAINED.format(before="", after=real)) != []


TRAINED = """\
import torch
{before}
for epoch in range(9):
    for x in loader:
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x)
        loss.backward()
        optimizer.step()
{after}
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "    with torch.no_grad():\n        out = model(x)\n", [10]),
        (
            "",
            "    if epoch % 5 == 0:\n        with torch.no_grad():\n            out = model(x)\n        board.add_images('p', out)\n",
            [],
        ),
        ("", "while x.size(1) < 30:\n    with torch.no_grad():\n        x = torch.multinomial(model(x), 1)\n", []),
        (
            "class Net(torch.nn.Module):\n    @torch.autocast('cuda', dtype=torch.bfloat16)\n    def forward(self, x):\n        return x\n",
            "    with torch.no_grad():\n        out = model(x)\n",
            [],
        ),
        (
            "class Net(torch.nn.Module):\n    def forward(self, x):\n        return x\n",
            "    with torch.no_grad():\n        out = model(x)\n",
            [13],
        ),
    ],
)
def test_pictures_samples_and_models_with_their_own_region(before, after, expected):
    """Examples that are drawn, sampled tokens and a model whose forward opens the region are no validation in float32."""
    assert reported(TRAINED.format(before=before, after=after)) == expected


LOOKED = """\
import torch
def train(model, loader, optimizer, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast('cuda', dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
def look(model, psnr_model, loader, writer):
    with torch.no_grad():
        x, y = next(iter(loader))
        {forward}
def main():
    for epoch in range(9):
        train(model, loader, optimizer, scaler)
        look(model, psnr_model, loader, writer)
"""


@pytest.mark.parametrize(
    ("forward", "lines"),
    [
        ("out = model(x)", [13]),
        ("out = model(x)\n        wandb.log({'p': wandb.Image(out)})", []),
        ("out = model(x)\n        writer.add_image('p', out)", []),
        ("for x, y in loader:\n            out = model(x)\n            wandb.log({'p': wandb.Image(out)})", [14]),
        ("out = psnr_model(x, y)", []),
        ("probe_dummy = x[:1]\n        out = model(probe_dummy)", []),
        ("probe = torch.zeros(1, 3, 8, 8).to(device)\n        out = model(probe)", []),
        ("out = model(torch.rand(2, 4))", []),
        ("probe = torch.zeros(1, 3) + x\n        out = model(probe)", [14]),
        ("out = model(x)\n        print('shape', out.shape, out.dtype)", []),
        ("width = model(x).size(-1)", []),
        ("out = model(x)\n        print(out.shape, out.mean())", [13]),
        ("out = model(x)\n        width = out.shape[1]\n        loss = loss_fn(out, y)", [13]),
    ],
)
def test_pictures_metrics_and_made_up_inputs_are_no_validation(forward, lines):
    """A batch that is drawn, a metric that is called a model, and inputs and results that only show a shape need no autocast."""
    assert reported(LOOKED.format(forward=forward)) == lines


FLOAT8 = """\
import torch
import transformer_engine.pytorch as te
@torch.no_grad()
def evaluate(model, loader, config):
    model.eval()
    for x in loader:
        if config.use_fp8:
            with te.{context}(enabled=True):
                loss = model(x)
        else:
            loss = model(x)
model = model.to(torch.bfloat16)
for x in loader:
    if config.use_fp8 and step > config.warmup:
        with te.{context}(enabled=True):
            loss = model(x)
    else:
        loss = model(x)
    loss.backward()
    optimizer.step()
evaluate(model, val_loader, config)
"""


@pytest.mark.parametrize("context", ["fp8_autocast", "autocast"])
def test_float8_products_are_not_torchs_autocast(context):
    """Outside Transformer Engine's region a model computes in the format of its weights."""
    assert reported(FLOAT8.format(context=context)) == []


SWITCHED = """\
import torch
def compute_loss(model, x, is_training):
    with torch.set_grad_enabled({mode}):
        loss = model(x)
    return loss
def validate(model, loader):
    model.eval()
    for x in loader:
        loss = compute_loss(model, x, is_training={flag})
def train(model, loader):
    for x in loader:
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = compute_loss(model, x, is_training=True)
        loss.backward()
        optimizer.step()
    {validation}validate(model, valid)
"""


@pytest.mark.parametrize(
    ("mode", "flag", "validation", "expected"),
    [
        ("is_training", "False", "", [9]),
        ("mode=is_training", "False", "", [9]),
        ("is_training", "True", "", []),
        ("other", "False", "", []),
        ("is_training", "False", "with torch.autocast('cuda', dtype=torch.bfloat16): ", []),
    ],
)
def test_the_callers_literal_switches_gradients_off(mode, flag, validation, expected):
    """`set_grad_enabled(is_training)` in a helper of both phases is `no_grad` where the caller passes False."""
    assert reported(SWITCHED.format(mode=mode, flag=flag, validation=validation)) == expected


def test_a_switch_as_a_statement_follows_the_caller_too():
    """`torch.set_grad_enabled(is_training)` turns gradients off for the rest of the helper."""
    text = SWITCHED.format(mode="is_training", flag="False", validation="")
    block = "    with torch.set_grad_enabled(is_training):\n        loss"
    assert reported(text.replace(block, "    torch.set_grad_enabled(is_training)\n    loss")) == [9]


WRAPPED = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def train(model, loader):
    {parallel} = {create}(model)
    for x in loader:
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = {parallel}(x)
        loss.backward()
        optimizer.step()
def validate(model, loader):
    with torch.no_grad():
        for x in loader:
            loss = model(x)
"""


@pytest.mark.parametrize(("create", "expected"), [("DDP", [13]), ("make_criterion", [])])
def test_a_wrapped_model_is_a_model_under_any_name(create, expected):
    """What DistributedDataParallel returns is called like the model; a variable of unknown origin is not."""
    assert reported(WRAPPED.format(parallel="model_distributed", create=create)) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [("...", [15]), ("raise NotImplementedError", [15]), ("pass", [15]), ("return x.mean()", [])],
)
def test_an_abstract_forward_is_one_of_a_subclass(body, expected):
    """A base class trains and validates with the `forward` that its subclasses define."""
    text = f"""\
import torch
class Base:
    def forward(self, x):
        {body}
    def train_epoch(self, loader):
        for x in loader:
            with torch.autocast('cuda', dtype=torch.bfloat16):
                loss = self.forward(x)
            loss.backward()
            self.optimizer.step()
    def validate_epoch(self, loader):
        self.model.eval()
        with torch.no_grad():
            for x in loader:
                loss = self.forward(x)
"""
    assert reported(text) == expected


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("with torch.no_grad():\n    model(x)\n", []),
        ("with torch.no_grad():\n    out = model(x)\n", [10]),
        ("wave = torch.randn(2, 16000)\nmel = transform(wave)\nwith torch.no_grad():\n    out = model(mel)\n", []),
        ("wave = load(path)\nmel = transform(wave)\nwith torch.no_grad():\n    out = model(mel)\n", [12]),
    ],
)
def test_a_forward_that_measures_nothing(after, expected):
    """A result that is dropped, and transformed inputs that were made up, are no validation."""
    assert reported(TRAINED.format(before="", after=after)) == expected


STEP = """\
import torch
def observe(model, x):
    return model(x)
def train_model(model, x):
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    optimizer.step()
def train_actor(model, actor, x):
    model.eval()
    with torch.no_grad():
        state = observe(model, x)
    loss = actor(state)
    {last}
"""


def test_a_forward_in_a_training_step_is_not_validation():
    """A function without a loop that ends with a backward is one step, whichever frozen models it runs."""
    assert reported(STEP.format(last="loss.backward()")) == []
    assert reported(STEP.format(last="print(loss)")) == [3]


BRANCHES = """\
import torch
def run(mode, model, {head}, loader, valid):
    if mode == 'patch':
        for x in loader:
            with torch.autocast('cuda', dtype=torch.bfloat16):
                loss = model(x)
            loss.backward()
        with torch.no_grad(), torch.autocast('cuda', dtype=torch.bfloat16):
            for x in valid:
                out = model(x)
    else:
        for x in loader:
            with {region}:
                loss = {head}(x)
            loss.backward()
        with torch.no_grad():
            for x in valid:
                out = {head}(x)
head.eval()
"""


def test_each_mode_of_a_script_has_its_own_validation():
    """The branch of another mode is not the one without mixed precision, if its training runs under autocast."""
    low, full = "torch.autocast('cuda', dtype=torch.bfloat16)", "torch.enable_grad()"
    assert reported(BRANCHES.format(head="head", region=low)) == [18]
    assert reported(BRANCHES.format(head="head", region=full)) == []


def test_a_condition_of_training_too_does_not_turn_autocast_off():
    """An early exit without CUDA stands before training and validation alike."""
    guard = "if device.type == 'cuda' and not torch.cuda.is_available():\n    raise SystemExit\n"
    after = "with torch.no_grad():\n    for x in valid:\n        out = model(x)\n"
    assert reported(TRAINED.format(before=guard.strip(), after=after)) == [12]


ROLLOUT = """\
import torch
for x in loader:
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    optimizer.step()
for x in loader:
    for t in {times}:
        with torch.no_grad():
            state = model(x)
    loss = actor(state)
    {last}
"""


@pytest.mark.parametrize(
    ("times", "last", "expected"),
    [
        ("range(horizon)", "loss.backward()", []),
        ("range(horizon)", "print(loss)", [10]),
        ("valid", "loss.backward()", [10]),
    ],
)
def test_a_rollout_belongs_to_its_training_step(times, last, expected):
    """A loop over a number before a backward is part of the step, a loop over data is not."""
    assert reported(ROLLOUT.format(times=times, last=last)) == expected


AUTOENCODER = """\
import torch
def evaluate():
    {model}.eval()
    with torch.no_grad():
        for x in valid_loader:
            {context}
                latents = {model}.encode(x).latent_dist.mode()
                losses.append(loss_fn({model}.decode(latents).sample, x))
scaler = torch.amp.GradScaler('cuda')
for x in loader:
    optimizer.zero_grad()
    with torch.autocast('cuda', dtype=torch.float16):
        latents = vae.encode(x).latent_dist.sample()
        loss = loss_fn(vae.decode(latents).sample, x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
vae.eval()
evaluate()
"""


@pytest.mark.parametrize(
    ("model", "context", "expected"),
    [
        ("vae", "if True:", [7]),
        ("vae", "with torch.autocast('cuda', dtype=torch.float16):", []),
        ("tokenizer", "if True:", []),  # another model
    ],
)
def test_an_autoencoder_runs_by_encode_and_decode(model, context, expected):
    """A model without a call of its own is trained and validated by its two halves."""
    text = AUTOENCODER.format(model=model, context=context)
    assert [f.line for f in findings(text, "HS149")] == expected


IMAGES = """\
import torch
def fit(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x)
        loss.backward()
        optimizer.step()
def {name}(model, loader):
    model.eval()
    for x in loader:
        with torch.no_grad():
            out = model(x)
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [("validate", [13]), ("write_heatmaps", []), ("draw_examples", []), ("_render_views", [])],
)
def test_images_are_no_validation(name, expected):
    """A function that runs the model for images is not timed or compared like validation."""
    assert reported(IMAGES.format(name=name)) == expected


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("x, _ = next(iter(loader))\nwith torch.no_grad():\n    out = model(x)\nprint('shape:', out.shape)\n", []),
        ("with torch.no_grad():\n    out = model(x)\nprint(out['mask'].size(1), out['mask'].dtype)\n", []),
        ("with torch.no_grad():\n    print(model(x).shape)\n", []),
        ("with torch.no_grad():\n    a, b = model(x)\nprint(a.shape, b.shape)\n", []),
        ("with torch.no_grad():\n    out = model(x)\nprint(out.shape, out.mean())\n", [10]),
        ("with torch.no_grad():\n    out = model(x)\nprint(out.argmax(1).shape[0], out[0])\n", [10]),
        ("with torch.no_grad():\n    out = model(x)\n", [10]),
    ],
)
def test_a_forward_for_the_shape_of_its_result(after, expected):
    """What only prints a shape before training starts is no validation."""
    assert reported(TRAINED.format(before="", after=after)) == expected


OFF = """\
import torch
def train(model, loader, optimizer, scaler=None):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast('cuda', dtype=torch.float16, enabled=scaler is not None):
            loss = loss_fn(model(x), y)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
def validate(model, valid):
    with torch.no_grad():
        for x, y in valid:
            out = model(x)
for epoch in range(9):
    train(model, loader, optimizer{passed})
    validate(model, valid)
"""


@pytest.mark.parametrize(
    ("passed", "expected"),
    [
        ("", []),
        (", None", []),
        (", scaler=None", []),
        (", scaler", [17]),
        (", scaler=make_scaler()", [17]),
        (", **options", [17]),
        (")\n    train(model, loader, optimizer, scaler", [17]),
    ],
)
def test_training_without_a_scaler_is_in_float32_too(passed, expected):
    """`enabled=scaler is not None` is off where every call leaves out the scaler."""
    assert reported(OFF.format(passed=passed)) == expected


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("# * Always sample in float32 for stability.", []),
        ("# We validate in full precision, like the paper", []),
        ("# No autocast here: the metric needs float32", []),
        ("# score in float32", [11]),
        ("# run the model, then compute the loss", [11]),
    ],
)
def test_a_comment_says_that_validation_is_in_float32(comment, expected):
    """What is in float32 by choice needs no advice; a comment about something else is no choice."""
    after = f"with torch.no_grad():\n    {comment}\n    out = model(x)\n"
    assert reported(TRAINED.format(before="", after=after)) == expected


LOADED = """\
import torch
from transformers import AutoModelForCausalLM
def load(path):
    model = AutoModelForCausalLM.from_pretrained(path{dtype}).to(device)
    return model, 0
@torch.inference_mode()
def evaluate(model, loader):
    model.eval()
    for batch in loader:
        out = model.{method}(input_ids=batch)
def train():
    model, _ = load(name)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in train_loader:
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(batch).loss
        loss.backward()
        optimizer.step()
    evaluate(model, val_loader)
train()
evaluate(load(checkpoint)[0], val_loader)
"""


@pytest.mark.parametrize(
    ("dtype", "method", "expected"),
    [
        (", dtype=torch.bfloat16", "generate", []),
        (", torch_dtype=torch.float16", "predict", []),
        (", dtype=torch.float32", "generate", [10]),
        (", torch_dtype=torch.float32", "predict", [10]),
    ],
)
def test_a_method_of_a_model_that_is_loaded_in_16_bits(dtype, method, expected):
    """Weights of 16 bits compute in 16 bits without autocast too, also by `generate` in a function that receives the model."""
    assert reported(LOADED.format(dtype=dtype, method=method)) == expected
