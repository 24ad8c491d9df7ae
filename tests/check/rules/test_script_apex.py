"""HS184, HS193, HS194, HS197: Apex's options, wrapped models, and what happens to gradients in and after its scale_loss block."""

import pytest

from check_scripts import findings

START = "import torch\nfrom apex import amp\n"
LOOP = """\
model, optimizer = amp.initialize(model, optimizer{options})
for x in loader:
    loss = model(x)
{body}
    optimizer.zero_grad()
"""
SCALED = "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()\n"
CLIP = "torch.nn.utils.clip_grad_norm_({}, 1.0)\n"


def loop(body, options=", opt_level='O1'"):
    return START + LOOP.format(options=options, body="".join(f"    {line}\n" for line in body.splitlines()))


def reported(text):
    return [f.code for f in findings(text, "HS184", "HS194", "HS197")]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ("opt_level='O1', keep_batchnorm_fp32=True", 1),
        ("opt_level='O1', keep_batchnorm_fp32='False', master_weights=True", 2),
        ("keep_batchnorm_fp32=True", 1),
        ("opt_level='O1', cast_model_type=torch.float16", 1),
        ("opt_level='O2', patch_torch_functions=True", 1),
        ("opt_level='o1'", 1),
        ("opt_level=LEVEL", 1),
        ("opt_level='O1', keep_batchnorm_fp32=None, loss_scale='dynamic'", 0),
        ("opt_level='O1', keep_batchnorm_fp32=args.keep_batchnorm_fp32", 0),
        ("opt_level=args.opt_level, keep_batchnorm_fp32=True", 0),
        ("opt_level='O3', keep_batchnorm_fp32=True, master_weights=False", 0),
        ("opt_level='O2', patch_torch_functions=False", 0),
        ("enabled=False, opt_level='O1', keep_batchnorm_fp32=True", 0),
        ("keep_batchnorm_fp32=True, **options", 0),
    ],
)
def test_a_level_rejects_the_options_of_others(options, count):
    """Each option that amp.initialize raises for is reported; one that the script leaves open is not."""
    text = f"{START}LEVEL = '02'\nmodel, optimizer = amp.initialize(model, optimizer, {options})\n"
    assert reported(text) == ["HS194"] * count


@pytest.mark.parametrize(
    ("body", "options", "expected"),
    [
        ("with amp.scale_loss(loss, optimizer) as scaled:\n    loss.backward()\noptimizer.step()", ", opt_level='O1'", ["HS184"]),
        ("loss.backward()\noptimizer.step()", ", opt_level='O1'", ["HS184"]),
        ("loss.backward()\noptimizer.step()", ", opt_level='O2'", ["HS184"]),
        ("loss.backward()\noptimizer.step()", "", ["HS184"]),
        ("loss.backward()\noptimizer.step()", ", opt_level='O0'", []),
        ("loss.backward()\noptimizer.step()", ", opt_level='O3'", []),
        ("loss.backward()\noptimizer.step()", ", opt_level=args.level", ["HS184"]),
        ("loss.backward()\noptimizer.step()", ", opt_level='O1', enabled=args.amp", []),
        ("loss.backward()\noptimizer.step()", ", opt_level='O2', loss_scale=1.0", []),
        ("loss.backward()\nother.step()", ", opt_level='O1'", []),
        (f"{SCALED}optimizer.step()", ", opt_level='O1'", []),
        ("with amp.scale_loss(loss, optimizer) as loss:\n    loss.backward()\noptimizer.step()", ", opt_level='O1'", []),
        (f"if scale:\n    {SCALED}else:\n    loss.backward()\noptimizer.step()".replace("\n    scaled", "\n        scaled"), ", opt_level='O1'", []),
    ],
)  # fmt: skip
def test_apex_scales_the_loss_of_every_backward(body, options, expected):
    """A backward of the loss itself is reported where amp.initialize certainly scales."""
    assert reported(loop(body, options)) == expected


def test_the_path_without_apex_runs_a_plain_backward():
    """A branch that does not initialize Apex is not asked to scale."""
    text = START + (
        "if args.fp16:\n    model, optimizer = amp.initialize(model, optimizer, opt_level='O1')\nfor x in loader:\n    loss = model(x)\n"
        "    if not args.fp16:\n        loss.backward()\n    optimizer.step()\n"
    )
    assert reported(text) == []
    assert reported(text.replace("if not args.fp16", "if args.fp16")) == ["HS184"]


@pytest.mark.parametrize(
    ("body", "options", "expected"),
    [
        (f"{SCALED}    {CLIP.format('model.parameters()')}optimizer.step()", ", opt_level='O1'", ["HS197"]),
        (f"{SCALED}    optimizer.step()", ", opt_level='O1'", ["HS197"]),
        (f"{SCALED}{CLIP.format('model.parameters()')}optimizer.step()", ", opt_level='O2'", ["HS197"]),
        (f"{SCALED}    optimizer.step()", ", opt_level='O2', loss_scale=1.0", []),
        (f"{SCALED}    optimizer.step()", ", opt_level='O3'", []),
        (f"{SCALED}{CLIP.format('model.parameters()')}optimizer.step()", ", opt_level='O1'", []),
        (f"{SCALED}{CLIP.format('model.parameters()')}optimizer.step()", ", opt_level=args.level", []),
        (f"{SCALED}{CLIP.format('amp.master_params(optimizer)')}optimizer.step()", ", opt_level='O2'", []),
        (f"{SCALED}{CLIP.format('other.parameters()')}optimizer.step()", ", opt_level='O2'", []),
    ],
)
def test_gradients_are_used_after_the_block_unscaled_them(body, options, expected):
    """A clip or step inside the block is reported, and one of weights that the optimizer does not step."""
    assert reported(loop(body, options)) == expected


def test_a_clip_in_the_block_of_a_function_that_a_loop_calls():
    """A training function that is called once per epoch is read like a loop of the module."""
    text = (
        "import torch\nfrom apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level='O1')\n"
        "def train():\n    for x, y in loader:\n        loss = model(x)\n"
        "        with amp.scale_loss(loss, optimizer) as scaled:\n            scaled.backward()\n"
        "            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()\n"
        "for epoch in range(9):\n    train()\n"
    )
    assert [f.line for f in findings(text, "HS197")] == [9]
    after = text.replace("            torch.nn", "        torch.nn")
    assert findings(after, "HS197") == []


WRAPPED = """\
import torch
from apex import amp
def train(args, model, optimizer):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    model = torch.nn.DataParallel(model)
    {returned}
{main}
"""


@pytest.mark.parametrize(
    ("returned", "main", "expected"),
    [
        ("return 1", "train(args, model, optimizer)\ntrain(args, model, optimizer)", []),
        ("return model", "model = train(args, model, optimizer)\ntrain(args, model, optimizer)", ["HS193"]),
        ("return 1", "model = torch.nn.DataParallel(model)\ntrain(args, model, optimizer)", ["HS193"]),
    ],
)
def test_a_model_that_a_function_wrapped_for_itself_is_not_wrapped_for_the_next_call(returned, main, expected):
    """Assigning a parameter changes nothing for the caller, unless the function returns it."""
    text = WRAPPED.format(returned=returned, main=main)
    assert [f.code for f in findings(text, "HS193")] == expected
