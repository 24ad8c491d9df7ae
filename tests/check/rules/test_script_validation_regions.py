"""HS149: regions that are off for validation, library functions that run the model, and contexts that are not autocast."""

import json

import pytest

from check_scripts import findings
from halfstep.check.files.document import read_document
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings


def reported(text):
    """The lines at which HS149 is reported."""
    return [f.line for f in findings(text, "HS149")]


SHARED = """\
import torch
scaler = torch.amp.GradScaler('cuda')
def epoch(model, loader, optimizer, train):
    model.train(train)
    for x in loader:
        use = {use}
        with {region}:
            loss = model(x)
        if train:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
"""


@pytest.mark.parametrize(
    ("use", "region", "expected"),
    [
        ("amp and train", "torch.autocast('cuda', enabled=use)", [7]),
        ("amp", "torch.autocast('cuda', enabled=use and train)", [7]),
        ("amp", "torch.autocast('cuda') if amp and train else nullcontext()", [7]),
        ("amp", "torch.autocast('cuda', enabled=amp and model.training)", [7]),
        ("amp", "torch.autocast('cuda', enabled=amp and phase == 'train')", [7]),
        ("amp", "torch.autocast('cuda', enabled=amp and not is_eval)", [7]),
        ("amp if train else False", "torch.autocast('cuda', enabled=use)", [6]),
        ("False if is_eval else amp", "torch.autocast('cuda', enabled=use)", [6]),
        ("amp", "torch.autocast('cuda', enabled=amp if train else False)", [7]),
        ("amp if cuda else False", "torch.autocast('cuda', enabled=use)", []),
        ("amp if train else amp_eval", "torch.autocast('cuda', enabled=use)", []),
        ("amp", "torch.autocast('cuda', enabled=use)", []),
        ("amp", "torch.autocast('cuda', enabled=amp and trainable)", []),
    ],
)
def test_a_region_that_only_training_enters_is_reported(use, region, expected):
    """A loop for both phases whose region depends on the phase validates in float32."""
    assert reported(SHARED.format(use=use, region=region)) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("if train:", "    use = amp", "else:", "    use = False"), [9]),
        (("use = False", "if train:", "    use = amp"), [6]),
        (("if not is_eval and amp:", "    use = True", "else:", "    use = False"), [9]),
        (("if not train:", "    use = False", "else:", "    use = amp"), [7]),
        (("if is_eval:", "    use = False", "else:", "    use = amp"), [7]),
        (("if cuda:", "    use = amp", "else:", "    use = False"), []),
        (("use = amp", "if train:", "    use = True"), []),
        (("use = False", "if train:", "    use = amp", "elif evaluate_low:", "    use = True"), []),
    ],
)
def test_a_flag_that_is_assigned_by_phase_is_reported(lines, expected):
    """The flag is false wherever the model does not train, however it is assigned."""
    text = SHARED.format(use="@", region="torch.autocast('cuda', enabled=use)")
    block = "\n".join(f"        {line}" for line in lines)
    assert reported(text.replace("        use = @", block)) == expected


VALIDATED = """\
import torch
from monai.inferers import SlidingWindowInferer, sliding_window_inference
inferer, inferer_test = SlidingWindowInferer(size), partial(sliding_window_inference, roi_size=size, predictor=model)
def train(model, loader, optimizer, scaler):
    for x in loader:
        with torch.autocast('cuda'):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
@torch.no_grad()
def {name}(model, loader):
    for x in loader:
        with {region}:
            out = {call}
"""


@pytest.mark.parametrize(
    ("name", "region", "call", "expected"),
    [
        ("evaluate", "torch.autocast('cuda', enabled=False)", "model(x)", [15]),
        ("evaluate", "torch.cuda.amp.autocast(enabled=False)", "model(x)", [15]),
        ("evaluate", "torch.autocast('cuda', enabled=False), torch.autocast('cpu', enabled=amp)", "model(x)", []),
        ("evaluate", "torch.autocast('cuda', enabled=amp)", "model(x)", []),
        ("encode", "torch.autocast('cuda', enabled=False)", "model(x)", []),
        ("evaluate", "tqdm(x)", "sliding_window_inference(x, size, 4, model)", [15]),
        ("evaluate", "tqdm(x)", "sliding_window_inference(inputs=x, roi_size=size, predictor=model)", [15]),
        ("evaluate", "tqdm(x)", "inferer(x, model)", [15]),
        ("calibrate_ranges", "tqdm(x)", "inferer(x, model)", []),
        ("evaluate", "tqdm(x)", "inferer(inputs=x, network=model)", [15]),
        ("evaluate", "tqdm(x)", "SlidingWindowInferer(size)(x, model)", [15]),
        ("evaluate", "tqdm(x)", "inferer_test(x)", [15]),
        ("evaluate", "torch.autocast('cuda')", "inferer(x, model)", []),
        ("evaluate", "tqdm(x)", "inferer(x, compute)", []),
        ("evaluate", "tqdm(x)", "SlidingWindowInferer(x, model)", []),
        ("evaluate", "ema.average_parameters()", "model(x)", [15]),
        ("evaluate", "gpu_safe_context(0.9)", "model(x)", [15]),
        ("evaluate", "precision_context()", "model(x)", []),
    ],
)
def test_validation_through_a_library_or_with_autocast_off(name, region, call, expected):
    """A sliding window runs the model it is passed; `enabled=False` around its forward is validation in float32, a flag is a choice."""
    assert reported(VALIDATED.format(name=name, region=region, call=call)) == expected


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ("torch.autocast('cuda', enabled=False):", [15]),
        ("torch.autocast('cuda', enabled=False):  # one batch at a time", [15]),
        ("torch.autocast('cuda', enabled=False):  # fp32 for stable metrics", []),
        ("torch.autocast('cuda'), torch.autocast('cuda', enabled=False):", []),
        (
            "torch.autocast('cuda'):\n            first = model(x)\n        with torch.autocast('cuda', enabled=False):",
            [],
        ),
    ],
)
def test_a_reason_for_validation_without_autocast(context, expected):
    """A comment gives one, and so does a region that is on around a forward or next to it: then only a part needs float32."""
    assert reported(VALIDATED.format(name="evaluate", region="A", call="model(x)").replace("A:", context)) == expected


TRAINING = VALIDATED[: VALIDATED.index("@torch")]


@pytest.mark.parametrize(("last", "expected"), [("plt.imshow(out)", []), ("metric(out)", [3])])
def test_one_picture_of_a_notebook_is_no_validation(last, expected):
    """A cell that draws what the model returns shows an example."""
    cells = [TRAINING, f"model.eval()\nwith torch.no_grad():\n    out = model(x)\n{last}\n"]
    data = json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}).encode()
    document = read_document("train.ipynb", data, "notebook")
    found = check_document(document, Settings(), Selection())
    assert [f.line for f in found if f.code == "HS149"] == expected


PHASES = """\
import torch
scaler = torch.amp.GradScaler("cuda")
class Trainer:
    def process(self, batch):
        {choice}
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
            batch.update(self.model.{call}(**batch))
            loss = batch["loss"]
        if self.is_train:
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
"""
BY_PHASE = "dtype = self.low if self.is_train else torch.float32"


@pytest.mark.parametrize(
    ("choice", "call", "expected"),
    [
        (BY_PHASE, "forward_all", [5]),
        (
            "if self.is_train:\n            dtype = self.low\n        else:\n            dtype = torch.float32",
            "forward",
            [8],
        ),
        (BY_PHASE.replace("is_train", "use_amp"), "forward_all", []),
        (BY_PHASE.replace("float32", "bfloat16"), "forward_all", []),
        (BY_PHASE, "describe", []),
    ],
)
def test_a_dtype_that_is_float32_unless_the_model_trains(choice, call, expected):
    """The region of one function for both phases is off in validation by its dtype; the batch is passed by name."""
    assert reported(PHASES.format(choice=choice, call=call)) == expected


LABELLED = """\
import torch
class Trainer:
    def compute_loss(self, model, inputs):
        return model(**inputs)

    def training_step(self, model, inputs):
        if self.use_amp:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.compute_loss(model, inputs)
        else:
            loss = self.compute_loss(model, inputs)
        self.scaler.scale(loss).backward()

    def evaluate(self, loader):
        for inputs in loader:
            self.prediction_step(self.model, inputs, "labels" in inputs)

    def prediction_step(self, model, inputs, has_labels):
        with torch.no_grad():
            if has_labels:
                out = self.compute_loss(model, inputs)
            else:
{other}
        return out
"""
UNDER_FLAG = """\
                if self.use_amp:
                    with torch.autocast("cuda", dtype=torch.float16):
                        out = model(**inputs)
                else:
                    out = model(**inputs)"""
ALWAYS = """\
                with torch.autocast("cuda", dtype=torch.float16):
                    out = model(**inputs)"""


@pytest.mark.parametrize(("other", "expected"), [(UNDER_FLAG, [21]), (ALWAYS, [])])
def test_the_other_branch_is_not_the_one_without_mixed_precision(other, expected):
    """A branch without autocast is that of float32 only if no flag decides about mixed precision inside the other one."""
    assert reported(LABELLED.format(other=other)) == expected


BRANCHES = """\
import torch
def epoch(net, loader, train_mode, optimizer, scaler=None):
    use_amp = scaler is not None
    for x in loader:
        if {test}:
            with torch.autocast('cuda'):
                loss = net(x)
        else:
            {other}
        if train_mode:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
"""


@pytest.mark.parametrize(
    ("test", "other", "expected"),
    [
        ("use_amp and train_mode", "loss = net(x)", [5]),
        ("train_mode and use_amp", "loss = net(x)", [5]),
        ("use_amp", "loss = net(x)", []),
        ("use_amp and fast", "loss = net(x)", []),
        ("use_amp and train_mode", "loss = evaluate(x)", []),
        ("use_amp and train_mode", "with context: loss = net(x)", []),
        ("use_amp and train_mode", "with torch.no_grad(): loss = net(x)", [5]),
        ("use_amp and train_mode", "if full: loss = net(x)", [5]),
        ("use_amp and train_mode", "if full:\n                with torch.autocast('cuda'): loss = net(x)", []),
    ],
)
def test_a_region_in_a_branch_for_training_leaves_validation_out(test, other, expected):
    """`if use_amp and train:` has validation in its `else`, in float32."""
    assert reported(BRANCHES.format(test=test, other=other)) == expected


FORWARDS = """\
import torch
from passes import forward_pass, forward_step
def train_epoch(model, loader, optimizer, scaler):
    model.train()
    for x, y in loader:
        with torch.autocast('cuda', dtype=torch.float16):
            loss = {call}
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
def validate(model, val_loader):
    model.eval()
    with torch.no_grad():
        for x, y in val_loader:
            {region}loss = {call}
"""


@pytest.mark.parametrize(
    ("call", "is_forward"),
    [
        ("forward_pass(model, x, y)", True),
        ("forward_step(model, x, y)", True),
        ("model.transformer(x, mask=y)", True),
        ("model.training_loss(x, y)", True),
        ("unwrap_model(model)(x, y)", True),
        ("accelerator.unwrap_model(model)(x, y)", True),
        ("misc.get_model(model).get_loss(x, y)", True),
        ("de_parallel(model).compute_loss(x, y)", True),
        ("get_model(model).state(x)", False),
        ("describe(model)(x, y)", False),
        ("model.vocabulary(x)", False),
        ("compare(model, x, y)", False),
    ],
)
def test_a_forward_by_another_name_is_one(call, is_forward):
    """A function of another file that is named for the forward, a part of the model, and a method for its loss run the model."""
    assert reported(FORWARDS.format(call=call, region="")) == ([15] if is_forward else [])
    assert reported(FORWARDS.format(call=call, region="with torch.autocast('cuda'): ")) == []
