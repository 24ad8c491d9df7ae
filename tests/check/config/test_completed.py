"""Dictionaries that are completed by `update`, copied before they are changed, or written with a key twice."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings


def reported(text):
    """The codes of all findings in a script."""
    document = read_document("train.py", text.encode(), "python")
    return {finding.code for finding in check_document(document, Settings(), Selection())}


BASE = (
    "import copy\nimport deepspeed\n"
    "BASE = {'train_batch_size': 8, 'gradient_clipping': 1.0, 'zero_optimization': {'stage': 1}, 'bf16': {'enabled': True}}\n"
)
RUN = "\ndeepspeed.initialize(model=model, config=config)\n"


@pytest.mark.parametrize(
    ("change", "is_reported"),
    [
        ("config = BASE\nconfig.update({'fp16': {'enabled': True}})", False),  # two names for one dictionary
        ("BASE.update({'fp16': {'enabled': True}})\nconfig = BASE", True),
        ("BASE.update(fp16={'enabled': True})\nconfig = BASE", True),
        ("BASE.update({'fp16': {'enabled': False}})\nconfig = BASE", False),
        ("BASE.update(load())\nconfig = BASE", False),
        ("BASE['bf16'].update(enabled=False)\nBASE.update(fp16={'enabled': True})\nconfig = BASE", False),
        ("config = copy.deepcopy(BASE)\nconfig['fp16'] = {'enabled': True}", True),
        ("config = BASE.copy()\nconfig['fp16'] = {'enabled': True}", True),
        ("config = dict(BASE)\nconfig['fp16'] = {'enabled': True}\nconfig['bf16']['enabled'] = False", False),
    ],
)
def test_both_formats_in_a_dictionary_that_is_completed(change, is_reported):
    """What `update` sets, and what a copy gets after it was made, belongs to the configuration."""
    assert ("HS201" in reported(BASE + change + RUN)) is is_reported


@pytest.mark.parametrize(
    ("extra", "is_reported"),
    [("'gradient_clipping': 0.5", True), ("'gradient_clipping': 1.0", False), ("**{'gradient_clipping': 0.5}", False)],
)
def test_a_key_twice_in_one_dictionary(extra, is_reported):
    """Python keeps the last of two values of one key; a dictionary that is merged replaces on purpose."""
    text = f"import deepspeed\nconfig = {{'train_batch_size': 8, 'gradient_clipping': 1.0, 'bf16': {{'enabled': True}}, {extra}}}\n"
    assert ("HS254" in reported(text + RUN)) is is_reported


@pytest.mark.parametrize(("limit", "is_reported"), [("0.5", True), ("1.0", False), ("'auto'", False)])
def test_the_configurations_of_trl_have_the_default_limit_of_the_norm(limit, is_reported):
    """A `gradient_clipping` of 0.5 contradicts the default max_grad_norm of DPOConfig."""
    text = (
        "from trl import DPOConfig, DPOTrainer\n"
        f"DS = {{'zero_optimization': {{'stage': 2}}, 'bf16': {{'enabled': True}}, 'gradient_clipping': {limit}}}\n"
        "args = DPOConfig(output_dir='out', bf16=True, deepspeed=DS)\ntrainer = DPOTrainer(model=model, args=args)\n"
    )
    assert ("HS298" in reported(text)) is is_reported


@pytest.mark.parametrize(
    ("wrap", "is_reported"),
    [("model = wrap(model)", True), ("engine = wrap(model)", False), ("if big:\n        model = wrap(model)", False)],
)
def test_an_engine_that_a_helper_returns_is_passed_to_a_trainer(wrap, is_reported):
    """`model = wrap(model)` makes an engine of the model in every run; under a condition it may not."""
    text = (
        "import deepspeed\nfrom transformers import Trainer\n"
        "DS = {'train_batch_size': 8, 'zero_optimization': {'stage': 1}, 'bf16': {'enabled': True}}\n"
        "def wrap(model):\n    engine, *_ = deepspeed.initialize(model=model, config=DS)\n    return engine\n"
        f"def main(model, args, big):\n    {wrap}\n    Trainer(model=model, args=args).train()\n"
    )
    assert ("HS220" in reported(text)) is is_reported
