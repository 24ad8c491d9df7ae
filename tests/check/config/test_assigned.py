"""Dictionaries that a script completes after it has written them."""

import ast
import textwrap

import pytest

from halfstep.check.config.python_reader import find_in_script
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Source
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings

HEAD = "import deepspeed\n\n\ndef main(args, model):\n"
CONFIG = '    ds_config = {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}\n'
TAIL = "    return deepspeed.initialize(model=model, config=ds_config)\n"


def script(body, config=CONFIG):
    return HEAD + config + textwrap.indent(textwrap.dedent(body), "    ") + TAIL


def codes(text):
    document = read_document("train.py", text.encode(), "python")
    return {finding.code for finding in check_document(document, Settings(), Selection()) if finding.code >= "HS2"}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ('ds_config["bf16"] = {"enabled": True, "loss_scale": 0}\n', "HS251"),
        ('ds_config["zero_optimization"]["stage"] = 0\nds_config["fp16"] = {"enabled": True}\n', "HS208"),
        (
            """
            if args.dtype == "bf16":
                ds_config["bf16"] = {"enabled": True}
            elif args.dtype == "fp16":
                ds_config["fp16"] = {"enabled": True}
                ds_config["torch_autocast"] = {"enabled": True, "dtype": "float16"}
            """,
            "HS202",
        ),
        (
            """
            ds_config["gradient_accumulation_steps"] = 64
            if args.bf16:
                ds_config["bf16"] = {"enabled": True}
            else:
                ds_config["fp16"] = {"enabled": True}
            """,
            "HS226",
        ),
    ],
)
def test_a_key_set_later_is_part_of_the_configuration(body, code):
    """A mistake in keys that one path sets after the dictionary is reported."""
    assert code in codes(script(body))


@pytest.mark.parametrize(
    "body",
    [
        # The two modes are set on different paths.
        """
        if args.bf16:
            ds_config["bf16"] = {"enabled": True}
        else:
            ds_config["fp16"] = {"enabled": True}
        """,
        # The stage is decided elsewhere as well.
        """
        ds_config["fp16"] = {"enabled": True}
        ds_config["zero_optimization"]["stage"] = 0
        if args.zero:
            ds_config["zero_optimization"]["stage"] = args.stage
        """,
        # A function may change any key.
        'ds_config["fp16"] = {"enabled": True, "hysteresis": 0}\nds_config.update(args.overrides)\n',
        'ds_config["fp16"] = {"enabled": True, "hysteresis": 0}\nds_config[args.key] = 1\n',
        # Another function's variable of the same name.
        'def other(ds_config):\n    ds_config["bf16"] = {"enabled": True}\n\nds_config["fp16"] = {"enabled": True}\n',
    ],
)
def test_keys_of_different_paths_are_not_combined(body):
    """Keys that are never set together, or that the script does not decide, cause no finding."""
    assert codes(script(body)) == set()


def test_an_unconditional_change_replaces_the_value_of_the_dictionary():
    """What a dictionary says before it is changed is not checked."""
    wrong = CONFIG.replace('"stage": 1', '"stage": 0').replace("}}", '}, "fp16": {"enabled": True}}')
    assert "HS208" in codes(script("", wrong))
    assert codes(script('ds_config["zero_optimization"]["stage"] = 2\n', wrong)) == set()


def test_no_edit_is_offered_for_a_dictionary_that_is_changed_later():
    """A fix is for the text of one dictionary."""
    wrong = CONFIG.replace('"gradient_clipping"', '"gradient_cliping"')
    for body, has_fix in (("", True), ('ds_config["bf16"] = {"enabled": True}\n', False)):
        document = read_document("train.py", script(body, wrong).encode(), "python")
        found = [f for f in check_document(document, Settings(), Selection()) if f.code == "HS252"]
        assert [f.fix is not None for f in found] == [has_fix]


def test_the_number_of_branches_is_bounded():
    """A script with many branches is checked in a bounded number of versions."""
    body = "".join(f'if args.n == {i}:\n    ds_config["k{i}"] = {i}\n' for i in range(100))
    text = script(body)
    assert len(find_in_script(ast.parse(text), Source("train.py", text, "python"), Settings())) < 20


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if args.more:\n    ds_config.update(args.more)\n", True),
        ("if args.more is not None:\n    for key, value in args.more.items():\n        ds_config[key] = value\n", True),
        ("if args.more:\n    ds_config['zero_optimization'].update(args.more)\n", True),
        ("ds_config.update(args.more)\n", False),
        ("if args.more:\n    ds_config.update(read(path))\n", False),
        ("if args.more:\n    pass\nelse:\n    ds_config.update(args.more)\n", False),
        ("if args.more:\n    ds_config.update(args.more)\nds_config[key] = value\n", False),
    ],
)
def test_a_dictionary_that_only_some_runs_merge_leaves_what_is_written(body, expected):
    """Without the options of the user, the values are those of the dictionary; a key that is not written may be one of theirs."""
    config = CONFIG.replace('"gradient_clipping": 1.0', '"bf16": {"enabled": True, "loss_scale": 0}')
    found = codes(script(body, config))
    assert ("HS251" in found) == expected
    assert "HS239" not in found


def test_a_loop_that_skips_auto_resolves_nothing():
    """`if value == "auto": continue` leaves the placeholder of another dictionary out, and those of this one as they are."""
    body = "for key, value in more.items():\n    if value == 'auto':\n        {}\n    args[key] = value\n"
    config = CONFIG.replace('"stage": 1', '"stage": 3, "reduce_bucket_size": "auto"')
    assert "HS259" in codes(script(body.format("continue"), config))
    assert "HS259" not in codes(script(body.format("value = 5"), config))


METHODS = """\
import deepspeed

class Engine:
    def __init__(self, model, half):
        self.config = {{"train_batch_size": 8}}
        self.engine, *_ = deepspeed.initialize(model=model, config=self.config)

    def fp16(self):
        self.config["fp16"] = {{"enabled": True, "hysteresis": {hysteresis}}}

    def bf16(self):
        self.config["bf16"] = {{"enabled": True}}

    def zero(self):
        self.config["zero_optimization"] = {{"stage": 3, "reduce_bucket_size": {size}}}
"""


@pytest.mark.parametrize(
    ("hysteresis", "size", "expected"),
    [(0, 1000, {"HS213"}), (2, '"auto"', {"HS259"}), (2, 1000, set())],
)
def test_keys_that_other_methods_set_are_each_checked(hysteresis, size, expected):
    """Each method adds to the dictionary, and which of them run together is unknown: fp16 and bf16 do not conflict."""
    assert codes(METHODS.format(hysteresis=hysteresis, size=size)) == expected
