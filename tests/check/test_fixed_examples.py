"""Every fix of every rule's examples: the fixed script runs, and the library a configuration is for accepts it."""

import ast
import builtins
import importlib.util
import json
import re
import subprocess
import sys

import pytest

from check_scripts import apply
from fix_runs import PRELUDE, run, same_with_and_without_scaling
from halfstep.check.cases import check_case, source_of_case
from halfstep.check.registry import all_rules
from halfstep.check.rule import ScriptRule

SEVERITIES = {rule.code: rule.severity for rule in all_rules()}
FIXED = [
    (rule, i, j)
    for rule in all_rules()
    for i, text in enumerate(rule.bad)
    for j, finding in enumerate(check_case(rule, text))
    if finding.code == rule.code and finding.fix is not None
]
SCRIPTS = [case for case in FIXED if issubclass(case[0], ScriptRule)]
CONFIGS = [case for case in FIXED if not issubclass(case[0], ScriptRule)]
# The rules whose fix makes scaling exact: the same weights with and without it.
EXACT = {"HS101", "HS102", "HS104"}


def ids(value):
    return value.code if isinstance(value, type) else str(value)


def fixed_text(rule, i, j):
    return apply(rule.bad[i], check_case(rule, rule.bad[i])[j].fix)


@pytest.mark.parametrize(("rule", "i", "j"), SCRIPTS, ids=ids)
def test_each_fixed_example_runs(rule, i, j):
    """With the names that examples leave out, the fixed script runs, and trains what it would without scaling."""
    text = PRELUDE + fixed_text(rule, i, j)
    run(text)
    if rule.code in EXACT and "class " not in rule.bad[i]:
        assert same_with_and_without_scaling(text)


@pytest.mark.parametrize(("rule", "i", "j"), FIXED, ids=ids)
def test_each_fix_causes_no_error_or_warning(rule, i, j):
    """The finding is gone, and the only new findings are advice."""
    before = [f.code for f in check_case(rule, rule.bad[i])]
    after = [f.code for f in check_case(rule, fixed_text(rule, i, j))]
    assert after.count(rule.code) < before.count(rule.code)
    new = {code for code in after if after.count(code) > before.count(code)}
    assert {code for code in new if SEVERITIES[code] != "advice"} == set()


ACCEPTS = """
import json, logging, sys
from deepspeed.runtime.config import DeepSpeedConfig
logging.disable(logging.CRITICAL)
messages = []
for config in json.load(sys.stdin):
    try:
        DeepSpeedConfig(config)
        messages.append("")
    except BaseException as error:
        messages.append(f"{type(error).__name__}: {error}")
print("\\n" + json.dumps(messages))
"""


def data_of(text):
    """A JSON example as plain values, without comments; None for a list."""
    data = json.loads(re.sub(r"//.*", "", text))
    return data if isinstance(data, dict) else None


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="Requires: [deepspeed]")
def test_deepspeed_accepts_each_fixed_configuration():
    """DeepSpeed's own reader accepts what the fixes of its rules write, in one process."""
    texts = [
        (rule, i, fixed_text(rule, i, j))
        for rule, i, j in CONFIGS
        if source_of_case(rule, rule.bad[i]).language == "json"
    ]
    cases = [(rule, i, data) for rule, i, text in texts if (data := data_of(text)) is not None]
    plain = [{key: value for key, value in data.items() if value != "auto"} for _, _, data in cases]
    configs = [{"train_batch_size": 8, **data} for data in plain]
    result = subprocess.run(
        [sys.executable, "-c", ACCEPTS], input=json.dumps(configs), capture_output=True, text=True, check=True
    )
    messages = json.loads(result.stdout.splitlines()[-1])
    rejected = {f"{rule.code} {i}": m for (rule, i, _), m in zip(cases, messages, strict=True) if m}
    assert len(cases) >= 10
    assert rejected == {}


def is_complete(text):
    """Whether an example defines every name that it uses, such as its model."""
    nodes = list(ast.walk(ast.parse(text)))
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {(n.asname or n.name).split(".")[0] for n in nodes if isinstance(n, ast.alias)}
    bound |= {n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    return {n.id for n in nodes if isinstance(n, ast.Name)} <= bound | set(dir(builtins))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_accelerate_and_lightning_accept_each_fixed_call(library):
    """`Accelerator(...)` and `Trainer(...)` as fixed are constructed on the CPU."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"Requires: [{library}]")
    texts = [fixed_text(rule, i, j) for rule, i, j in CONFIGS if re.search(rf"(import|from) {library}", rule.bad[i])]
    texts = [text for text in texts if is_complete(text)]
    assert texts
    calls = [re.sub(r"accelerator=.gpu.", "accelerator='cpu'", text) for text in dict.fromkeys(texts)]
    # float16 needs a GPU in both libraries; the names of the other format have the same form.
    script = "\n".join(call.replace('"fp16"', '"bf16"').replace('"16-mixed"', '"bf16-mixed"') for call in calls)
    command = [sys.executable, "-W", "ignore", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{script}\n{result.stderr[-800:]}"
