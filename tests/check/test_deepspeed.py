"""A DeepSpeed configuration is checked before it is merged: errors stop in one message, warnings become notes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.check.deepspeed import _HANDLED, _OPTIMIZER_RULES, _STOPS, check_deepspeed, merge_deepspeed
from halfstep.check.registry import find_rule
from halfstep.errors import SettingError

WRONG = """{
  "train_batch_size": 8,
  "zero_optimization": {"stage": 2},
  "fp16": {"enabled": true, "hysteresis": 0},
  "gradient_cliping": 1.0
}"""


def test_all_mistakes_are_in_one_message(tmp_path):
    """The message has the file, and for each mistake its line, rule, what happens and what to write."""
    path = tmp_path / "ds_config.json"
    path.write_text(WRONG)
    with pytest.raises(SettingError) as caught:
        merge_deepspeed(path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{path} has 2 mistakes that DeepSpeed would reject or silently train with:"
    assert lines[0].startswith("  line 4: HS213 (hysteresis-below-one): ")
    assert lines[1].endswith("DeepSpeed ignores the unknown key `gradient_cliping`. Rename it to `gradient_clipping`.")


def test_dictionary_text_and_file_are_checked_alike(tmp_path):
    """All three forms have the same findings; a dictionary has no lines."""
    path = tmp_path / "ds_config.json"
    path.write_text(WRONG)
    codes = [
        [finding.code for finding in check_deepspeed(form)] for form in (path, str(path), WRONG, json.loads(WRONG))
    ]
    assert codes[0] == codes[1] == codes[2] == codes[3]
    with pytest.raises(SettingError) as caught:
        merge_deepspeed(json.loads(WRONG))
    assert not re.search(r"line \d", str(caught.value))


def test_small_configuration_is_checked_too():
    """A file that has too few keys to be recognised as DeepSpeed's in a folder is checked when it is passed as one."""
    assert "HS252" in {finding.code for finding in check_deepspeed({"gradient_cliping": 1.0})}


def test_rules_judge_by_the_version():
    """A removed key is an error from the release that removed it on."""
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "curriculum_learning": {"enabled": True}}
    with pytest.raises(SettingError, match="HS256"):
        merge_deepspeed(config)
    assert merge_deepspeed(config, version="0.19.6").stage == 1


def test_warning_becomes_a_note():
    """A warning of a rule is among the notes, with its code."""
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    notes = merge_deepspeed(config).notes
    assert [note for note in notes if note.startswith("HS235 (parameter-offload-ignored): ")]


ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 1e-3}}
NORM = {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}
FP16, BF16 = {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}
AMP, ZERO = {"amp": {"enabled": True, "opt_level": "O2"}}, {"zero_optimization": {"stage": 2}}
# The start of each row of the table in docs/deepspeed.md: configurations that disregard the tip, with a release and the rule.
TIPS = {
    "Use 1-bit Adam": [
        (BF16 | {"optimizer": ONE_BIT}, "0.19.6", "HS245"),
        ({"optimizer": ONE_BIT | {"type": "ZeroOneAdam"}}, "0.19.6", "HS245"),
        (FP16 | ZERO | {"optimizer": ONE_BIT}, "0.19.6", "HS244"),
        (FP16 | {"optimizer": ONE_BIT}, "0.19.6", "HS208"),
        (FP16 | {"optimizer": ONE_BIT | {"type": "OneBitLamb"}}, "0.19.8", "HS246"),
        (FP16 | {"optimizer": {**ONE_BIT, "params": {"comm_backend_name": "gloo"}}}, "0.19.6", "HS247"),
    ],
    "Do not combine Apex AMP": [(AMP | ZERO, "0.19.7", "HS205"), (AMP, "0.19.8", "HS206")],
    "`max_grad_norm`": [
        ({"optimizer": NORM}, "0.19.8", "HS241"),
        (FP16 | ZERO | {"optimizer": NORM}, "0.18.2", "HS241"),
        ({"max_grad_norm": 1.0}, "0.19.8", "HS253"),
    ],
    "An untested optimizer": [
        (BF16 | ZERO | {"optimizer": {"type": "SGD"}}, "0.19.8", "HS242"),
        (ZERO | {"optimizer": {"type": "Lamb"}, "zero_allow_untested_optimizer": True}, "0.19.8", "HS240"),
    ],
    "Defaults": [
        (ZERO | {"fp16": {"enabled": True, "hysteresis": 0}}, "0.19.8", "HS213"),
        (ZERO | {"fp16": {"enabled": True, "initial_scale_power": 32}}, "0.19.8", "HS215"),
    ],
    "fp16 needs loss scaling": [
        (ZERO | {"bf16": {"enabled": True, "loss_scale": 0}}, "0.19.8", "HS251"),
        (ZERO | {"bf16": {"enabled": True, "check_grad_overflow": False}}, "0.19.8", "HS209"),
    ],
}


@pytest.mark.parametrize("tip", TIPS)
def test_every_convergence_tip_is_found_by_the_rule_that_the_docs_name(tip):
    """Each row of the table has a configuration that disregards it, and its rule reports that."""
    page = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text()
    rows = page.partition("## Convergence tips, checked")[2].partition("|---|")[2].splitlines()[1:]
    assert len(rows) == len(TIPS)
    (row,) = (row for row in rows if row.startswith(f"| {tip}"))
    named = row.split(" | ")[2].replace("HS211 to HS218", ", ".join(f"HS{n}" for n in range(211, 219)))
    for config, version, code in TIPS[tip]:
        assert code in named
        assert code in {f.code for f in check_deepspeed({"train_batch_size": 8} | config, version=version)}, config


def test_what_json_cannot_express_is_rejected():
    """A dictionary with objects is rejected before anything is read from it."""
    with pytest.raises(SettingError, match="JSON cannot express"):
        merge_deepspeed({"communication_data_type": object()})


def test_codes_of_the_treatment_exist():
    """Every code in the lists of handled, stopping and optimizer rules is a rule of DeepSpeed configurations."""
    for code in (*_HANDLED, *_STOPS, *_OPTIMIZER_RULES):
        assert find_rule(code).code == code


def test_torch_is_not_imported():
    """Checking and merging a configuration needs no torch."""
    program = "import sys, halfstep.check.deepspeed; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
