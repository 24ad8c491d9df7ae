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
        FLAN + ARGS.format("fp16=not torch.cuda.is_bf16_supported()"),
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
