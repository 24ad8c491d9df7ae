"""A script and the configuration it runs with, in files next to each other."""

import ast
import json

import pytest

from halfstep.check.config.joint import JointRule, configs_in_script, named_files
from halfstep.check.files.source import Settings, Source
from halfstep.check.rules.config import joint, joint_loop, joint_masters

RULES = (*joint.RULES, *joint_loop.RULES, *joint_masters.RULES)
LOOP = """import deepspeed
import torch

engine, optimizer, _, _ = deepspeed.initialize(model=model, config={config})
for x in loader:
    loss = engine(x)
    engine.backward(loss)
    torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
    engine.step()
"""
FP16 = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}
PLAIN = {"train_batch_size": 8, "zero_optimization": {"stage": 0}, "bf16": {"enabled": False}}

NAMED = """import deepspeed
import torch

def train(model_engine, loader):
    for x in loader:
        model_engine.backward(model_engine(x))
        torch.nn.utils.clip_grad_norm_(model_engine.module.parameters(), 1.0)
        model_engine.step()
"""


def check(text, path="train.py"):
    configs = configs_in_script(ast.parse(text), Source(str(path), text, "python"), Settings())
    return [finding for config in configs for rule in RULES for finding in rule().check(config)]


@pytest.fixture
def write(tmp_path):
    def write(name, config):
        (tmp_path / name).write_text(json.dumps(config))
        return tmp_path / "train.py"

    return write


def test_a_file_named_by_the_script_is_read(write):
    """The configuration next to the script decides whether clipping there is a mistake."""
    path = write("ds.json", FP16)
    (finding,) = check(LOOP.format(config="'ds.json'"), path)
    assert (finding.code, finding.severity, finding.path, finding.line) == ("HS291", "warning", str(path), 8)
    assert check(LOOP.format(config="'ds.json'"), write("ds.json", PLAIN)) == []


def test_a_script_without_its_configuration_gets_advice():
    """If the configuration comes from the command line, the finding is only advice."""
    (finding,) = check(LOOP.format(config="args.config"))
    assert (finding.code, finding.severity) == ("HS291", "advice")


def test_a_script_that_chooses_among_files_is_left_with_advice(write):
    """Two configurations that disagree decide nothing."""
    write("a.json", FP16)
    path = write("b.json", PLAIN)
    (finding,) = check(LOOP.format(config="'a.json' if big else 'b.json'"), path)
    assert finding.severity == "advice"


def test_deepspeed_under_a_condition_is_left_alone():
    """A script that runs with and without DeepSpeed has code for both."""
    text = LOOP.format(config=FP16).replace("engine, opt", "if args.deepspeed:\n    engine, opt")
    assert check(text) == []


def test_the_trainer_is_compared_with_its_file(write):
    """Arguments, written or by default, that contradict the DeepSpeed file are named with both values."""
    path = write("ds.json", FP16 | {"gradient_clipping": 0.5, "train_batch_size": "auto"})
    text = "from transformers import TrainingArguments\nargs = TrainingArguments('o', bf16=True, deepspeed='ds.json')\n"
    (finding,) = check(text, path)
    assert finding.severity == "warning"  # nothing here trains with these arguments
    assert "fp16 is False by default" in finding.message
    assert (
        "max_grad_norm is 1.0 by default, and gradient_clipping of the DeepSpeed configuration is 0.5"
        in finding.message
    )
    (finding,) = check(text.replace("import ", "import Trainer, ") + "Trainer(model, args).train()\n", path)
    assert finding.severity == "error"


def test_trl_defaults_are_not_guessed(write):
    """Configurations of other libraries have other learning rates and formats, so only what is written counts for these."""
    path = write("ds.json", FP16 | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})
    assert check("from trl import SFTConfig\nargs = SFTConfig(deepspeed='ds.json')\n", path) == []
    (finding,) = check("from trl import SFTConfig\nargs = SFTConfig(fp16=False, deepspeed='ds.json')\n", path)
    assert finding.code == "HS298"


def test_only_files_that_exist_are_named(write, tmp_path):
    """Strings that look like file names but do not exist are not read."""
    write("ds.json", FP16)
    text = "a = ['ds.json', 'missing.json', '*.json', 'http://x/y.json', 'a b.yaml']\n"
    files = named_files(ast.parse(text), Source(str(tmp_path / "train.py"), text, "python"))
    assert files == (str(tmp_path / "ds.json"),)


def test_a_name_too_long_for_a_file_names_none(tmp_path):
    """The error of the operating system is not a failure of the check."""
    text = f"a = '{'d' * 5000}.json'\n"
    assert named_files(ast.parse(text), Source(str(tmp_path / "train.py"), text, "python")) == ()


def test_a_broken_or_binary_file_is_left_to_its_own_check(write, tmp_path):
    """A file that cannot be read gives no finding in the script."""
    path = write("ds.json", FP16)
    (tmp_path / "ds.json").write_bytes(b'{"zero_optimization": \xff')
    (finding,) = check(LOOP.format(config="'ds.json'"), path)
    assert finding.severity == "advice"
    (tmp_path / "ds.json").write_text('{"zero_optimization": {')
    assert [f.severity for f in check(LOOP.format(config="'ds.json'"), path)] == ["advice"]


def test_engine_attributes_are_followed():
    """An engine assigned to an attribute of self is recognized."""
    text = LOOP.format(config=FP16).replace("engine", "self.engine")
    assert [f.code for f in check(text)] == ["HS291"]


def test_a_custom_backward_with_the_engines_scale_is_right():
    """engine.scale(loss).backward() is DeepSpeed's supported alternative to engine.backward."""
    text = LOOP.format(config=FP16).replace("engine.backward(loss)", "engine.scale(loss).backward()")
    assert "HS294" not in [f.code for f in check(text)]
    assert "HS294" in [f.code for f in check(text.replace("engine.scale(loss)", "loss"))]


def test_every_rule_is_a_joint_one():
    """Every rule of the module derives from JointRule."""
    assert all(issubclass(rule, JointRule) for rule in RULES)


BARE = """import deepspeed

{engine} = deepspeed.initialize(model=model, config={config}){first}
for x in loader:
    loss = engine(x)
    loss.backward()
    {step}
"""


def bare(config, engine="engine, optimizer, _, _", first="", step="engine.step()", deepspeed=None):
    text = BARE.format(config=config, engine=engine, first=first, step=step)
    configs = configs_in_script(ast.parse(text), Source("train.py", text, "python"), Settings(deepspeed=deepspeed))
    return [(f.code, f.severity) for config in configs for rule in RULES for f in rule().check(config)]


def test_a_bare_backward_is_judged_without_a_configuration():
    """Unknown precision is a warning; stage 0 raises; ZeRO in bf16 is wrong in old releases only."""
    zero = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    assert bare("args.config") == [("HS294", "warning")]
    assert bare(PLAIN) == [("HS294", "error")]
    assert bare(zero) == [("HS294", "advice")]
    assert bare(zero, deepspeed=(0, 18, 2)) == [("HS294", "advice")]
    assert bare(zero, deepspeed=(0, 18, 3)) == []


def test_an_engine_taken_from_the_result_by_index_is_recognized():
    """deepspeed.initialize(...)[0] is the engine."""
    assert bare("args.config", engine="engine", first="[0]") == [("HS294", "warning")]


def test_an_engine_that_only_runs_the_forward_is_reported_for_both_calls():
    """loss.backward() and optimizer.step() around an engine bypass it twice."""
    assert bare("args.config", step="optimizer.step()") == [("HS294", "warning"), ("HS295", "warning")]


def test_the_fp16_branch_of_old_scripts_is_silent():
    """A script that calls optimizer.backward in fp16 scales there."""
    step = "if args.fp16: optimizer.backward(loss)\n    engine.step()"
    assert bare("args.config", step=step) == []


AUTOCAST = """import torch
from accelerate import Accelerator, DeepSpeedPlugin

accelerator = Accelerator(deepspeed_plugin={plugin})
model, optimizer = accelerator.prepare(model, optimizer)
with torch.autocast("cuda"):
    loss = model(x)
"""


def test_a_model_prepared_for_deepspeed_is_an_engine():
    """Autocast around a model that Accelerate runs in DeepSpeed's engine is disabled inside it."""
    (finding,) = check(AUTOCAST.format(plugin="DeepSpeedPlugin(zero_stage=2)"))
    assert (finding.code, finding.severity) == ("HS293", "advice")
    assert check(AUTOCAST.format(plugin="None")) == []


def test_clipping_the_model_that_the_engine_has_is_the_same():
    """The parameters of the model passed to deepspeed.initialize are the engine's."""
    text = LOOP.format(config=FP16).replace("engine.parameters()", "model.parameters()")
    assert [f.code for f in check(text)] == ["HS291"]
    assert check(text.replace("model.parameters()", "other.parameters()")) == []


SMOKE = """\
def smoke_test(loader):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""


def test_a_function_with_its_own_model_clips_as_it_likes():
    """A model of the same name that another function creates does not run in the engine."""
    right = LOOP.format(config=FP16).replace("torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)", "pass")
    assert check(right + SMOKE) == []
    assert [f.code for f in check(right + SMOKE.replace("    model = Net()\n", ""))] == ["HS291"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NAMED, ["HS291"]),
        (NAMED.replace("import deepspeed\n", ""), []),
        (NAMED.replace("import deepspeed", "import deepspeed, colossalai"), []),
        (NAMED.replace("model_engine", "agent"), []),
    ],
)
def test_an_engine_that_another_file_creates_is_known_by_its_name(text, expected):
    """`model_engine` with backward and step is DeepSpeed's in a script that uses DeepSpeed."""
    assert [finding.code for finding in check(text)] == expected


UNDECIDED = """import deepspeed
import torch

ds_config = {{"train_batch_size": 8, "bf16": {{"enabled": flag}}, "zero_optimization": {{"stage": 2}}{more}}}
engine, *_ = deepspeed.initialize(model=model, config=ds_config)
for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = engine(x)
    engine.backward(loss)
    engine.step()
"""


@pytest.mark.parametrize(("more", "count"), [("", 1), (', "torch_autocast": {"enabled": True}', 0), (", **more", 0)])
def test_autocast_around_an_engine_of_an_unknown_mode(more, count):
    """DeepSpeed disables it in every mode; only `torch_autocast`, which a part that is not shown may have, decides."""
    reports = [f for f in check(UNDECIDED.format(more=more)) if f.code == "HS293"]
    assert [f.severity for f in reports] == ["advice"] * count


IN_CLASS = """\
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
DS = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
class Trainer:
    def __init__(self, model, optimizer, loader):
        self.accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=DS){precision})
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def train(self):
        for x, y in self.loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.{called}(x, y)
            self.accelerator.backward(loss)
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("precision", "called", "severities"),
    [
        (", mixed_precision='no'", "model", ["warning"]),  # such an engine runs in float32
        (", mixed_precision='bf16'", "model", ["advice"]),  # Accelerate turns bf16 on in the configuration
        ("", "model", ["advice"]),  # the launcher may
        (", mixed_precision='no'", "teacher", []),
    ],
)
def test_autocast_around_a_prepared_model_of_a_class(precision, called, severities):
    """The variable to which a class assigns the prepared model is the engine."""
    text = IN_CLASS.replace("{precision}", precision).replace("{called}", called)
    assert [f.severity for f in check(text) if f.code == "HS293"] == severities
