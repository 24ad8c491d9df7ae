"""Every rule module is loaded, and only when its group is needed."""

import json
import subprocess
import sys
from pathlib import Path

import halfstep.check.rules
from halfstep.check.registry import GROUPS, all_rules, find_rule, modules_of, rules_of
from halfstep.check.rules import script as rules_of_scripts

FOLDER = Path(halfstep.check.rules.__file__).parent


def test_every_module_of_rules_is_in_one_group():
    """A module that no group contains would never be checked."""
    listed = [module for group in GROUPS for module in modules_of(group) if module.startswith("halfstep.check.rules.")]
    files = [path.relative_to(FOLDER).with_suffix("").parts for path in FOLDER.rglob("*.py") if path.stem != "__init__"]
    assert sorted(listed) == sorted(".".join(("halfstep.check.rules", *parts)) for parts in files)


def test_a_new_module_needs_no_registration(monkeypatch, tmp_path):
    """A rule in a new file of the package is among the rules of its group."""
    (tmp_path / "brand_new.py").write_text(
        "from halfstep.check.rule import ScriptRule\n\n\n"
        "class BrandNew(ScriptRule):\n    code, name = 'HS199', 'brand-new'\n\n\nRULES = (BrandNew,)\n"
    )
    monkeypatch.setattr(rules_of_scripts, "__path__", [*rules_of_scripts.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "halfstep.check.rules.script.brand_new", raising=False)
    rules_of.cache_clear()
    try:
        assert "HS199" in [rule.code for rule in rules_of("script")]
    finally:
        rules_of.cache_clear()


def test_a_rule_is_found_by_code_and_by_name():
    """Case does not matter; None for anything else."""
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
    """A check of a script also loads no torch, rich, numpy or process pool."""
    (tmp_path / "a.py").write_text("import torch\nfrom torch.cuda.amp import GradScaler\nscaler = GradScaler()\n")
    modules = loaded_after(str(tmp_path / "a.py"))
    assert not modules & {"torch", "rich", "numpy", "yaml", "concurrent.futures", "multiprocessing", "tomllib"}
    assert not {m for m in modules if m.startswith("halfstep.check.rules.config")}


def test_a_json_configuration_loads_no_script_rules_and_no_yaml(tmp_path):
    """A check of a JSON file loads only the rules of configurations."""
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}')
    modules = loaded_after(str(tmp_path / "ds.json"))
    assert not modules & {"torch", "rich", "numpy", "yaml"}
    assert not {m for m in modules if m.startswith("halfstep.check.rules.script")}
