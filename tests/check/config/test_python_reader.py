"""Configurations in scripts: what is written is read, what is not is unknown."""

import ast

import pytest

from halfstep.check.config.joint import configs_in_script
from halfstep.check.files.source import Settings, Source
from halfstep.hardware.devices import find_devices
from halfstep.precision.node import UNKNOWN


def read(text, **settings):
    return configs_in_script(ast.parse(text), Source("train.py", text, "python"), Settings(**settings))


def deepspeed(text):
    return [config for config in read(text) if config.kind == "deepspeed"]


def test_a_dictionary_is_found_by_its_keys():
    """A DeepSpeed dictionary needs no particular name, and its places are those of the script."""
    text = (
        "import deepspeed\nconf = {\n    'zero_optimization': {'stage': 2},  # \u00e9\n    'fp16': {'enabled': True}}\n"
    )
    (config,) = deepspeed(text)
    assert config.value("fp16", "enabled") is True
    place = config.where(config.entry("fp16", "enabled"))
    assert (place.path, place.line, place.column) == ("train.py", 4, 14)


def test_columns_count_characters_not_bytes():
    """ast counts bytes of UTF-8; a finding counts characters."""
    text = "import deepspeed\nx = ['\u00e9\u00e9\u00e9', {'zero_optimization': {'stage': 2}}]\n"
    (config,) = deepspeed(text)
    place = config.entry("zero_optimization").key_span
    assert text[place.start : place.end] == "'zero_optimization'"


def test_dict_calls_and_constants_are_read():
    """dict(...) is a dictionary, and a name bound once to a literal is that literal."""
    text = "import deepspeed\nSTAGE = 3\nconf = dict(zero_optimization=dict(stage=STAGE), fp16=dict(enabled=True, loss_scale=-1))\n"
    (config,) = deepspeed(text)
    assert config.value("zero_optimization", "stage") == 3
    assert config.value("fp16", "loss_scale") == -1


@pytest.mark.parametrize(
    "text",
    [
        "def make(stage):\n    return {'zero_optimization': {'stage': stage}}\n",
        "stage = 2\nstage = 3\nconf = {'zero_optimization': {'stage': stage}}\n",
        "for stage in (1, 2):\n    conf = {'zero_optimization': {'stage': stage}}\n",
        "conf = {'zero_optimization': {'stage': 2 if big else 1}, 'fp16': {'enabled': True if half else False}}\n",
        "conf = {'zero_optimization': {'stage': 2}}\nconf['zero_optimization']['stage'] = args.stage\n",
        "conf = {'zero_optimization': {'stage': 2}}\nconf['zero_optimization'].update(stage=args.stage)\n",
        "conf = {'zero_optimization': {**base}}\n",
    ],
)
def test_what_a_run_decides_is_unknown(text):
    """Variables, branches, later changes and unpacking leave a value open."""
    (config,) = deepspeed("import deepspeed\n" + text)
    assert config.value("zero_optimization", "stage") is UNKNOWN


def test_a_dictionary_changed_beyond_reading_is_left_alone():
    """update() with an unknown value may change everything, so there is no configuration to check."""
    assert deepspeed("import deepspeed\nconf = {'zero_optimization': {'stage': 2}}\nconf.update(load())\n") == []


@pytest.mark.parametrize(
    ("text", "kind", "origin"),
    [
        ("import transformers as tf\ntf.TrainingArguments('o', fp16=True)\n", "transformers", "TrainingArguments"),
        ("from trl import SFTConfig as C\nC(bf16=True)\n", "transformers", "SFTConfig"),
        (
            "from transformers import TrainingArguments as T\nclass Mine(T):\n    x = 1\nMine(fp16=True)\n",
            "transformers",
            "",
        ),
        ("import pytorch_lightning as pl\npl.Trainer(precision=16)\n", "lightning", "Trainer"),
        ("from lightning.fabric import Fabric\nFabric(precision='bf16')\n", "lightning", "Fabric"),
        ("from accelerate import Accelerator\nAccelerator(mixed_precision='fp16')\n", "accelerate", "Accelerator"),
        ("import halfstep\nhalfstep.Engine(m, o, precision='bf16')\n", "halfstep", "Engine"),
        ("from halfstep import Policy\nPolicy.parse('bf16')\n", "halfstep", "Policy.parse"),
    ],
)
def test_calls_are_found_through_their_imports(text, kind, origin):
    """Aliases, subclasses and dotted names lead to the tool that is called."""
    (config,) = read(text)
    assert config.kind == kind
    assert origin in config.origin


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import Trainer\nTrainer(precision=16)\n",
        "class TrainingArguments:\n    pass\nTrainingArguments(fp16=True, bf16=True)\n",
        "from mine import Accelerator\nAccelerator(mixed_precision='x')\n",
        "x = {'stage': 2, 'fp16': True}\nprint('deepspeed')\n",
    ],
)
def test_namesakes_are_left_alone(text):
    """A class of the same name from elsewhere is not the tool's."""
    assert read(text) == ()


def test_a_table_of_reasons_by_key_is_no_configuration():
    """A table of DeepSpeed keys with sentences as values documents a configuration; it is not one."""
    keys = ("train_micro_batch_size_per_gpu", "elasticity", "sparse_gradients", "zero_allow_untested_optimizer")
    table = ", ".join(f"'{key}': 'why {key} is not read here'" for key in keys)
    assert read(f"import deepspeed\nREASONS = {{{table}}}\n") == ()


def test_a_dictionary_passed_to_deepspeed_is_a_configuration():
    """Whatever its keys, a dictionary passed to deepspeed.initialize is a configuration with that origin."""
    text = "import deepspeed\nc = {'train_batch_size': 8}\nengine, *_ = deepspeed.initialize(model=m, config=c)\n"
    (config,) = deepspeed(text)
    assert config.origin == "deepspeed.initialize"


RETURNED = """\
import deepspeed
def {name}(stage):
    zero = {{"stage": stage, "overlap_comm": True}}
    {dictionary}
def evaluation():
    zero = {{"stage": 0}}
    return zero
"""
DICTIONARY = "{'train_batch_size': 8, 'train_micro_batch_size_per_gpu': 1, 'zero_optimization': zero}"


@pytest.mark.parametrize(
    ("name", "is_strict"), [("get_train_ds_config", True), ("deepspeed_config", True), ("words", False)]
)
def test_a_dictionary_that_a_function_returns_goes_by_its_name(name, is_strict):
    """The name of the function shows what a dictionary without a variable is for."""
    (config,) = deepspeed(RETURNED.format(name=name, dictionary=f"return {DICTIONARY}"))
    assert config.strict is is_strict


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("run(deepspeed_config={part})", "train.py"),
        ("everything = {{'model': 'x', 'deepspeed': {part}}}", "train.py"),
        ("class DeepSpeedConfig:\n    def make(self):\n        return {part}", "train.py"),
        ("def make():\n    return {part}", "ds_utils.py"),
    ],
)
def test_the_names_around_a_dictionary_show_what_it_is_for(text, path):
    """An argument, a key, a class and a file; without one of them the keys may be another program's."""
    part = "{'train_batch_size': 8, 'zero_optimization': {'stage': 2}}"
    text = f"import deepspeed\n{text.format(part=part)}\n"
    configs = configs_in_script(ast.parse(text), Source(path, text, "python"), Settings())
    assert [c.strict for c in configs if c.kind == "deepspeed"] == [True]
    plain = "import deepspeed\nrun(config=" + part + ")\n"
    assert [c.strict for c in deepspeed(plain)] == [False]


def test_a_part_in_a_variable_of_the_function_is_read():
    """`"zero_optimization": zero` is the dictionary that this function binds, not the one of another function."""
    (config,) = deepspeed(RETURNED.format(name="make", dictionary=f"return {DICTIONARY}"))
    assert config.value("zero_optimization", "overlap_comm") is True
    changed = f"zero['overlap_comm'] = False\n    return {DICTIONARY}"
    (config,) = deepspeed(RETURNED.format(name="make", dictionary=changed))
    assert config.value("zero_optimization", "overlap_comm") is UNKNOWN


@pytest.mark.parametrize(
    ("dictionary", "call"),
    [
        (f"return {DICTIONARY}", "deepspeed.initialize(model=model, config=make(2))"),
        (f"return {DICTIONARY}", "cfg = make(2)\ndeepspeed.initialize(model=model, config=cfg)"),
        (f"out = {DICTIONARY}\n    return out", "cfg = make(2)\ndeepspeed.initialize(model=model, config=cfg)"),
        (f"return {DICTIONARY}", "import copy\ndeepspeed.initialize(model=model, config=copy.deepcopy(make(2)))"),
    ],
)
def test_a_dictionary_is_followed_from_the_function_that_returns_it_to_the_call(dictionary, call):
    """DeepSpeed gets what the function returns, itself, in a variable or as a copy."""
    config, *_ = deepspeed(RETURNED.format(name="make", dictionary=dictionary) + call + "\n")
    assert (config.origin, config.strict) == ("deepspeed.initialize", True)


@pytest.mark.parametrize(
    ("change", "enabled"),
    [
        ("ds_config['bf16' if ok else 'fp16'] = {'enabled': True}", UNKNOWN),
        ("ds_config['fast' if ok else 'slow'] = {'enabled': True}", True),
        ("part = {'bf16': {'enabled': True}}\nds_config.update(part)", UNKNOWN),
        ("part = {'steps_per_print': 10}\nds_config.update(part)", True),
    ],
)
def test_a_change_by_two_keys_or_by_another_dictionary_is_followed(change, enabled):
    """The keys that may be set are unknown, and all others are read as before."""
    text = "ds_config = {'zero_optimization': {'stage': 2}, 'bf16': {'enabled': True}}\n"
    (config,) = [c for c in deepspeed(f"import deepspeed\n{text}{change}\n") if c.entry("zero_optimization")]
    assert config.value("bf16", "enabled") is enabled
    assert config.value("zero_optimization", "stage") == 2


def test_a_dictionary_that_extends_another_one_has_its_keys():
    """`{**base, "bf16": ...}` is the base with the keys that follow in their place; an unknown base hides keys."""
    text = "import deepspeed\nbase = {'train_batch_size': 8, 'bf16': {'enabled': False}}\nds = {**base, 'zero_optimization': {}, 'bf16': {'enabled': True}}\n"
    config = deepspeed(text)[-1]
    assert (config.value("train_batch_size"), config.value("bf16", "enabled"), config.root.open) == (8, True, False)
    config = deepspeed(text.replace("**base", "**load()"))[-1]
    assert (config.value("train_batch_size"), config.root.open) == (UNKNOWN, True)


def test_dictionaries_that_repeat_each_other_are_read_quickly():
    """Each dictionary contains the one before it twice: only a few levels are followed."""
    levels = "".join(f"d{i} = {{'a': d{i - 1}, 'b': d{i - 1}}}\n" for i in range(1, 60))
    text = f"import deepspeed\nd0 = {{'a': 1}}\n{levels}ds_config = {{'zero_optimization': {{'stage': 2}}, 'x': d59}}\n"
    assert len(deepspeed(text)) == 1


def test_a_dictionary_of_another_program_is_not_strict():
    """mmengine's strategy and the like take their own keys out before DeepSpeed sees the rest."""
    inner = "{'zero_optimization': {'stage': 2}, 'inputs_to_half': [0], 'fp16': {'enabled': True}}"
    assert [c.strict for c in deepspeed(f"import deepspeed\nstrategy = {inner}\n")] == [False]
    assert [c.strict for c in deepspeed(f"import deepspeed\nds_config = {inner}\n")] == [True]


def test_formats_asked_of_torch_are_read_only_for_hardware():
    """autocast and dtypes matter here only once a GPU is named."""
    text = "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    pass\n"
    assert read(text) == ()
    (config,) = read(text, gpu=find_devices("t4")[0])
    assert config.value("dtype") == "torch.bfloat16"


def test_a_script_without_a_word_of_it_is_not_looked_at(monkeypatch):
    """The words are looked for before the tree is walked."""
    monkeypatch.setattr(ast, "walk", None)
    assert configs_in_script(ast.parse("x = 1\n"), Source("a.py", "x = 1\n", "python"), Settings()) == ()


@pytest.mark.parametrize(
    ("before", "arguments"),
    [
        ("", "**dict(fp16=True)"),
        ("", "**{'fp16': True}"),
        ("options = dict(fp16=True)\n", "output_dir='x', **options"),
        ("options = {'fp16': True}\n", "**options"),
    ],
)
@pytest.mark.parametrize(
    "name", ["transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments", "trl.SFTConfig"]
)
def test_options_of_a_dictionary_are_arguments(name, before, arguments):
    """`**options` of a dictionary in the script are the arguments of the call, and nothing else is unknown."""
    (config,) = read(f"import transformers, trl\n{before}args = {name}({arguments})\n")
    assert config.value("fp16") is True
    assert config.value("bf16") is None


@pytest.mark.parametrize("change", ["options['fp16'] = flag\n", "options.update(other)\n", "options = other\n"])
def test_changed_options_are_unknown(change):
    """A key that the script sets again, or a dictionary that it changes as a whole, is unknown."""
    text = f"import transformers\noptions = dict(fp16=True)\n{change}args = transformers.TrainingArguments(**options)\n"
    configs = read(text)
    assert configs
    assert all(config.value("fp16") is UNKNOWN for config in configs)


@pytest.mark.parametrize(
    "text",
    [
        "with pytest.raises(ValueError):\n    TrainingArguments('x', fp16=True)\n",
        "with self.assertRaises(ValueError):\n    TrainingArguments('x', fp16=True)\n",
        "options = {'zero_optimization': {'stage': 2}}\nwith pytest.raises(ValueError) as error:\n    deepspeed.initialize(config=options)\n",
    ],
)
def test_what_a_test_expects_to_fail_is_no_configuration(text):
    """A call inside `pytest.raises` is wrong on purpose, and so is the dictionary it uses."""
    assert read(f"import deepspeed, pytest\nfrom transformers import TrainingArguments\n{text}") == ()


@pytest.mark.parametrize("call", ["accelerate.Accelerator", "lightning.Trainer"])
def test_options_of_a_dictionary_are_arguments_of_every_tool(call):
    """`**options` is expanded for Accelerate and Lightning as for the Trainer."""
    (config,) = read(f"import accelerate, lightning\noptions = dict(precision='fp16')\nx = {call}(**options)\n")
    assert config.value("precision") == "fp16"


def test_a_dictionary_of_llamafactory_arguments_is_a_recipe():
    """Notebooks write the arguments as a dictionary and dump it."""
    configs = read("args = dict(stage='sft', finetuning_type='full', template='x', pure_bf16=True)\n")
    assert [config.kind for config in configs] == ["llamafactory"]


def test_a_deleted_variable_changes_no_key():
    """`del config` after its use is neither a change nor a failure."""
    text = "config = {'train_batch_size': 8, 'zero_optimization': {'stage': 2}}\nrun(config)\ndel config\n"
    (config, *_) = configs_in_script(ast.parse(text), Source("train.py", text, "python"), Settings())
    assert config.value("zero_optimization", "stage") == 2


def test_each_arm_of_a_ternary_is_a_configuration():
    """Arms of one test are chosen together, at any depth; a block may be an arm."""
    text = "conf = {'zero_optimization': {'stage': 0 if one else 3}, 'fp16': {'enabled': True} if one else None}\n"
    configs = deepspeed("import deepspeed\n" + text)
    assert [(c.value("zero_optimization", "stage"), c.value("fp16", "enabled")) for c in configs] == [
        (0, True),
        (3, None),
    ]
    assert all(config.assembled for config in configs)


TRAINER = "import pytorch_lightning as pl\n"


@pytest.mark.parametrize(
    "text",
    [
        "parser.add_argument('--precision', default=16)\nargs = parser.parse_args()\npl.Trainer.from_argparse_args(args)\n",
        "pl.Trainer.from_argparse_args(args, precision=16)\n",
        "args.precision = 16\npl.Trainer.from_argparse_args(args)\n",
        "options = make()\noptions['precision'] = 16\npl.Trainer(**options)\n",
        "pl.Trainer(precision=options.get('precision', 16))\n",
        "options = {'precision': 16}\ndef build(options):\n    return pl.Trainer(precision=options['precision'])\n",
        "pl.Trainer(precision=getattr(args, 'precision', 16))\n",
        "def build(p):\n    return pl.Trainer(precision=p)\nbuild(16)\n",
        "def build(n, p):\n    return pl.Trainer(precision=p)\nbuild(1, p=16)\n",
        "def run(o):\n    return pl.Trainer(**o)\nrun({'gpus': 1, 'precision': 16, 'max_epochs': 9, 'gradient_clip_val': 1.0})\n",
    ],
)
def test_the_precision_of_a_trainer_is_read_in_every_form(text):
    """By argparse, by a dictionary, by a default and by a call of the function that creates the Trainer."""
    assert 16 in [config.value("precision") for config in read(TRAINER + text) if config.kind == "lightning"]


@pytest.mark.parametrize(
    "text",
    [
        "pl.Trainer.from_argparse_args(args)\n",
        "pl.Trainer(**options)\n",
        "def build(p):\n    return pl.Trainer(precision=p)\nbuild(other())\n",
        "model = {'precision': 16, 'width': 3}\npl.Trainer()\n",
    ],
)
def test_the_precision_of_a_trainer_is_not_guessed(text):
    """Options of another file, a computed argument and a dictionary without the Trainer's keys give none."""
    assert not [c for c in read(TRAINER + text) if c.value("precision") == 16]


@pytest.mark.parametrize(
    ("call", "count"),
    [
        ("Training(gradient_clip_val=1.0, precision='bf16-true')", 1),
        ("Training(max_epochs=3, precision='16-true')", 1),
        ("Training(max_epochs=3, precision='bf16')", 0),
        ("Inference(devices=1, precision='bf16-true')", 0),
        ("Training(rate=0.1, precision='bf16-true')", 0),
    ],
)
def test_settings_of_a_trainer_in_another_file(call, count):
    """A class of the project with a value that only Lightning has, next to arguments of training."""
    configs = read(f"from settings import Training, Inference\nsettings = {call}\n")
    assert [c.kind for c in configs] == ["lightning"] * count


def test_an_empty_dictionary_that_is_filled_key_by_key():
    """`config = {}` that a function fills, branch by branch, and DeepSpeed gets: other places may add the keys that are missing."""
    text = (
        "import deepspeed\ndef settings(args):\n    config = {}\n    if args.half:\n        config['fp16'] = {'enabled': True}\n"
        "        config['adaptive'] = {'enabled': True}\n    else:\n        config['fp16'] = {'enabled': False}\n    return config\n"
        "config = settings(args)\ndeepspeed.initialize(model=model, config=config)\n"
    )
    found = [(c.root.keys(), c.root.open, c.strict) for c in deepspeed(text)]
    assert found == [(("fp16", "adaptive"), True, True), (("fp16",), True, True)]
    assert deepspeed("import deepspeed\nconfig = {}\ndeepspeed.initialize(model=model, config=config)\n") == []


NAMESPACE = "import lightning as L\nfrom omegaconf import OmegaConf\nfrom types import SimpleNamespace\n{made}\nL.Trainer({passed})\n"
NESTED = "cfg = OmegaConf.create({'trainer': {'precision': 16, 'max_epochs': 3}})"
FLAT = "cfg = SimpleNamespace(precision=16, epochs=3)"


@pytest.mark.parametrize(
    ("made", "passed", "value"),
    [
        (NESTED, "precision=cfg.trainer.precision", 16),
        (NESTED, "**cfg.trainer", 16),
        (FLAT, "precision=cfg.precision", 16),
        (FLAT + "\ncfg.precision = choose()", "precision=cfg.precision", UNKNOWN),
        (NESTED + "\ncfg.trainer = choose()", "precision=cfg.trainer.precision", UNKNOWN),
        (NESTED + "\ncfg.update(other)", "precision=cfg.trainer.precision", UNKNOWN),
        (FLAT + "\nif small:\n    " + FLAT, "precision=cfg.precision", UNKNOWN),
        (FLAT.replace("(", "(**options, "), "precision=cfg.precision", UNKNOWN),
    ],
)
def test_the_attributes_of_a_namespace(made, passed, value):
    """An object that is created from a dictionary has its entries, until the script sets one."""
    config = next(c for c in read(NAMESPACE.format(made=made, passed=passed)) if c.origin.endswith("Trainer"))
    assert config.value("precision") == value
