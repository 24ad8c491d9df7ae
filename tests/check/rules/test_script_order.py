"""The order of scaler calls in less usual forms: updates that come too seldom, closures, the wrong scaler."""

import pytest

from check_scripts import findings

START = "import torch\nscaler = torch.amp.GradScaler('cuda')\n"
EPOCH = """\
for epoch in range(3):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
{update}
"""
BRANCHES = """\
for x in loader:
    optimizer.zero_grad()
    scaler.scale(model(x)).backward()
    if args.clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
{clipped}    else:
        scaler.step(optimizer)
        scaler.update()
"""
CRITIC = """\
for i, x in enumerate(loader):
    opt_critic.zero_grad()
    scaler.scale(critic(x)).backward()
    scaler.step(opt_critic)
    if i % 5 == 0:
        opt_gen.zero_grad()
        scaler.scale(gen(x)).backward()
        scaler.step(opt_gen)
{update}
"""
SEVERAL = """\
for x in loader:
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
    scaler.update()
"""
RETRY = """\
for x in loader:
    while True:
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        break
    scaler.update()
"""
CLOSURE = """\
def closure():
    optimizer.zero_grad()
    loss = model(x)
    {backward}
    return loss
for x in loader:
    optimizer.step(closure)
"""
PAIRS = """\
import torch
g_scaler = torch.amp.GradScaler("cuda")
d_scaler = torch.amp.GradScaler("cuda")
for x in loader:
    opt_d.zero_grad()
    d_scaler.scale(critic(x)).backward()
    d_scaler.step(opt_d)
    d_scaler.update()
    opt_g.zero_grad()
    g_scaler.scale(gen(x)).backward()
    {scaler}.step(opt_g)
    g_scaler.update()
"""
SHARPNESS = """\
for x in loader:
    scaler.scale(model(x)).backward()
    {unscale}optimizer.first_step(zero_grad=True)
    scaler.scale(model(x)).backward()
    optimizer.second_step(zero_grad=True)
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(EPOCH.format(update="    scaler.update()"), "follows the loop", id="after the loop"),
        pytest.param(BRANCHES.format(clipped=""), "only the other branch", id="in the other branch"),
        pytest.param(CRITIC.format(update="        scaler.update()"), "unless `i % 5 == 0`", id="with the generator"),
    ],
)
def test_reports_an_update_that_comes_too_seldom(text, words):
    """A step that repeats before the next update is one HS101, whose message says why."""
    (finding,) = findings(START + text, "HS101")
    assert words in finding.message


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(EPOCH.format(update="        scaler.update()"), id="in the loop"),
        pytest.param(BRANCHES.format(clipped="        scaler.update()\n"), id="in both branches"),
        pytest.param(CRITIC.format(update="    scaler.update()"), id="in every iteration"),
        pytest.param(SEVERAL, id="another optimizer in each iteration"),
        pytest.param(RETRY, id="a loop that the step ends"),
    ],
)
def test_is_silent_where_every_step_has_its_update(text):
    """One update for several optimizers, or for each path, is right."""
    assert findings(START + text, "HS101") == []


def test_reports_a_closure_that_scales_its_loss():
    """An optimizer that runs a closure with a scaled backward steps on scaled gradients."""
    assert [f.line for f in findings(START + CLOSURE.format(backward="scaler.scale(loss).backward()"), "HS103")] == [9]
    assert findings(START + CLOSURE.format(backward="loss.backward()"), "HS103") == []


def test_reports_the_scaler_that_did_not_scale_the_loss():
    """With two scalers, the one that scaled a loss has to step its optimizer."""
    (finding,) = findings(PAIRS.format(scaler="d_scaler"), "HS103")
    assert finding.line == 11
    assert "`g_scaler` scaled the loss" in finding.message
    assert findings(PAIRS.format(scaler="g_scaler"), "HS103") == []


def test_reports_the_second_step_of_sharpness_aware_minimization():
    """`second_step` steps the base optimizer on gradients that are still scaled."""
    assert [f.line for f in findings(START + SHARPNESS.format(unscale=""), "HS103")] == [7]


def test_a_scaled_loss_stays_scaled_when_it_is_divided():
    """A division by the accumulation steps does not remove the scale; one by the scale does."""
    text = (
        "for x in loader:\n    loss = scaler.scale(model(x))\n    loss = loss / {divisor}\n    loss.backward()\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    scaler.step(optimizer)\n    scaler.update()\n"
    )
    assert [f.line for f in findings(START + text.format(divisor="steps"), "HS104")] == [7]
    assert findings(START + text.format(divisor="scaler.get_scale()"), "HS104") == []


def test_reports_a_repeated_step_of_a_scaler_that_is_passed_in():
    """HS114 does not need the creation of the scaler for a second step."""
    text = (
        "import torch\ndef train(model, loader, optimizer, scaler):\n    for x in loader:\n"
        "        scaler.scale(model(x)).backward()\n        scaler.step(optimizer)\n        scaler.step(optimizer)\n"
        "        scaler.update()\n"
    )
    assert [f.line for f in findings(text, "HS114")] == [6]


@pytest.mark.parametrize(
    ("created", "message"),
    [
        pytest.param('criterion = {"bce": torch.nn.BCELoss()}["bce"]', "binary", id="dictionary"),
        pytest.param(
            "if args.bce:\n    criterion = torch.nn.BCELoss()\nelse:\n    criterion = torch.nn.BCEWithLogitsLoss()",
            "when `criterion` is BCELoss",
            id="one branch",
        ),
    ],
)
def test_reports_binary_cross_entropy_of_a_chosen_criterion(created, message):
    """HS146 follows an entry of a dictionary, and names the condition where only one branch is wrong."""
    text = f"import torch\n{created}\nwith torch.autocast('cuda'):\n    loss = criterion(model(x), y)\n"
    (finding,) = findings(text, "HS146")
    assert finding.message.startswith(message)


def test_is_silent_on_another_entry_of_a_dictionary_of_losses():
    """A dictionary that contains BCELoss is no finding where another entry is read."""
    text = (
        "import torch\ntable = {'bce': torch.nn.BCELoss(), 'mse': torch.nn.MSELoss()}\ncriterion = table['mse']\n"
        "with torch.autocast('cuda'):\n    loss = criterion(model(x), y)\n"
    )
    assert findings(text, "HS146") == []


@pytest.mark.parametrize(
    ("condition", "count"), [("dtype == 'bfloat16'", 1), ("dtype != 'float16'", 1), ("dtype == 'float16'", 0)]
)
def test_reports_a_scaler_enabled_for_the_wrong_format(condition, count):
    """A scaler that is on for bfloat16 and off for float16 has its condition the wrong way round."""
    text = (
        f"import torch\nscaler = torch.amp.GradScaler('cuda', enabled={condition})\nfor x in loader:\n"
        "    with torch.autocast('cuda', dtype=formats[dtype]):\n        loss = model(x)\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
    )
    assert len(findings(text, "HS120")) == count
