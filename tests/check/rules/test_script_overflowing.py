"""HS270: models whose activations exceed the range of float16, trained in float16."""

import pytest

from check_scripts import findings

HEAD = "import argparse\nimport torch\nfrom transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Trainer, TrainingArguments\n"
LOAD = "model = AutoModelForSeq2SeqLM.from_pretrained({})\n"
FLAN = LOAD.format("'google/flan-t5-base'")
ARGS = "args = TrainingArguments('out', {})\nTrainer(model=model, args=args).train()\n"
FP16 = ARGS.format("fp16=True")


@pytest.mark.parametrize(
    "text",
    [
        FLAN + FP16,
        "name = 'google/mt5-small'\ntokenizer = AutoTokenizer.from_pretrained(name)\n" + LOAD.format("name") + FP16,
        "parser = argparse.ArgumentParser()\nparser.add_argument('--model-name', default='google/t5-v1_1-base')\n"
        "options = parser.parse_args()\n" + LOAD.format("options.model_name") + FP16,
        LOAD.format("'google/gemma-3-4b-it'").replace("Seq2Seq", "Causal") + FP16,
        LOAD.format("'t5-large'") + ARGS.format("fp16=torch.cuda.is_available()"),
        FLAN + "on_gpu = torch.cuda.is_available()\n" + ARGS.format("fp16=on_gpu"),
        FLAN + ARGS.format("**options").replace("args =", "options = dict(fp16=True)\nargs =", 1),
        FLAN + ARGS.format("fp16=not cli.cpu"),
        FLAN + ARGS.format("fp16=False if no_gpu else True"),
        FLAN
        + ARGS.format("**options").replace("args =", "options = dict(fp16=True if use_cuda else False)\nargs =", 1),
        LOAD.format("'google/medgemma-4b-it'") + FP16,
        LOAD.format("'google/shieldgemma-2-4b-it'") + FP16,
        LOAD.format("'bigscience/T0_3B'") + FP16,
        LOAD.format("'google/madlad400-3b-mt'") + FP16,
        LOAD.format("'google/t5-base-lm-adapt'") + FP16,
        FLAN + "from accelerate import Accelerator\naccelerator = Accelerator(mixed_precision='fp16')\n",
        FLAN + "import pytorch_lightning as pl\npl.Trainer(precision=16).fit(module)\n",
    ],
)
def test_float16_with_a_model_that_overflows(text):
    """The checkpoint by a literal, a variable or an option, and float16 by each trainer's own argument."""
    assert [f.code for f in findings(HEAD + text, "HS270")] == ["HS270"]


@pytest.mark.parametrize(
    "text",
    [
        FLAN + ARGS.format("bf16=True"),
        FLAN + ARGS.format("fp16=options.fp16"),
        FLAN + ARGS.format("fp16=torch.cuda.is_bf16_supported() and cli.half"),
        FLAN + ARGS.format("fp16=no_gpu"),
        FLAN + ARGS.format("fp16=True if cli.half else False"),
        LOAD.format("'t5-small'") + FP16,
        LOAD.format("'google/shieldgemma-2b'") + FP16,
        LOAD.format("'google/gemma-2-2b-it'") + FP16,
        LOAD.format("'facebook/bart-base'") + FP16,
        LOAD.format("path") + FP16,
        FLAN + "teacher = AutoModelForSeq2SeqLM.from_pretrained('facebook/bart-large')\n" + FP16,
        "tokenizer = AutoTokenizer.from_pretrained('google/flan-t5-base')\n" + LOAD.format("path") + FP16,
        "from unsloth import FastModel\n" + FLAN + FP16,
    ],
)
def test_other_formats_and_models_are_silent(text):
    """bfloat16, a flag of the run, checkpoints that fit, and files in which another model may be the trained one."""
    assert findings(HEAD + text, "HS270") == []


CLASS = "class Cfg:\n    SIZE = '3-1b'\n    NAME = f'google/gemma-{SIZE}-it'\ncfg = Cfg()\n"
SPLIT = "def has_bf16():\n    return torch.cuda.get_device_capability()[0] >= 8\n"


@pytest.mark.parametrize(
    "text",
    [
        FLAN + ARGS.format("bf16=torch.cuda.is_bf16_supported(), fp16=not torch.cuda.is_bf16_supported()"),
        CLASS + LOAD.format("cfg.NAME") + ARGS.format("fp16=(not torch.cuda.is_bf16_supported())"),
        SPLIT + FLAN + ARGS.format("bf16=has_bf16(), fp16=not has_bf16()"),
        "size = '4b'\n"
        + LOAD.format("f'google/gemma-3-{size}-it'")
        + "old = torch.cuda.get_device_capability()[0] < 8\n"
        "options = dict(fp16=old, bf16=not old)\n" + ARGS.format("**options"),
        "org = 'google'\n"
        + LOAD.format("org + '/mt5-large'")
        + ARGS.format("fp16=torch.cuda.is_available() and not torch.cuda.is_bf16_supported()"),
        LOAD.format("f'google/flan-t5-{cli.size}'")
        + "from accelerate import Accelerator\nmode = 'bf16' if torch.cuda.is_bf16_supported() else 'fp16'\nAccelerator(mixed_precision=mode)\n",
        FLAN
        + "import lightning as L\nL.Trainer(precision='16-mixed' if torch.cuda.get_device_capability()[0] < 8 else 'bf16-mixed').fit(module)\n",
    ],
)
def test_float16_on_a_gpu_without_bfloat16(text):
    """What a script falls back to on an older GPU is advice: others train in bfloat16."""
    found = findings(HEAD + text, "HS270")
    assert [f.severity for f in found] == ["advice"]
    assert found[0].message.startswith("on a GPU without bfloat16 ")


@pytest.mark.parametrize(
    "text",
    [
        FLAN + ARGS.format("bf16=torch.cuda.is_bf16_supported()"),
        CLASS.replace("3-1b", "2-2b")
        + LOAD.format("cfg.NAME")
        + ARGS.format("fp16=not torch.cuda.is_bf16_supported()"),
        LOAD.format("f'google/{cli.name}'") + FP16,
        FLAN
        + "import lightning as L\nL.Trainer(precision='bf16-mixed' if torch.cuda.is_bf16_supported() else '32-true').fit(module)\n",
        FLAN + ARGS.format("fp16=cli.half and not torch.cuda.is_bf16_supported()"),
    ],
)
def test_float32_on_a_gpu_without_bfloat16(text):
    """Nothing computes in float16 there, or an option decides."""
    assert findings(HEAD + text, "HS270") == []
