"""HS149: forwards through an imported function or a method of the object that has the model, and regions that a flag chooses."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
from others import forward_in_tiles, tiled, Diffusion
context = {context}
def train(model, diffusion, loader, optimizer, scaler):
    model.train()
    for x, y in loader:
        with context:
            loss = {trained}
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

@torch.no_grad()
def validate(model, diffusion, loader):
    {switch}
    total = 0.0
    for x, y in loader:
        total += {validated}
    return total
"""
REGION = "torch.autocast('cuda', dtype=torch.float16)"


def reported(context=REGION, trained="loss_fn(model(x), y)", switch="model.eval()", validated="loss_fn(model(x), y)"):
    """The lines at which HS149 is reported."""
    text = LOOP.format(context=context, trained=trained, switch=switch, validated=validated)
    return [f.line for f in findings(text, "HS149")]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("forward_in_tiles(model, x, tile=64)", [19]),
        ("forward_in_tiles(x, model)", []),
        ("tiled(model, x)", []),
        ("forward_in_tiles(lpips, x)", []),
    ],
)
def test_a_function_of_another_file_that_forwards_its_first_argument(call, expected):
    """Named for a forward, with the model in front, it runs the model."""
    assert reported(validated=f"loss_fn({call}, y)") == expected


@pytest.mark.parametrize(
    ("switch", "method", "expected"),
    [
        ("diffusion.model.eval()", "compute_loss", [19]),
        ("diffusion.net.eval()", "training_losses", [19]),
        ("diffusion.model.eval()", "log_rate", []),
        ("diffusion.ready = True", "compute_loss", []),
    ],
)
def test_a_method_of_the_object_that_has_the_model(switch, method, expected):
    """Its `model` is switched to evaluation, and the method is named for what runs it."""
    call = f"diffusion.{method}(x, y)"
    assert reported(trained=call, switch=switch, validated=call) == expected


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (f"{REGION} if fp16 else torch.autocast('cuda', enabled=False)", [19]),
        (f"torch.autocast('cuda', enabled=False) if full else {REGION}", [19]),
        (f"{REGION} if fp16 else nullcontext()", [19]),
        ("torch.autocast('cuda', enabled=False) if fp16 else torch.autocast('cuda', enabled=False)", []),
    ],
)
def test_a_disabled_region_is_the_choice_of_a_run_without(context, expected):
    """Like a null context: where the flag is set the training is under autocast."""
    assert reported(context=context) == expected


FROZEN = """\
import torch
class TextEncoder:
    def __init__(self, name, model):
        self.model = {created}
        self.model.eval()

    @torch.no_grad()
    def embed(self, loader):
        for batch in loader:
            self.seen.append(self.model(batch))
{more}
encoder = TextEncoder("small", model)
for x, y in loader:
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = loss_fn({trained}(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
encoder.embed(valid)
"""
TRAINS = """
    def fit(self, loader):
        for x in loader:
            with torch.autocast('cuda', dtype=torch.bfloat16):
                loss = self.model(x)
            loss.backward()
"""


@pytest.mark.parametrize(
    ("created", "trained", "more", "expected"),
    [
        ("CLIPTextModel.from_pretrained(name)", "model", "", []),
        ("load(CLIPTextModel, name).to('cuda')", "model", "", []),
        ("build(name)", "model", TRAINS, [10]),
        ("build(name)", "encoder.model", "", [10]),
        ("model", "model", "", [10]),
        ("compiled(model)", "model", "", [10]),
    ],
)
def test_a_class_that_creates_the_model_it_runs(created, trained, more, expected):
    """It is not the model that is trained elsewhere, unless that is read from an object, or passed in."""
    text = FROZEN.format(created=created, trained=trained, more=more)
    assert [f.line for f in findings(text, "HS149")] == expected
