"""Mistakes that exist on one of several paths: flags around a line, helpers with several callers, skipped steps."""

import pytest

from check_scripts import codes
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

HEAD = "import torch\nscaler = torch.amp.GradScaler('cuda')\nfrom torch.nn.utils import clip_grad_norm_ as clip_grad\n"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), clip)"
NORM = "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), {limit})"


def loop(*lines, head="", end="scaler.step(optimizer)\n    scaler.update()"):
    """A training loop with `lines` between backward and step."""
    text = HEAD + head + "for i, (x, y) in enumerate(loader):\n    optimizer.zero_grad()\n"
    text += "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = loss_fn(model(x), y)\n"
    text += "    scaler.scale(loss).backward()\n" + "".join(f"    {line}\n" for line in lines)
    return text + f"    {end}\n"


def gan(*lines):
    """Two models and optimizers under one scaler, with `lines` between the backwards and the steps."""
    head = "opt_g = torch.optim.Adam(net_g.parameters())\nopt_d = torch.optim.Adam(net_d.parameters())\n"
    text = HEAD + head + "for x in loader:\n    net_g.zero_grad(); net_d.zero_grad()\n"
    text += "    scaler.scale(loss_g(x)).backward()\n    scaler.scale(loss_d(x)).backward()\n"
    text += "".join(f"    {line}\n" for line in lines)
    return text + "    scaler.step(opt_g)\n    scaler.step(opt_d)\n    scaler.update()\n"


def reported(text, *wanted):
    """The findings of these rules, without their lines."""
    return [c.partition(":")[0] for c in codes(text) if c.startswith(wanted)]


HELPER = """\
import torch
def run(model, batch, train):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch)
        if train:
            loss.backward()
    return loss
def fit(model, optimizer, loader):
    for batch in loader:
        loss = run(model, batch, True)
        if not torch.isfinite(loss):
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
def test(model, loader):
    with torch.no_grad():
        for batch in loader:
            run(model, batch, False)
"""
PER_OPTIMIZER = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    scaler.scale(model(x)).backward()
    for {target}:
        scaler.step({optimizer})
        {update}
"""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (loop("scaler.unscale_(optimizer)", "if clip: scaler.unscale_(optimizer)"), "HS105"),
        (loop("if log: scaler.unscale_(optimizer)", "if clip: scaler.unscale_(optimizer)"), "HS105"),
        (loop("if log: scaler.unscale_(optimizer)", f"if clip: {CLIP}"), "HS104"),
        (loop(f"if clip > 0: {CLIP}"), "HS104"),
        (
            gan("scaler.unscale_(opt_g)", "clip_grad(net_g.parameters(), 1.0)", "clip_grad(net_d.parameters(), 1.0)"),
            "HS104",
        ),
        (loop(NORM.format(limit="float('inf')"), "log(norm)"), "HS110"),
        (loop(NORM.format(limit="math.inf"), "if norm > 10: print(norm)"), "HS110"),
        (loop("norm = get_grad_norm(model.parameters())"), "HS110"),
        (loop("norm = torch.linalg.vector_norm(model.weight.grad.detach())"), "HS110"),
        (loop("norm = model.weight.grad.detach().data.norm(2)"), "HS110"),
        (HELPER, "HS140"),
        (PER_OPTIMIZER.format(target="opt in optimizers", optimizer="opt", update="scaler.update()"), "HS108"),
        (PER_OPTIMIZER.format(target="i in range(2)", optimizer="opts[i]", update="scaler.update()"), "HS108"),
        (loop(end="scaler.step(optimizer)\n    scaler.step(optimizer)\n    scaler.update()"), "HS114"),
        (loop(end="scaler.step(optimizer)\n    scaler.update()\n    if amp: scaler.update()"), "HS114"),
        (loop("scaler.step(optimizer)", "try: log()", "except OSError: scaler.step(optimizer)"), "HS114"),
        (loop("loss2 = model(x)", "scaler.step(optimizer)", "scaler.scale(loss2).backward()"), "HS114"),
    ],
)
def test_a_mistake_on_one_path_is_reported(text, code):
    """Flags that are possible together, one of several callers and one of several optimizers are enough."""
    assert code in reported(text, code)


@pytest.mark.parametrize(
    "text",
    [
        loop("if log: scaler.unscale_(optimizer)", "elif clip: scaler.unscale_(optimizer)"),
        loop("if clip > 0: scaler.unscale_(optimizer)", "if clip == 0: scaler.unscale_(optimizer)"),
        loop("if mode == 'a': scaler.unscale_(optimizer)", "if mode in ('b', 'c'): scaler.unscale_(optimizer)"),
        loop(
            "done = False", "if log: scaler.unscale_(optimizer); done = True", "if not done: scaler.unscale_(optimizer)"
        ),
        loop("if clip > 0: scaler.unscale_(optimizer)", f"if clip: {CLIP}"),
        loop("if args.clip: scaler.unscale_(optimizer)", "clip_grad(model.parameters(), args.clip)"),
        loop("if use_amp: scaler.unscale_(optimizer)", CLIP),
        loop("if log: scaler.unscale_(optimizer); norm = measure(model)", "else: scaler.unscale_(optimizer)", CLIP),
        gan(
            "scaler.unscale_(opt_g)",
            "scaler.unscale_(opt_d)",
            "clip_grad(net_g.parameters(), 1.0)",
            "clip_grad(net_d.parameters(), 1.0)",
        ),
        loop("scaler.unscale_(optimizer)", NORM.format(limit="float('inf')"), "log(norm)"),
        loop("scaler.unscale_(optimizer)", "norm = get_grad_norm(model.parameters())"),
        PER_OPTIMIZER.format(target="opt in optimizers", optimizer="opt", update="pass") + "    scaler.update()\n",
        PER_OPTIMIZER.format(
            target="i, opt in enumerate(optimizers)",
            optimizer="opt",
            update="scaler.update()",
        ).replace("        scaler.step", "        if i != chosen: continue\n        scaler.step"),
        PER_OPTIMIZER.format(target="opt, scaler in pairs", optimizer="opt", update="scaler.update()"),
        PER_OPTIMIZER.format(target="opt in optimizers", optimizer="opt", update="scaler.update()").replace(
            "        scaler.step", "        scaler.scale(model(x)).backward()\n        scaler.step"
        ),
        loop("if a: scaler.step(optimizer)", end="else: scaler.step(optimizer)\n    scaler.update()"),
        loop("try: scaler.step(optimizer)", "except RuntimeError: scaler.step(optimizer)", end="scaler.update()"),
    ],
)
def test_paths_that_exclude_each_other_are_silent(text):
    """Contradictory or related flags, and calls for another optimizer, are no mistake."""
    assert reported(text, "HS104", "HS105", "HS108", "HS110", "HS114") == []


DIVIDED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = {loss}
    {line}
    scaler.scale({scaled}).backward()
    if (i + 1) % accum == 0:
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("loss", "line", "scaled", "twice"),
    [
        ("f(x) / accum", "pass", "loss / accum", True),
        ("f(x)", "loss = loss / accum; loss = loss / accum", "loss", True),
        ("f(x) / accum", "total = loss + penalty", "total / accum", True),
        ("f(x)", "loss = loss / accum", "loss", False),
        ("f(x) / accum + g(x) / accum", "pass", "loss", False),
        ("f(x) / accum", "shown = loss / accum", "loss", False),
        ("f(x) / accum", "other = g(x) / accum; loss = loss + other", "loss", False),
        ("f(x) / size / size", "pass", "loss", False),
        ("f(x) / accum", "loss = g(x) / accum", "loss", False),
    ],
)
def test_a_loss_divided_twice_is_reported(loss, line, scaled, twice):
    """Divisions count along one value: two terms that are each divided once are correct."""
    text = DIVIDED.format(loss=loss, line=line, scaled=scaled)
    assert reported(text, "HS182") == ["HS182"] * twice


def test_steps_in_blocks_that_expect_an_exception_are_not_reported():
    """What a test expects to raise is wrong on purpose; the same line outside the block is reported."""
    line = "scaler.unscale_(optimizer)"
    text = "import pytest\n" + loop(line, "with pytest.raises(RuntimeError):", f"    {line}", line)
    findings = check_document(read_document("a.py", text.encode(), "python"), Settings(), Selection())
    lines = text.splitlines()
    assert [lines[f.line - 1] for f in findings if f.code == "HS105"] == [f"    {line}"]
    expected = text.replace("pytest.raises", "self.assertRaisesRegex").replace(
        f"        {line}\n    {line}", f"        {line}"
    )
    findings = check_document(read_document("a.py", expected.encode(), "python"), Settings(), Selection())
    assert not [f for f in findings if f.code == "HS105"]


def validation(body, *, training="model", cls=""):
    """A script that trains under autocast and validates by `body`."""
    text = f"import torch\ndef train(model):\n    for x in loader:\n        with torch.autocast('cuda', dtype=torch.bfloat16):\n            loss = {training}(x)\n"
    return text + "        loss.backward()\n        optimizer.step()\n        optimizer.zero_grad()\n" + body


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (validation("def test(model):\n    with torch.no_grad():\n        out = model(x)\n"), 1),
        (
            validation(
                "def test(model):\n    with torch.no_grad():\n        out = model.get_loss(x)\n",
                training="model.get_loss",
            ),
            1,
        ),
        (
            validation(
                "def test(model):\n    with torch.no_grad():\n        if use_amp:\n            with torch.autocast('cuda'):\n"
                "                out = model(x)\n        else:\n            out = model(x)\n"
            ),
            0,
        ),
        (
            "import torch\nclass A:\n    def fit(self):\n        with torch.autocast('cuda', dtype=torch.bfloat16):\n"
            "            loss = self.model(x)\n        loss.backward()\nclass B:\n    @torch.no_grad()\n    def run(self, x):\n"
            "        return self.model(x)\n",
            0,
        ),
    ],
)
def test_validation_without_autocast(text, count):
    """The branch without mixed precision and the model of another class are not reported."""
    assert len(reported(text, "HS149")) == count


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("scheduler.step()", 1),
        ("if args.warmup: scheduler.step()", 1),
        ("scheduler.step(val_loss)", 0),
        ("scheduler.step(metrics=score)", 0),
        ("if i == len(loader) - 1: scheduler.step()", 0),
    ],
)
def test_schedules_that_count_skipped_steps(line, count):
    """A schedule that is stepped with a metric, or once per epoch, does not count steps."""
    assert len(reported(loop() + f"    {line}\n", "HS196")) == count


def test_messages_name_the_variables_on_the_line():
    """In a helper the message has the helper's names, not those of the caller."""
    from check_scripts import findings

    text = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\ndef apply(s, o):\n    s.unscale_(o)\n    s.unscale_(o)\n    s.step(o)\n"
        "    s.update()\nfor x in loader:\n    scaler.scale(model(x)).backward()\n    apply(scaler, optimizer)\n"
    )
    (finding,) = findings(text, "HS105")
    assert "`o`" in finding.message
    assert "optimizer" not in finding.message


EVALUATED = """\
import torch
def log_probs(model, ids):
    return model(ids).log_softmax(-1)
@torch.no_grad()
def {name}({params}):
    {setup}
    return [log_probs({model}, ids) for ids in loader]
def train(policy_model, loader, optimizer):
    for ids in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = log_probs(policy_model, ids).mean()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("name", "params", "setup", "model", "expected"),
    [
        ("evaluate", "policy_model, loader", "policy_model.eval()", "policy_model", ["HS149:7"]),
        ("visualize", "policy_model, loader", "policy_model.eval()", "policy_model", []),
        ("evaluate", "ref_model, loader", "ref_model.eval()", "ref_model", []),
        ("evaluate", "loader", "policy_model = build()", "policy_model", []),
    ],
)
def test_validation_through_a_helper_is_reported_at_its_call(name, params, setup, model, expected):
    """The caller without a region is reported, not the helper that training uses too; pictures, references and other models are not."""
    text = EVALUATED.format(name=name, params=params, setup=setup, model=model)
    assert [code for code in codes(text) if code.startswith("HS149")] == expected
