"""HS134: regions that only the evaluation enters, or nothing, and models of another file that know of no precision."""

import pytest

from check_scripts import findings

EVALUATED = """\
import torch
from nets import Net

ctx = torch.autocast("cuda", dtype=torch.float16)

def evaluate(model, loader):
    with torch.no_grad():
        for x, y in loader:
            with {evaluated}:
                score(model(x), y)

def train(args, loader):
    model = Net(args).cuda()
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with {trained}:
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    evaluate(model, loader)
"""


@pytest.mark.parametrize("evaluated", ["ctx", "torch.autocast('cuda')", "open(path)"])
def test_a_region_of_the_evaluation_is_none_of_the_training(evaluated):
    """HS134: the regions of a file are those of the evaluation, or a context that nothing enters."""
    script = EVALUATED.format(evaluated=evaluated, trained="tqdm(loader)")
    assert "runs outside autocast" in findings(script, "HS134")[0].message


@pytest.mark.parametrize("trained", ["ctx", "torch.autocast('cuda')", "amp_region()", "model.ctx"])
def test_a_region_around_the_training_is_used(trained):
    """HS134 is silent where the forward runs in a region, or in a context that may be one."""
    assert not findings(EVALUATED.format(evaluated="ctx", trained=trained), "HS134")


def test_a_context_that_is_passed_on_may_be_entered():
    """HS134 is silent if the region is an argument of a function, which may enter it."""
    script = EVALUATED.format(evaluated="ctx", trained="tqdm(loader)")
    assert not findings(script.replace("evaluate(model, loader)\n", "evaluate(model, loader)\n    run(ctx)\n"), "HS134")


MODEL = """\
import torch
from nets import build

def main(args, loader):
    model = {created}
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize("created", ["build(args.width, depth=4).to(args.device)", "build()", 'build(args["model"])'])
def test_a_model_that_receives_no_precision_opens_no_region_for_it(created):
    """HS134: a model of another file that gets neither the settings nor the flag of the scaler."""
    assert "unless `model` opens one itself" in findings(MODEL.format(created=created), "HS134")[0].message


@pytest.mark.parametrize(
    "created",
    [
        "build(args)",
        "build(model_config)",
        "build(4, fp16=args.amp)",
        "build(**vars(args))",
        "torch.nn.DataParallel(build(4))",
        "args.model",
    ],
)
def test_a_model_that_may_know_of_mixed_precision_may_open_a_region(created):
    """HS134 is silent if the model receives the settings or a flag, runs in threads, or is created elsewhere."""
    assert not findings(MODEL.format(created=created), "HS134")


def test_the_help_of_an_option_computes_nothing():
    """HS134 does not take words in the help of an option for a computation in 16 bits."""
    option = 'parser.add_argument("--amp", action="store_true", help="train under autocast")\n'
    script = MODEL.format(created="build(4)").replace("from nets import build\n", f"from nets import build\n{option}")
    assert findings(script, "HS134")


@pytest.mark.parametrize(("context", "is_reported"), [("args.ctx", False), ("timer(args)", True)])
def test_a_context_of_another_file_may_be_a_region(context, is_reported):
    """HS134 is silent where the forward runs in a context whose name may be that of a region."""
    plain = "        loss = criterion(model(x), y)\n"
    script = MODEL.format(created="build(4)").replace(plain, f"        with {context}:\n    {plain}")
    assert bool(findings(script, "HS134")) == is_reported


TAKEN_OUT = """\
import torch
from contextlib import nullcontext
dtype = "float16"
{context}
scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
{before}
for x in loader:
    with {name}:
        loss = model(x).loss
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
NULL = "ctx = nullcontext()"
CHOSEN = 'ctx = nullcontext() if cpu else torch.autocast("cuda", dtype=torch.float16)'


@pytest.mark.parametrize(
    ("context", "name", "before", "expected"),
    [
        (NULL, "ctx", "", [11]),
        (NULL, "ctx", 'bits = {"float16": torch.float16}[dtype]', [11]),
        (NULL, "settings.ctx", "", []),  # of another file
        (CHOSEN, "ctx", "", []),
        (NULL + "\nif amp:\n    ctx = make_context(dtype)", "ctx", "", []),
        (NULL, "ctx", "model = model.half()", []),
        (NULL, "ctx", "model = Model.from_pretrained(path, torch_dtype=dtype)", []),
    ],
)
def test_a_context_that_is_null_in_every_run(context, name, before, expected):
    """HS134 where the context of the forward was a region once, and the scaler still scales."""
    text = TAKEN_OUT.format(context=context, name=name, before=before)
    assert [f.line for f in findings(text, "HS134")] == expected
