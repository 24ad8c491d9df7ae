"""The advice of a finding leads to a configuration without that finding and without a new one."""

import json
import re

import pytest

from halfstep.check.cases import check_case
from halfstep.check.config.deepspeed_schema import PARENT_BLOCK
from halfstep.check.files.document import read_document
from halfstep.check.registry import rules_of
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings
from halfstep.precision.json_tree import parse_json
from halfstep.precision.node import Block, Items

SETTING = re.compile(r'`("\w+": [^`]+)`')
# The settings in this advice are one half of it; the other half, such as removing the old key, is in words.
PARTIAL = {"HS208", "HS241", "HS257"}
BLOCK_OF = {**PARENT_BLOCK, "dtype": "torch_autocast"}
CASES = [
    (rule, text)
    for rule in rules_of("config")
    if rule.code.startswith("HS2")
    for text in rule.bad
    if text.startswith("{")
]


def plain(node):
    if isinstance(node, Block):
        return {entry.key: plain(entry.value) for entry in node.entries}
    return [plain(item) for item in node.items] if isinstance(node, Items) else node.value


def parents(config, key):
    """Every block with this key, wherever it is."""
    hits = [config] if key in config else []
    for value in config.values():
        if isinstance(value, dict):
            hits += parents(value, key)
    return hits


def change(config, setting):
    """Write a setting where its key already is; else in the block it belongs to."""
    for key, value in json.loads("{" + setting + "}").items():
        blocks = parents(config, key)
        if not blocks:
            parent = BLOCK_OF.get(key)
            blocks = [config.setdefault(parent, {}) if parent else config]
        for block in blocks:
            if isinstance(value, dict) and isinstance(block.get(key), dict):
                block[key].update(value)
            else:
                block[key] = value


def codes(config, settings):
    document = read_document("ds_config.json", json.dumps(config).encode(), "json")
    return {finding.code for finding in check_document(document, settings, Selection())}


def advised():
    for rule, text in CASES:
        for finding in check_case(rule, text):
            settings = SETTING.findall(finding.instead.split(", or ")[0])
            if finding.code == rule.code and settings and "..." not in finding.instead:
                yield pytest.param(rule, text, settings, id=f"{rule.code}-{' '.join(settings)[:40]}")


@pytest.mark.parametrize(("rule", "text", "settings"), list(advised()))
def test_advice_leads_to_a_silent_configuration(rule, text, settings):
    """The settings that a finding advises cure it and cause no other finding."""
    config = plain(parse_json(text, "ds_config.json"))
    if rule.code not in {"HS239", "HS241", "HS253"}:
        config.setdefault("gradient_clipping", 1.0)  # HS239 is about files without it
    before = codes(config, rule.settings)
    for setting in settings:
        change(config, setting)
    after = codes(config, rule.settings)
    assert after <= before, after - before
    if rule.code not in PARTIAL:
        assert rule.code not in after


@pytest.mark.parametrize("version", [None, (0, 18, 2), (0, 19, 6), (0, 19, 8)])
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize("stage", [0, 1])
def test_one_bit_advice_is_no_circle(version, mode, stage):
    """Each finding about a 1-bit optimizer advises AdamW, and AdamW with ZeRO is silent in every release."""
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        mode: {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}},
    }
    document = read_document("ds_config.json", json.dumps(config).encode(), "json")
    findings = check_document(document, Settings(deepspeed=version), Selection())
    one_bit = [finding for finding in findings if finding.code in {"HS208", "HS244", "HS245", "HS246"}]
    for finding in one_bit:
        assert '"type": "AdamW"' in finding.instead
        assert "stage 0" not in finding.instead
        assert ("0.19.6" in finding.instead) <= (mode != "fp16")
    config["optimizer"]["type"] = "AdamW"
    config["zero_optimization"]["stage"] = 1
    assert not codes(config, Settings(deepspeed=version)) & {"HS208", "HS244", "HS245", "HS246"}
