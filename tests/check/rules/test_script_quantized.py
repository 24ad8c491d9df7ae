"""HS267 and HS268: names of dtypes that torch does not have, and 4-bit layers that compute in another format than the run."""

import pytest

from check_scripts import findings

HEAD = "import torch\nfrom transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments\nfrom trl import SFTConfig\n"
LOAD = "model = AutoModelForCausalLM.from_pretrained('x', {})\n"
BNB = "quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype={})\n"


@pytest.mark.parametrize(
    "line",
    [
        BNB.format("'torch.bfloat16'"),
        BNB.format("'bf16'"),
        BNB.format("name").replace("quantized", "name = 'torch.float16'\nquantized", 1),
        "from transformers import BitsAndBytesConfig as Quantized\nQuantized(bnb_4bit_compute_dtype='torch.float16')\n",
        "from transformers import pipeline\npipeline('text-generation', torch_dtype='bf16')\n",
        LOAD.format("torch_dtype='fp16'"),
        LOAD.format("dtype='torch.float16'"),
        LOAD.format("**options").replace("model", "options = dict(torch_dtype='bf16')\nmodel", 1),
        "model = AutoModelForCausalLM.from_config(config, dtype='fp16')\n",
    ],
)
def test_a_name_that_torch_does_not_have(line):
    """By keyword, by a variable and by a dictionary of options."""
    assert [f.code for f in findings(HEAD + line, "HS267")] == ["HS267"]


@pytest.mark.parametrize(
    "line",
    [
        BNB.format("'bfloat16'"),
        BNB.format("torch.bfloat16"),
        BNB.format("args.dtype"),
        LOAD.format("torch_dtype='auto'"),
        LOAD.format("torch_dtype='float16'"),
        LOAD.format("torch_dtype='half'"),
        "from diffusers import Pipe\nPipe.from_pretrained('x', torch_dtype='fp16')\n",  # its own reading of strings
        "mine.from_pretrained('x', torch_dtype='bf16')\n",
    ],
)
def test_a_name_that_torch_has_is_silent(line):
    """Attributes of torch, "auto", unknown values and classes of other packages."""
    assert findings(HEAD + line, "HS267") == []


@pytest.mark.parametrize(
    "rest",
    [
        "args = TrainingArguments('out', bf16=True)\n",
        "args = SFTConfig(output_dir='out', bf16=True)\n",
        "flag = True\nargs = SFTConfig(output_dir='out', bf16=flag, fp16=False)\n",
        "options = {'bf16': True}\nargs = TrainingArguments('out', **options)\n",
        LOAD.format("quantization_config=quantized, torch_dtype=torch.bfloat16") + "Trainer(model).train()\n",
    ],
)
@pytest.mark.parametrize("dtype", ["torch.float16", "'float16'", "torch.half"])
def test_four_bit_layers_in_float16_in_a_bf16_run(dtype, rest):
    """The flag of the arguments, or the dtype of the model that is trained."""
    assert [f.line for f in findings(HEAD + BNB.format(dtype) + rest, "HS268")] == [4]
    assert findings(HEAD + BNB.format("torch.bfloat16") + rest, "HS268") == []


@pytest.mark.parametrize(
    "rest",
    [
        "args = TrainingArguments('out', fp16=True)\n",
        "args = TrainingArguments('out', bf16=ok, fp16=not ok)\n",
        "args = TrainingArguments('out', bf16=False)\n",
        LOAD.format("quantization_config=quantized, torch_dtype=torch.bfloat16") + "model.generate(x)\n",
        "",
    ],
)
def test_other_runs_are_silent(rest):
    """fp16, a flag that only a run decides, and inference."""
    assert findings(HEAD + BNB.format("torch.float16") + rest, "HS268") == []
