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
        ("amp", "torch.autocast('cuda', enabled=use)", []),
        ("amp", "torch.autocast('cuda', enabled=amp and trainable)", []),
    ],
)
def test_a_region_that_only_training_enters_is_reported(use, region, expected):
    """A loop for both phases whose region depends on the phase validates in float32."""
    assert reported(SHARED.format(use=use, region=region)) == expected


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
        ("evaluate", "torch.autocast('cuda', enabled=False)", "model(x)", [14]),
        ("evaluate", "torch.autocast('cuda', enabled=amp)", "model(x)", []),
        ("encode", "torch.autocast('cuda', enabled=False)", "model(x)", []),
        ("evaluate", "tqdm(x)", "sliding_window_inference(x, size, 4, model)", [15]),
        ("evaluate", "tqdm(x)", "sliding_window_inference(inputs=x, roi_size=size, predictor=model)", [15]),
        ("evaluate", "tqdm(x)", "inferer(x, model)", [15]),
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
    """A sliding window runs the model it is passed; `enabled=False` around a validation forward is float32."""
    assert reported(VALIDATED.format(name=name, region=region, call=call)) == expected


TRAINING = VALIDATED[: VALIDATED.index("@torch")]


@pytest.mark.parametrize(("last", "expected"), [("plt.imshow(out)", []), ("metric(out)", [3])])
def test_one_picture_of_a_notebook_is_no_validation(last, expected):
    """A cell that draws what the model returns shows an example."""
    cells = [TRAINING, f"model.eval()\nwith torch.no_grad():\n    out = model(x)\n{last}\n"]
    data = json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}).encode()
    document = read_document("train.ipynb", data, "notebook")
    found = check_document(document, Settings(), Selection())
    assert [f.line for f in found if f.code == "HS149"] == expected
