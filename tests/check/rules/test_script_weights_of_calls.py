"""Weights that a call creates in 16 bits although it names no dtype, or is made through a variable."""

import pytest

from check_scripts import reported

LOOP = """
optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-7)
for batch in loader:
    loss = loss_fn(policy(**batch).logits, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
HEAD = """\
import functools, torch
from functools import partial
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
"""
QWEN = "'Qwen/Qwen2.5-1.5B'"
PARTIAL = f"load = functools.partial(AutoModelForCausalLM.from_pretrained, {QWEN}, torch_dtype='auto')\n"
RUN = "Trainer({model}, {arguments}('out', learning_rate=1e-5), train_dataset=data).train()\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (PARTIAL + "policy = load(attn_implementation='sdpa').cuda()\nref = load().eval().requires_grad_(False)" + LOOP, "HS152"),
        (f"make = lambda: AutoModelForCausalLM.from_pretrained({QWEN}, dtype=torch.bfloat16).to('cuda')\npolicy = make()" + LOOP, "HS151"),
        (f"make = lambda name: AutoModelForCausalLM.from_pretrained(name, dtype='auto')\npolicy = make({QWEN})" + LOOP, "HS152"),
        (
            f"Args = partial(TrainingArguments, bf16=True)\nfetch = AutoModelForCausalLM.from_pretrained\nm = fetch({QWEN}, dtype='auto')\n"
            + RUN.format(model="m", arguments="Args"),
            "HS152",
        ),
        (
            "class Run:\n    def __init__(self, name):\n"
            "        self.load = partial(AutoModelForCausalLM.from_pretrained, name, dtype=torch.bfloat16)\n"
            f"        self.model = self.load()\n        {RUN.format(model='self.model', arguments='TrainingArguments')}Run({QWEN})\n",
            "HS277",
        ),
    ],
    ids=["partial", "lambda", "parameter", "alias", "attribute"],
)  # fmt: skip
def test_a_load_through_a_variable(text, code):
    """`load()` is a call of what the variable stands for."""
    assert reported(HEAD + text) == {code}


@pytest.mark.parametrize(
    "text",
    [
        PARTIAL + "policy = load(torch_dtype=torch.float32).cuda()" + LOOP,
        PARTIAL + "if small:\n    load = partial(build_small, width=8)\npolicy = load().cuda()" + LOOP,
        PARTIAL + "def run(load):\n    return load()\npolicy = run(build_small)" + LOOP,
    ],
    ids=["replaced argument", "two values", "parameter of the name"],
)
def test_a_variable_that_may_stand_for_something_else(text):
    """Arguments of the call replace those of the partial; a variable that is assigned twice is left alone."""
    assert reported(HEAD + text) == set()


CLIP = """\
import clip, torch
{load}
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-6)
for images, texts in loader:
    loss = loss_fn(model(images, texts)[0], labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOAD = "model, preprocess = clip.load('ViT-B/32', device={device}, jit=False)"
FREEZE = """\
def freeze(model, towers):
    if "visual" in towers:
        model.visual.requires_grad_(False)
    if "text" in towers:
        model.transformer.requires_grad_(False)
"""


@pytest.mark.parametrize(
    "load",
    [
        LOAD.format(device="'cuda'"),
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n" + LOAD.format(device="device"),
        "model = clip.load('RN50')[0]",
        FREEZE + LOAD.format(device="'cuda'") + "\nfreeze(model, args.freeze)",
    ],
)
def test_clip_is_loaded_in_float16(load):
    """OpenAI's CLIP has float16 weights on a GPU; a function that freezes only what is asked for changes nothing about that."""
    assert reported(CLIP.format(load=load)) == {"HS161"}


@pytest.mark.parametrize(
    "load",
    [
        LOAD.format(device="'cuda'") + "\nmodel.float()",
        LOAD.format(device="'cpu'") + "\nmodel.cuda()",
        LOAD.format(device="'cuda'") + "\nfor p in model.parameters():\n    p.data = p.data.float()",
        LOAD.format(device="'cuda'").replace("model", "encoder", 1) + "\nmodel = torch.nn.Linear(512, 10).cuda()",
        FREEZE.replace('    if "visual" in towers:\n    ', "")
        + LOAD.format(device="'cuda'")
        + "\nfreeze(model, args.freeze)\nmodel.head = torch.nn.Linear(512, 10)",
    ],
)
def test_clip_in_float32(load):
    """It is cast, loaded on the CPU, or not what is trained."""
    assert reported(CLIP.format(load=load)) == set()


FABRIC = """\
import torch
from lightning.fabric import Fabric
fabric = Fabric(accelerator='cuda', precision={precision})
{cast}
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
net, optimizer = fabric.setup(net, optimizer)
for x, y in fabric.setup_dataloaders(loader):
    optimizer.zero_grad()
    loss = loss_fn(net(x).float(), y)
    fabric.backward(loss)
    fabric.clip_gradients(net, optimizer, max_norm=1.0)
    optimizer.step()
"""
SHRINK = (
    "def shrink(m, cfg):\n    if cfg.small:\n        return m.to(torch.float16)\n    return m\nnet = shrink(Net(), cfg)"
)


@pytest.mark.parametrize("cast", ["net = Net().half()", "net = Net()\nnet.to(dtype=torch.half)", SHRINK])
def test_float16_weights_in_fabric(cast):
    """The scaler of Fabric rejects their gradients, also where an option casts them."""
    assert reported(FABRIC.format(precision="'16-mixed'", cast=cast)) == {"HS199"}


@pytest.mark.parametrize(
    ("precision", "cast"),
    [
        ("'bf16-mixed'", SHRINK),
        ("args.precision", "net = Net()\nif args.precision == '16-true':\n    net = net.half()"),
        ("'16-mixed'", "net = Net()\nteacher = Net().half().eval()"),
    ],
)
def test_weights_that_fabric_does_not_unscale(precision, cast):
    """Without a loss scale, in true half precision, and of a model that is not trained."""
    assert "HS199" not in reported(FABRIC.format(precision=precision, cast=cast))
