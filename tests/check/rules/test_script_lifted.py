"""HS151: trained weights that return to float32 in a float16 run, and stay in bfloat16 otherwise."""

import pytest

from check_scripts import findings

SCRIPT = """\
import torch
from accelerate import Accelerator
from diffusers.training_utils import cast_training_params
accelerator = Accelerator(mixed_precision=args.mixed_precision)
weight_dtype = torch.float32
if accelerator.mixed_precision == "fp16":
    weight_dtype = torch.float16
elif accelerator.mixed_precision == "bf16":
    weight_dtype = torch.bfloat16
unet = UNet.from_pretrained(args.model)
unet.requires_grad_(False)
unet.to(accelerator.device, dtype=weight_dtype)
{adapt}
{back}
optimizer = torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad], lr=1e-4)
unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(loss_fn(unet(x), y))
    optimizer.step()
"""
ADAPT = "unet.add_adapter(config)"
FP16 = 'if args.mixed_precision == "fp16":\n    '
CALL = "cast_training_params([unet], dtype=torch.float32)"
LIST = "models = [vae]\n    models.append(unet)\n    cast_training_params(models, dtype=torch.float32)"
LOOP = "for p in unet.parameters():\n        if p.requires_grad:\n            p.data = p.to(torch.float32)"
NESTED = (
    "for model in [unet]:\n        for p in model.parameters():\n            if p.requires_grad:\n"
    "                p.data = p.data.float()"
)


def lines(adapt, back):
    """The lines at which HS151 reports something."""
    return [f.line for f in findings(SCRIPT.format(adapt=adapt, back=back), "HS151")]


@pytest.mark.parametrize("back", [CALL, LIST, LOOP, NESTED])
def test_only_a_float16_run_lifts_the_trained_weights(back):
    """By the function of diffusers, with a list of models, and by loops over the parameters."""
    assert lines(ADAPT, FP16 + back) == [12]


@pytest.mark.parametrize("back", [CALL, f'if args.mixed_precision != "no":\n    {CALL}', f"{FP16}{CALL}\n{CALL}"])
def test_a_cast_in_every_run_is_accepted(back):
    """Trained weights that are float32 in bfloat16 runs too."""
    assert lines(ADAPT, back) == []


@pytest.mark.parametrize(
    "adapt",
    [
        "unet = get_peft_model(unet, config)",
        "unet = inject_lora(unet, config)",
        "add_lora_layers(unet, config)",
        f"{ADAPT}\nunet.to(torch.float32)",
    ],
)
def test_adapters_that_may_be_float32_are_accepted(adapt):
    """PEFT casts those of `get_peft_model` itself, and a function of another file may do it."""
    assert lines(adapt, FP16 + CALL) == []


def test_a_model_that_the_optimizer_does_not_get():
    """The cast of a model that is not trained is none of HS151's business."""
    text = SCRIPT.format(adapt=ADAPT, back=FP16 + CALL).replace("in unet.parameters()", "in probe.parameters()")
    assert findings(text, "HS151") == []


@pytest.mark.parametrize(("last", "expected"), [("unet = unet.to(torch.float32)", [12]), ("unet.float()", [12])])
def test_a_cast_after_the_training_lifts_nothing(last, expected):
    """It is for the file that is saved."""
    text = SCRIPT.format(adapt=ADAPT, back=FP16 + CALL)
    assert [f.line for f in findings(f"{text}{last}\nunet.save_pretrained(path)\n", "HS151")] == expected
