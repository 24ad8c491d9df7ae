"""Optimizer objects passed to deepspeed.initialize are judged like the types of a configuration."""

import json

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings

SCRIPT = """import deepspeed
import torch
{imports}
optimizer = {optimizer}
engine, optimizer, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config={config})
"""
ZERO = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
ONE_BIT = "from deepspeed.runtime.fp16.onebit.{module} import {name}"


def codes(optimizer, config, imports="", path="train.py", deepspeed=None):
    text = SCRIPT.format(optimizer=optimizer, config=config, imports=imports)
    findings = check_document(
        read_document(str(path), text.encode(), "python"), Settings(deepspeed=deepspeed), Selection()
    )
    return [f"{f.code}:{f.line}" for f in findings if f.code in {"HS240", "HS242", "HS244", "HS245", "HS246"}]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("torch.optim.SGD(net.parameters(), lr=0.1)", ["HS242:4"]),
        ("torch.optim.RMSprop(net.parameters())", ["HS242:4"]),
        ("torch.optim.AdamW(net.parameters())", []),
        ("deepspeed.ops.adam.FusedAdam(net.parameters())", []),
        ("make_optimizer(net)", []),
        ("args.optimizer", []),
    ],
)
def test_zero_rejects_untested_objects(optimizer, expected):
    """An object of a class that is not in ZeRO's list is reported where it is created; unknown objects are silent."""
    assert codes(optimizer, ZERO) == expected
    assert codes(optimizer, {"train_batch_size": 8}) == []


def test_an_object_in_the_call_itself_is_read():
    """The optimizer may be created in the arguments of deepspeed.initialize."""
    text = f"import deepspeed\nimport torch\nengine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(p), config={ZERO})\n"
    findings = check_document(read_document("train.py", text.encode(), "python"), Settings(), Selection())
    assert "HS242" in {f.code for f in findings}


def test_the_flag_allows_elementwise_objects_only():
    """With the flag SGD is right, and an optimizer that needs layers is still wrong."""
    allowed = {**ZERO, "zero_allow_untested_optimizer": True}
    assert codes("torch.optim.SGD(net.parameters())", allowed) == []
    assert codes("torch.optim.Adafactor(net.parameters())", allowed) == ["HS240:4"]


def test_the_configuration_may_be_a_file(tmp_path):
    """The stage comes from the file next to the script, the finding is in the script, and no fix edits it."""
    (tmp_path / "ds.json").write_text(json.dumps(ZERO))
    path = tmp_path / "train.py"
    assert codes("torch.optim.SGD(net.parameters())", "'ds.json'", path=path) == ["HS242:4"]


@pytest.mark.parametrize(
    ("module", "name"), [("adam", "OnebitAdam"), ("zoadam", "ZeroOneAdam"), ("lamb", "OnebitLamb")]
)
def test_one_bit_objects_have_the_limits_of_the_types(module, name):
    """1-bit objects are incompatible with ZeRO, unverified in bf16, and gone in current releases."""
    imports = ONE_BIT.format(module=module, name=name)
    call = f"{name}(net.parameters())"
    bf16 = {"train_batch_size": 8, "bf16": {"enabled": True}}
    assert codes(call, ZERO, imports) == ["HS244:4"]
    assert codes(call, bf16, imports, deepspeed=(0, 19, 6)) == ["HS245:4"]
    assert codes(call, bf16, imports, deepspeed=(0, 19, 8)) == ["HS246:4"]


BUILT = """import deepspeed
import torch

def build(net, name):
    {body}

def main(net, args):
    {line}
    engine, *_ = deepspeed.initialize(args, net, {passed}, config={config})
"""


@pytest.mark.parametrize(
    ("body", "line", "passed", "expected"),
    [
        ("return torch.optim.SGD(net.parameters())", "opt = build(net, 0)", "opt", {"HS242"}),
        ("return None", "cls = torch.optim.SGD if args.sgd else torch.optim.AdamW", "cls(net.parameters())", {"HS242"}),
        ("opt = torch.optim.SGD(net)\n    return opt", "pass", "build(net, args)", {"HS242"}),
        ("return torch.optim.AdamW(net.parameters())", "opt = build(net, 0)", "opt", set()),
        ("return REGISTRY[name](net.parameters())", "opt = build(net, 0)", "opt", set()),
        ("return load(name)", "opt = build(net, 0)", "opt", set()),
        ("return None", "opt = torch.optim.SGD(net) if args.mine else None", "opt", set()),
    ],
)
def test_builders_and_chosen_classes_are_followed(body, line, passed, expected):
    """An object is read through a function, a variable for its class and by its position; one that is not known is silent."""
    text = BUILT.format(body=body, line=line, passed=passed, config=ZERO)
    findings = check_document(read_document("train.py", text.encode(), "python"), Settings(), Selection())
    assert {f.code for f in findings} & {"HS242"} == expected
