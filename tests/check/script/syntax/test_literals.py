"""Settings that are written into the calls that use them."""

import ast

import pytest

from check_scripts import apply, findings, script

USE = (
    "import torch  # float16\nfrom transformers import TrainingArguments\n{settings}\nTrainingArguments('out', {use})\n"
)


def arguments(settings: str, use: str) -> str:
    """The keyword arguments of a call as rules see them."""
    facts = script(USE.format(settings=settings, use=use))
    return ", ".join(ast.unparse(k) for k in facts.outline.calls["TrainingArguments"][0].call.keywords)


@pytest.mark.parametrize(
    ("settings", "use"),
    [
        ("FP16 = True", "fp16=FP16"),
        ("class CFG:\n    amp = True", "fp16=CFG.amp"),
        ("class Config:\n    amp: bool = True\ncfg = Config(lr=1)", "fp16=cfg.amp"),
        ("class Config:\n    amp: bool = field(default=True)\ncfg = Config()", "fp16=cfg.amp"),
        ("config = {'train': {'amp': True}}", "fp16=config['train']['amp']"),
        ("config = dict(amp=True)", "fp16=config['amp']"),
        ("A = True\nB = A", "fp16=B"),
        ("options = {'fp16': True}", "**options"),
        ("options = dict(fp16=True)", "**options"),
        ("", "**{'fp16': True}"),
        ("def setup():\n    return 'cuda', True\ndevice, amp = setup()", "fp16=amp"),
        ("from types import SimpleNamespace\ncfg = SimpleNamespace(amp=True)", "fp16=cfg.amp"),
        ("from omegaconf import OmegaConf\ncfg = OmegaConf.create({'amp': True})", "fp16=cfg.amp"),
        ("class CFG:\n    class train:\n        amp = True", "fp16=CFG.train.amp"),
        (
            "class Train:\n    amp: bool = True\nclass C:\n    train: Train = field(default_factory=Train)\nc = C()",
            "fp16=c.train.amp",
        ),
        ("class Config:\n    amp: bool = False\ncfg = Config(amp=True)", "fp16=cfg.amp"),
        ("class Config:\n    @property\n    def amp(self):\n        return True\ncfg = Config()", "fp16=cfg.amp"),
        ("import enum\nclass Amp(enum.Enum):\n    ON = True", "fp16=Amp.ON.value"),
        ("AMP = None\ndef use_fp16():\n    global AMP\n    AMP = True", "fp16=AMP"),
        ("base = {'amp': True}\nconfig = {**base, 'lr': 1}", "fp16=config['amp']"),
        ("flags = {'fast': True, 'slow': False}\nMODE = 'fast'", "fp16=flags[MODE]"),
        (
            "def wants(mode):\n    return mode == 'x'\ndef amp(mode):\n    if mode == 'fast':\n        return True\n    return False",
            "fp16=amp('fast')",
        ),
        ("", "fp16=(amp := True)"),
    ],
)
def test_a_setting_with_one_value_is_its_literal(settings, use):
    """A constant, a class, a dataclass, a dictionary and `**options` are read as if written in the call."""
    assert arguments(settings, use) == "fp16=True"


@pytest.mark.parametrize(
    ("settings", "use"),
    [
        ("FP16 = True\nif slow:\n    FP16 = False", "fp16=FP16"),
        ("if fast:\n    FP16 = True", "fp16=FP16"),
        ("FP16 = True\nexec(open('configurator.py').read())", "fp16=FP16"),
        ("class CFG:\n    amp = True\nCFG.amp = args.amp", "fp16=CFG.amp"),
        ("class CFG:\n    amp = True\nsetattr(CFG, name, value)", "fp16=CFG.amp"),
        ("class Config:\n    amp: bool = True\ncfg = Config(amp=flag)", "fp16=cfg.amp"),
        ("class Config:\n    amp: bool = True\ncfg = Config(**read())", "fp16=cfg.amp"),
        ("config = {'amp': True}\nconfig['amp'] = args.amp", "fp16=config['amp']"),
        ("config = {'amp': True}\nconfig.update(read())", "fp16=config['amp']"),
        ("config = {'amp': True}\nconfig[name] = value", "fp16=config['amp']"),
        ("options = {'fp16': True}\nif slow:\n    options['fp16'] = False", "**options"),
        ("STEPS = 4", "gradient_accumulation_steps=STEPS"),
        (
            "def setup():\n    if fast:\n        return 'cuda', True\n    return 'cpu', False\ndevice, amp = setup()",
            "fp16=amp",
        ),
        ("from types import SimpleNamespace\ncfg = SimpleNamespace(amp=True)\ncfg.amp = args.amp", "fp16=cfg.amp"),
        ("from types import SimpleNamespace\ncfg = SimpleNamespace(**read())", "fp16=cfg.amp"),
        ("class C:\n    @property\n    def amp(self):\n        return self.wants()\nc = C()", "fp16=c.amp"),
        (
            "AMP = None\ndef on():\n    global AMP\n    AMP = True\ndef off():\n    global AMP\n    AMP = False",
            "fp16=AMP",
        ),
        ("AMP = True\ndef setup():\n    global AMP\n    AMP = read()", "fp16=AMP"),
        ("config = {'amp': True, **read()}", "fp16=config['amp']"),
        ("def amp(mode):\n    if mode == 'fast':\n        return True\n    return False", "fp16=amp(args.mode)"),
    ],
)
def test_a_setting_that_may_change_stays_a_name(settings, use):
    """A condition, a second assignment or another way to write it leaves the setting open; numbers keep their names."""
    assert arguments(settings, use) == use


def test_a_switch_that_is_off_stays_a_name():
    """`USE_AMP = False` is a choice for this run, not code that never runs."""
    facts = script("import torch\nUSE_AMP = False\nscaler = torch.amp.GradScaler('cuda', enabled=USE_AMP)\n")
    assert ast.unparse(facts.outline.calls["GradScaler"][0].call.keywords[0]) == "enabled=USE_AMP"


TRAINER = """\
import torch
class Config:
    dtype: torch.dtype = torch.bfloat16
class Runner:
    def __init__(self, cfg):
        self.cfg = cfg
    def fit(self):
        scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=self.cfg.dtype):
                loss = loss_fn(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
Runner({config}).fit()
"""


@pytest.mark.parametrize(("config", "is_open"), [("Config()", False), ("Config(read())", True)])
def test_settings_that_a_constructor_stores_are_followed(config, is_open):
    """`self.cfg.dtype` is the default of the only Config that the file creates; what else creates it may choose another."""
    (finding,) = findings(TRAINER.format(config=config), "HS120")
    assert finding.message.startswith("when `self.cfg.dtype`") is is_open


@pytest.mark.parametrize(
    ("call", "expected"),
    [("build()", "True"), ("build(amp=False)", "False"), ("build(); build(amp=False)", "amp"), ("other()", "amp")],
)
def test_a_parameter_is_its_default_or_what_the_only_call_passes(call, expected):
    """Calls that disagree, or a function that nothing in the file calls, leave it open."""
    text = f"# float16\nfrom transformers import TrainingArguments\ndef build(amp=True):\n    return TrainingArguments('out', fp16=amp)\n{call}\n"
    assert ast.unparse(script(text).outline.calls["TrainingArguments"][0].call.keywords[0].value) == expected


@pytest.mark.parametrize(
    ("decorator", "call", "expected"),
    [
        ("@gin.configurable", "build()", "amp"),
        ("@app.command()", "build()", "amp"),
        ("@gin.configurable", "build(amp=False)", "False"),
        ("@timed", "build()", "True"),
    ],
)
def test_a_decorator_may_set_a_parameter_that_the_call_leaves_out(decorator, call, expected):
    """A configuration or the command line replaces defaults, and not what a call passes."""
    text = f"# float16\nfrom transformers import TrainingArguments\n{decorator}\ndef build(amp=True):\n    return TrainingArguments('out', fp16=amp)\n{call}\n"
    assert ast.unparse(script(text).outline.calls["TrainingArguments"][0].call.keywords[0].value) == expected


def test_a_dtype_is_also_written_as_an_argument():
    """`model.to(cfg["dtype"])` casts; other arguments without a name stay."""
    text = "import torch\ncfg = {'dtype': torch.bfloat16, 'device': 'cuda'}\nmodel.to(cfg['device'], cfg['dtype'])\n"
    (site,) = script(text).outline.calls["to"]
    assert ast.unparse(site.call) == "model.to(cfg['device'], torch.bfloat16)"


def test_fixes_of_expanded_options_leave_a_script_that_parses():
    """A fix of a call edits the place of its own text, also where the options come from a dictionary."""
    text = (
        "import torch\noptions = {'enabled': True}\nscaler = torch.cuda.amp.GradScaler(**options)\n"
        "for x in loader:\n    with torch.cuda.amp.autocast(**options):\n        loss = model(x)\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()\n"
    )
    for finding in findings(text):
        if finding.fix is not None:
            ast.parse(apply(text, finding.fix))
