"""HS606: models that are prepared for training in 4 or 8 bits in runs that do not quantize them."""

import pytest

from check_scripts import findings

HEAD = """\
import argparse, torch
from dataclasses import dataclass
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser

"""
LOAD = "model = AutoModelForCausalLM.from_pretrained(name, {}, dtype=torch.bfloat16)\n"
PREPARE = "model = prepare_model_for_kbit_training(model)\n"
PARSER = "parser = argparse.ArgumentParser()\nparser.add_argument('--load_in_8bit', {})\nargs = parser.parse_args()\n"
FIELD = "@dataclass\nclass Options:\n    low: bool = {}\n(options,) = HfArgumentParser(Options).parse_args_into_dataclasses()\n"
FUNCTION = "def configure(bits):\n    if bits == 4:\n        return BitsAndBytesConfig(load_in_4bit=True)\n    {}\n"
METHOD = """\
def load(name, low={default}):
    model = AutoModelForCausalLM.from_pretrained(name, load_in_8bit=low, dtype=torch.bfloat16)
    return prepare_model_for_kbit_training(model)
load('x')
"""
CHOSEN = "chosen = None\nif small:\n    chosen = BitsAndBytesConfig(load_in_4bit=True)\n" + LOAD.format(
    "quantization_config=chosen"
)
OPTION = LOAD.format("load_in_8bit=args.load_in_8bit")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (PARSER.format("action='store_true'") + OPTION + PREPARE, 1),
        (PARSER.format("action='store_true'") + OPTION + "if args.load_in_8bit:\n    " + PREPARE, 0),
        (PARSER.format("action='store_false'") + OPTION + PREPARE, 0),
        (FIELD.format(False) + LOAD.format("load_in_4bit=options.low") + PREPARE, 1),
        (FIELD.format(True) + LOAD.format("load_in_4bit=options.low") + PREPARE, 0),
        (FUNCTION.format("return None") + LOAD.format("quantization_config=configure(cli.bits)") + PREPARE, 1),
        (FUNCTION.format("raise ValueError") + LOAD.format("quantization_config=configure(cli.bits)") + PREPARE, 0),
        (CHOSEN + PREPARE, 1),
        (CHOSEN + "if chosen is not None:\n    " + PREPARE, 0),
        (CHOSEN + "if chosen:\n    " + PREPARE, 0),
        (CHOSEN + "if other is not None:\n    " + PREPARE, 1),
        (METHOD.format(default=False), 1),
        (METHOD.format(default=True), 0),
        (LOAD.format("load_in_8bit=False") + PREPARE, 1),
        (LOAD.format("load_in_8bit=False, quantization_config=quantized") + PREPARE, 0),
    ],
)
def test_quantization_that_is_off_by_default(text, count):
    """An option, a field, a parameter or a function of the file decides whether the model is quantized; the preparation does not ask."""
    assert len(findings(HEAD + text, "HS606")) == count
