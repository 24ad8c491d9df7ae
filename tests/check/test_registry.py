"""The list of rules is complete, and loads only what is asked for."""

import json
import subprocess
import sys
from pathlib import Path

import halfstep.check.rules
from halfstep.check.registry import GROUPS, all_rules, find_rule

FOLDER = Path(halfstep.check.rules.__file__).parent


def test_every_module_of_rules_is_listed_once():
    """A family that is not on the list would never be checked."""
    listed = [module for modules in GROUPS.values() for module in modules]
    assert sorted(listed) == sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def test_a_rule_is_found_by_code_and_by_name():
    """In any case; None for anything else."""
    for rule in all_rules():
        assert find_rule(rule.code.lower()) is find_rule(rule.name) is rule
    assert find_rule("HS999") is None


def loaded_after(*args):
    """The modules of rules, and the heavy packages, that a check loads."""
    code = (
        "import sys, json\nimport halfstep.cli.check\n"
        "from halfstep.check.session import check_paths\nfrom halfstep.check.options import Options\n"
        f"check_paths({list(args)!r}, Options(), limit=True)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(json.loads(out))


def test_a_script_loads_no_configuration_rules_and_no_yaml(tmp_path):
    """Nor torch, rich, numpy or the process pool."""
    (tmp_path / "a.py").write_text("import torch\nfrom torch.cuda.amp import GradScaler\nscaler = GradScaler()\n")
    modules = loaded_after(str(tmp_path / "a.py"))
    assert not modules & {"torch", "rich", "numpy", "yaml", "concurrent.futures", "multiprocessing", "tomllib"}
    assert not {m for m in modules if m.startswith("halfstep.check.rules.config_")}


def test_a_json_configuration_loads_no_script_rules_and_no_yaml(tmp_path):
    """The reverse."""
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}')
    modules = loaded_after(str(tmp_path / "ds.json"))
    assert not modules & {"torch", "rich", "numpy", "yaml"}
    assert not {m for m in modules if m.startswith("halfstep.check.rules.script_")}
