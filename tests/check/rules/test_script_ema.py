"""HS153: the forms of a moving average of weights, in 16 bits and in float32."""

import pytest

from check_scripts import codes

HEAD = "import copy\nimport torch\n"


@pytest.mark.parametrize(
    "text",
    [
        "model = Net().bfloat16()\nema = copy.deepcopy(model)\nfor p, q in zip(ema.parameters(), model.parameters()):\n"
        "    p.data.mul_(0.999).add_(q.data, alpha=0.001)\n",
        "model = Net().bfloat16()\nema = copy.deepcopy(model)\nfor p, q in zip(ema.parameters(), model.parameters()):\n"
        "    p.mul_(decay)\n    p.add_(q, alpha=1 - decay)\n",
        "def update(target, source, rate):\n    for t, s in zip(target.parameters(), source.parameters()):\n"
        "        t.detach().lerp_(s, 1 - rate)\nmodel = Net().to(torch.bfloat16)\nema = copy.deepcopy(model)\nupdate(ema, model, 0.99)\n",
        "model = Net().half()\nema = copy.deepcopy(model)\nparams = list(ema.parameters())\n"
        "torch._foreach_lerp_(params, list(model.parameters()), 0.001)\n",
        "from torch.optim.swa_utils import AveragedModel\nmodel = Net().half()\nema = AveragedModel(model)\n",
        "from timm.utils import ModelEmaV3\nmodel = Net().bfloat16()\nema = ModelEmaV3(model, decay=0.9999)\n",
        "from diffusers.training_utils import EMAModel\nunet = Net()\nema = EMAModel(unet.parameters())\nema.to('cuda', dtype=torch.float16)\n",
        "class EMA:\n    def __init__(self, model):\n        self.copy = copy.deepcopy(model)\nmodel = Net().bfloat16()\nema = EMA(model)\n",
    ],
)
def test_averages_of_16_bit_weights_are_reported(text):
    """Updates in place, fused updates, and the classes of libraries and of the file."""
    assert [code.partition(":")[0] for code in codes(HEAD + text)] == ["HS153"]


@pytest.mark.parametrize(
    "text",
    [
        "model = Net()\nema = copy.deepcopy(model)\nfor p, q in zip(ema.parameters(), model.parameters()):\n"
        "    p.mul_(0.999).add_(q, alpha=0.001)\nmodel.half()\n",
        "model = Net().bfloat16()\nema = copy.deepcopy(model).float()\nfor p, q in zip(ema.parameters(), model.parameters()):\n"
        "    p.mul_(0.999).add_(q, alpha=0.001)\n",
        "model = Net().bfloat16()\nother = copy.deepcopy(model)\nfor p, q in zip(other.parameters(), model.parameters()):\n    p.add_(q, alpha=1.0)\n",
        "class EMA:\n    def __init__(self, model):\n        self.copy = copy.deepcopy(model).float()\nmodel = Net().bfloat16()\nema = EMA(model)\n",
        "from torch.optim.swa_utils import AveragedModel\nmodel = Net().half()\nema = AveragedModel(model).float()\n",
    ],
)
def test_float32_averages_and_other_updates_are_silent(text):
    """Averages in float32, plain sums, and a model that is cast after it was copied."""
    assert codes(HEAD + text) == []


SHADOW = """\
class EMA:
    def __init__(self, model, decay{annotation} = 0.9999):
        self.decay = decay
        self.shadow = {{k: {copy} for k, v in model.state_dict().items(){only}}}

    def update(self, model):
        for k, v in model.state_dict().items():
            self.shadow[k].lerp_({value}, 1 - self.decay)


model = Net().bfloat16()
ema = EMA(model)
"""


@pytest.mark.parametrize("annotation", ["", ": float"])
@pytest.mark.parametrize("only", ["", " if v.is_floating_point()", " if v.dtype.is_floating_point"])
@pytest.mark.parametrize("value", ["v", "v.to(self.shadow[k].dtype)", "v.to(dtype=self.shadow[k].dtype)"])
def test_a_class_that_only_reads_the_dtype_of_its_copies_is_reported(annotation, only, value):
    """An annotation, a test and a cast to the dtype of the average leave the average in 16 bits."""
    text = HEAD + SHADOW.format(annotation=annotation, only=only, value=value, copy="v.clone()")
    assert [code.partition(":")[0] for code in codes(text)] == ["HS153"]


@pytest.mark.parametrize(
    "copy",
    ["v.clone().float()", "v.clone().to(torch.float32)", "v.detach().clone().to(dtype=dtype)", "v.clone().double()"],
)
def test_a_class_that_chooses_the_dtype_of_its_copies_is_silent(copy):
    """float32 copies, also in a dtype that a caller chooses."""
    text = HEAD + SHADOW.format(annotation=": float", only="", value="v.to(self.shadow[k].dtype)", copy=copy)
    assert codes(text) == []


NAMED = """\
import copy
import torch
from collections import OrderedDict
def update_ema(target, model, decay=0.9999):
    averages = {averages}
    for name, param in model.named_parameters():
        {update}
model = Net().cuda(){cast}
ema = copy.deepcopy(model){float}
update_ema(ema, model)
{after}
"""
IN_PLACE = "averages[name].mul_(decay).add_(param.data, alpha=1 - decay)"
BY_NAME = "OrderedDict(target.named_parameters())"


@pytest.mark.parametrize(
    ("averages", "update", "cast", "upcast", "expected"),
    [
        (BY_NAME, IN_PLACE, ".bfloat16()", "", ["HS153"]),
        ("dict(target.named_parameters())", "averages[name].lerp_(param, 1e-4)", ".half()", "", ["HS153"]),
        ("target.state_dict()", IN_PLACE, ".bfloat16()", "", ["HS153"]),
        ("{n: p.data for n, p in target.named_parameters()}", IN_PLACE, ".bfloat16()", "", ["HS153"]),
        (BY_NAME, "averages[name].mul_(decay); averages[name].add_(param, alpha=1 - decay)", ".half()", "", ["HS153"]),
        (BY_NAME, IN_PLACE, "", "", []),
        (BY_NAME, IN_PLACE, ".bfloat16()", ".float()", []),
        ("{n: p.float() for n, p in target.named_parameters()}", IN_PLACE, ".bfloat16()", "", []),
        (BY_NAME, "averages[name].add_(param.data, alpha=1 - decay)", ".bfloat16()", "", []),
        ("load(path)", IN_PLACE, ".bfloat16()", "", []),
    ],
)
def test_averages_are_looked_up_by_the_names_of_their_parameters(averages, update, cast, upcast, expected):
    """`averages[name].mul_(decay).add_(...)`, with a dictionary of the parameters of the averaged model."""
    text = NAMED.format(averages=averages, update=update, cast=cast, float=upcast, after="")
    assert [code.partition(":")[0] for code in codes(text) if code.startswith("HS153")] == expected


def test_a_cast_after_the_last_update_is_not_that_of_the_average():
    """An average that is cast for its export was updated in float32, wherever the function that updates it is defined."""
    text = NAMED.format(averages=BY_NAME, update=IN_PLACE, cast="", float="", after="ema.half()\ntorch.save(ema, path)")
    assert [code for code in codes(text) if code.startswith("HS153")] == []


BLEND = """\
def {name}(average, model, decay=0.9999):
    params = {table}
    for name, p in model.named_parameters():
        params[name].mul_(decay).add_({value}, alpha=1 - decay)
model = Net().bfloat16()
ema = copy.deepcopy(model){cast}
{name}(ema, model)
"""


@pytest.mark.parametrize("name", ["blend", "update_ema"])
@pytest.mark.parametrize(
    "table", ["OrderedDict(average.named_parameters())", "dict(average.named_parameters())", "average.state_dict()"]
)
def test_an_average_that_is_updated_by_name_is_reported_where_it_is_copied(name, table):
    """The copy has the dtype of its model, whatever the function is called."""
    text = HEAD + BLEND.format(name=name, table=table, value="p.data", cast="")
    assert codes(text) == ["HS153:8"]
    assert codes(HEAD + BLEND.format(name=name, table=table, value="p.data", cast=".float()")) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model = Net().half()\nema = copy.deepcopy(model)\nupdate_ema(ema, model)\n", ["HS153:4"]),
        ("model = Net()\nema = copy.deepcopy(model)\nema.half()\nupdate_ema(ema, model)\n", ["HS153:5"]),
        ("model = Net()\nema = copy.deepcopy(model)\nrun = ModelEMA(ema)\nema.to(torch.bfloat16)\n", ["HS153:6"]),
        ("model = Net().half()\nema = copy.deepcopy(model)\nrun = ModelEMA(ema)\n", []),
        ("model = Net().half()\nema = copy.deepcopy(model).float()\nupdate_ema(ema, model)\n", []),
        ("model = Net().half()\nbest = copy.deepcopy(model)\nsave(best, model)\n", []),
        ("model = Net()\nema = copy.deepcopy(model)\nupdate_ema(ema, model)\nmodel.half()\n", []),
    ],
)
def test_a_copy_that_another_file_averages_has_its_own_dtype(text, expected):
    """A function updates the copy in place; a class may copy it once more, so only a cast of the copy itself counts."""
    assert codes(HEAD + text) == expected
