"""HS154, HS164 and HS165: logits on their way from a model to a loss, through branches, functions and devices."""

import pytest

from check_scripts import findings, script

IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom transformers import AutoModelForCausalLM\n"


def places(text, code="HS154"):
    """The lines and severities of the findings of one rule."""
    return [(f.line, f.severity) for f in findings(text, code)]


BRANCHES = """\
import torch
import torch.nn.functional as F
def train(model, loader, use_amp):
    for x, y in loader:
        if use_amp:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(x){cast}
        else:
            logits = model(x)
        {after}loss = F.cross_entropy(logits, y)
        loss.backward()
"""


@pytest.mark.parametrize(
    ("cast", "after", "expected"),
    [
        ("", "", [(10, "advice")]),
        (".float()", "", []),
        ("", "logits = logits.float()\n        ", []),
        ("", "logits = logits.to(y.device)\n        ", [(11, "advice")]),
        ("", "logits = logits.to(target_dtype)\n        ", []),
    ],
)
def test_the_branch_with_autocast_counts(cast, after, expected):
    """The last assignment is in the branch without autocast; the other one still reaches the loss."""
    assert places(BRANCHES.format(cast=cast, after=after)) == expected


def test_a_loss_inside_the_branch_without_autocast_is_silent():
    """Both branches compute their own loss: the logits of the other branch never get here."""
    text = BRANCHES.format(cast="", after="").replace("\n        loss =", "\n            loss =")
    assert places(text) == []


REGION_IN_METHOD = """\
import torch
import torch.nn.functional as F
class Agent(torch.nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.policy = policy
    def forward(self, ids, use_amp=False):
        with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
            out = self.policy(ids)
            logits = out.logits{cast}
            values = out.values
        return {returned}
    def log_probs(self, ids, actions):
        logits, values = self.forward(ids{flag})
        last = logits[:, -1, :]
        logp = torch.log_softmax(last, dim=-1)
        probs = torch.exp(logp)
        probs = probs.clamp(min={eps}, max=1.0)
        return logp, probs
agent = Agent(policy)
{caller}
"""
METHOD = {"cast": "", "returned": "logits, values", "flag": ", use_amp=True", "eps": "1e-6", "caller": "step(agent)"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [(16, "advice")]),
        ({"flag": ", use_amp=flag"}, [(16, "advice")]),
        ({"flag": ", use_amp=False"}, []),
        ({"flag": ""}, []),
        ({"cast": ".float()"}, []),
        ({"returned": "values, logits"}, []),
        ({"caller": "with torch.autocast('cuda'):\n    agent.log_probs(ids, actions)"}, []),
    ],
)
def test_logits_that_a_method_returns_after_its_region(change, expected):
    """The region ends in `forward`; its flag, a cast, the order of the tuple and a region of the caller decide."""
    assert places(REGION_IN_METHOD.format(**METHOD | change)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"eps": "1e-10"}, [(18, "advice")]), ({"eps": "1e-10", "cast": ".float()"}, []), ({}, [])],
)
def test_a_guard_of_probabilities_after_the_region(change, expected):
    """The exponential of float16 log-probabilities is float16, and 1e-10 is zero there."""
    assert places(REGION_IN_METHOD.format(**METHOD | change), "HS164") == expected


@pytest.mark.parametrize("guard", ["torch.clamp(p, min={})", "p + {}", "p.clamp({})"])
def test_forms_of_a_guard(guard):
    """A clamp as a function or a method, and a sum."""
    text = (
        "import torch\nwith torch.autocast('cuda', dtype=torch.{dtype}):\n    logits = model(x)\n"
        "p = torch.softmax(logits, -1)\nentropy = -(p * torch.log({guard})).sum()\n"
    )
    small = guard.format("1e-9")
    assert places(text.format(dtype="float16", guard=small), "HS164") == [(5, "advice")]
    assert places(text.format(dtype="float16", guard=guard.format("1e-6")), "HS164") == []
    assert places(text.format(dtype="bfloat16", guard=small), "HS164") == []


OWN_FORWARD = """\
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 4)
    {decorator}def forward(self, x):
        {body}
net = Net().cuda()
criterion = torch.nn.CrossEntropyLoss()
for x, y in loader:
    loss = criterion(net(x), y)
    loss.backward()
"""
WITH = "with torch.autocast('cuda', dtype=torch.bfloat16):\n            return self.fc(x)"
DECORATOR = "@torch.autocast('cuda', dtype=torch.bfloat16)\n    "


@pytest.mark.parametrize(
    ("decorator", "body", "expected"),
    [
        ("", WITH, [(12, "warning")]),
        (DECORATOR, "return self.fc(x)", [(12, "warning")]),
        ("", WITH + ".float()", []),
        ("", "return self.fc(x)", []),
    ],
)
def test_a_region_in_the_forward_of_the_model(decorator, body, expected):
    """The model enters autocast itself, and the loss is outside."""
    text = OWN_FORWARD.format(decorator=decorator, body=body)
    assert places(text) == expected


CAST_MODEL = """\
import torch
import torch.nn.functional as F
from project.models import Decoder
class Loop:
    def __init__(self, model, precision):
        self.model = model
        if precision == "bf16":
            self.model = self.model.to(device="cuda", dtype=torch.bfloat16)
        else:
            self.model = self.model.to("cuda")
    def step(self, ids, y):
        logits, _ = self.model(ids)
        loss = F.cross_entropy(logits.view(-1, 9){cast}, y.view(-1))
        loss.backward()
{more}
loop = Loop(Decoder(), option)
"""


@pytest.mark.parametrize(
    ("cast", "more", "expected"),
    [
        ("", "", [(13, "advice")]),
        (".float()", "", []),
        ("", "from accelerate import Accelerator", []),
        ("", "with torch.autocast('cuda'):\n    run()", []),
        ("", "model = Decoder()\nmodel.float()\nLoop(model, option)", []),
    ],
)
def test_a_model_that_an_option_casts(cast, more, expected):
    """The class is in another file and the cast is conditional, so this is advice; autocast and Accelerate are right."""
    assert places(CAST_MODEL.format(cast=cast, more=more)) == expected


def test_a_cast_for_an_export_is_silent():
    """The model is cast after training, in a function that exports it."""
    text = CAST_MODEL.format(cast="", more="").replace('if precision == "bf16"', "if precision == 'export'")
    assert places(text) == []


PASSED_MODEL = (
    IMPORTS
    + """\
class Tuner:
    def load(self, name):
        self.policy = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)
        {prepare}
        self.ref_model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.{ref})
    def log_probs(self, model, ids, device):
        logits = model(ids).logits[0].to(device)
        return F.log_softmax(logits{cast}, dim=-1)
    def step(self, ids, device):
        loss = self.log_probs(self.policy, ids, device) - self.log_probs(self.ref_model, ids, device)
        loss.mean().backward()
"""
)
PREPARE = "self.policy = prepare_model_for_kbit_training(self.policy)"


@pytest.mark.parametrize(
    ("prepare", "ref", "cast", "expected"),
    [
        ("", "float16", "", [(11, "warning")]),
        (PREPARE, "float16", "", [(11, "advice")]),
        (PREPARE, "float32", "", []),
        ("", "float16", ".float()", []),
    ],
)
def test_a_function_that_gets_the_policy_or_the_reference(prepare, ref, cast, expected):
    """Each caller passes its own model; one that is prepared for k-bit training has a float32 head."""
    assert places(PASSED_MODEL.format(prepare=prepare, ref=ref, cast=cast)) == expected


@pytest.mark.parametrize(("name", "count"), [("ref_model", 1), ("reference", 1), ("model", 0)])
def test_log_probabilities_of_a_reference_without_gradients(name, count):
    """A training loss subtracts them; those of the model itself are an evaluation."""
    text = IMPORTS + (
        f"{name} = AutoModelForCausalLM.from_pretrained('gpt2', dtype=torch.bfloat16)\n"
        f"with torch.no_grad():\n    logits = {name}(ids).logits\n    logp = F.log_softmax(logits, dim=-1)\n"
    )
    assert len(places(text)) == count


def test_a_quantized_reference_without_a_dtype_is_advice():
    """bitsandbytes loads the head in float16 if no dtype is given."""
    text = IMPORTS + (
        "ref_model = AutoModelForCausalLM.from_pretrained('gpt2', quantization_config=bnb)\n"
        "with torch.no_grad():\n    logp = F.log_softmax(ref_model(ids).logits, dim=-1)\n"
    )
    assert places(text) == [(6, "advice")]
    assert places(text.replace("quantization_config=bnb", "device_map='auto'")) == []


PASSED_CRITERION = """\
import torch
def train_one_epoch(model, loader, criterion, optimizer, scaler):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = criterion({loss}, y)
        {metric}
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("loss", "metric", "expected"),
    [
        ("out", "acc = accuracy(out, y)", [(6, "advice")]),
        ("out", "hits = (out.argmax(1) == y).sum()", [(6, "advice")]),
        ("out.float()", "acc = accuracy(out, y)", []),
        ("out", "psnr(out, y)", []),
    ],
)
def test_a_criterion_of_another_file(loss, metric, expected):
    """An output whose classes are ranked has a cross-entropy; a regression may promote its output to float32."""
    assert places(PASSED_CRITERION.format(loss=loss, metric=metric)) == expected


CONFIDENCE = """\
import torch
import torch.nn.functional as F
@torch.no_grad()
def predict(model, loader, scores, parts):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.{dtype}):
            logits = model.fc(x) if parts else model(x)
        confidence = F.softmax(logits{cast}, dim=1)
        pred = torch.argmax(confidence, dim=1)
        {use}
"""


@pytest.mark.parametrize(
    ("dtype", "cast", "use", "count"),
    [
        ("float16", "", "scores.extend(confidence.cpu().numpy())", 1),
        ("float16", "", "scores.append(confidence)", 1),
        ("float16", ".float()", "scores.append(confidence)", 0),
        ("float16", "", "scores.append(pred)", 0),
        ("float16", "", "mask = confidence > 0.5", 0),
        ("bfloat16", "", "scores.append(confidence)", 0),
    ],
)
def test_confidences_after_a_float16_region(dtype, cast, use, count):
    """Stored probabilities have three digits; a ranking or a threshold hardly changes."""
    text = CONFIDENCE.format(dtype=dtype, cast=cast, use=use)
    assert len(places(text, "HS165")) == count


def test_a_call_through_an_object_passes_its_argument():
    """`agent.run(use_amp=True)` is a call of `Agent.run`: the default of `use_amp` is not its value."""
    text = (
        "import torch\nclass Agent:\n    def run(self, x, use_amp=False):\n        return self.forward(x, use_amp=use_amp)\n"
        "    def forward(self, x, use_amp):\n        with torch.autocast('cuda', enabled=use_amp):\n            return x\n"
        "agent = Agent()\nagent.run(x, use_amp=True)\n"
    )
    (site,) = script(text).outline.calls["forward"]
    assert site.call.keywords[0].value.value is True


RETURNED = """\
import torch
import torch.nn.functional as F
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

{grad}def unroll(model, hidden, steps):
    for _ in range(steps):
        hidden = model.backbone(hidden)
    logits = model.lm_head(hidden){cast}
    return logits, steps

def main(loader):
    model = {model}
    for x, y in loader:
        logits, steps = unroll(model, x, 4)
        loss = F.cross_entropy(logits.view(-1, 9), y)
        loss.backward()
"""
LOADED = "MambaLMHeadModel.from_pretrained('130m', dtype=torch.bfloat16)"
BUILT = "MambaLMHeadModel(config, dtype=torch.bfloat16)"


@pytest.mark.parametrize("model", [LOADED, BUILT])
@pytest.mark.parametrize(
    ("cast", "grad", "expected"), [("", "", [(15, "warning")]), (".float()", "", []), ("", "@torch.no_grad()\n", [])]
)
def test_logits_among_the_values_that_a_function_returns(model, cast, grad, expected):
    """A head in 16 bits computes the first element of a tuple, which another function passes to the loss."""
    text = RETURNED.format(model=model, cast=cast, grad=grad)
    assert places(text) == expected
    assert places(text.replace("bfloat16", "float32")) == []


def test_the_output_of_a_language_model_that_is_created_in_16_bits():
    """A class of another library with a dtype returns logits in it, as one that is loaded does."""
    text = (
        f"import torch\nimport torch.nn.functional as F\nmodel = {BUILT}\nloss = F.cross_entropy(model(x).logits, y)\n"
    )
    assert places(text) == [(4, "warning")]
    assert places(text.replace("LMHeadModel(", "Backbone(")) == []


ELSEWHERE = """\
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

def evaluate(model, loader):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return [model(x).logits for x in loader]

def train(model, loader):
    for x, y in loader:
        loss = F.cross_entropy(model(x).logits, y)
        loss.backward()

def main(loader):
    model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.bfloat16)
    {call}
    evaluate(model, loader)
"""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("train(model, loader)", [(11, "warning")]),
        ("with torch.autocast('cuda'):\n        train(model, loader)", []),
        ("with context:\n        train(model, loader)", []),
        ("run(train, model)", []),
    ],
)
def test_a_region_elsewhere_in_the_file_is_none_around_the_loss(call, expected):
    """Autocast in the evaluation leaves the loss of the training in 16 bits; one around the call does not."""
    assert places(ELSEWHERE.format(call=call)) == expected


TWO_LOOPS = (
    IMPORTS
    + """\
model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.bfloat16)
def log_probs(model, ids):
    logits = model(ids).logits
    return F.log_softmax(logits, dim=-1)
def loss_of(model, ids):
    return -log_probs(model, ids).mean()
def plain(model, optimizer, loader):
    for ids in loader:
        optimizer.zero_grad()
{forward}
        loss.backward()
        optimizer.step()
def mixed(model, optimizer, loader):
    for ids in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
{call}
mixed(model, torch.optim.SGD(model.parameters(), 0.1), loader)
"""
)
CALL = "plain(model, torch.optim.SGD(model.parameters(), 0.1), loader)"
LOSS = "        loss = loss_of(model, ids)"


@pytest.mark.parametrize(
    ("forward", "call", "expected"),
    [
        (LOSS, CALL, [7]),
        (f"        with torch.autocast('cuda', dtype=torch.bfloat16):\n    {LOSS}", CALL, []),
        (f"        with context:\n    {LOSS}", CALL, []),
        (LOSS, f"with torch.autocast('cuda', dtype=torch.bfloat16):\n    {CALL}", []),
        (LOSS, "", []),
    ],
)
def test_one_of_two_training_loops_has_no_region(forward, call, expected):
    """HS154 reports a loss that one loop computes under autocast and another one, which the file runs, without."""
    assert [f.line for f in findings(TWO_LOOPS.format(forward=forward, call=call), "HS154")] == expected


PREFERENCES = """\
def log_probs(logits, labels):
    {cast}shifted = logits[:, :-1, :]
    return F.log_softmax(shifted, dim=-1).gather(2, labels).sum()
def compare(policy_model, ref_model, batch):
    chosen = policy_model(input_ids=batch).logits
    {context}
        reference = ref_model(input_ids=batch).logits
    return log_probs(chosen, batch) - log_probs(reference, batch)
def train(loader):
    policy = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.{policy})
    ref = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.{ref})
    optimizer = torch.optim.AdamW(policy.parameters())
    for batch in loader:
        compare(policy, ref, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
train(loader)
"""


@pytest.mark.parametrize(
    ("policy", "ref", "context", "cast", "expected"),
    [
        ("bfloat16", "float32", "with torch.no_grad():", "", [(6, "warning")]),
        ("bfloat16", "float32", "with torch.inference_mode():", "", [(6, "warning")]),
        ("bfloat16", "bfloat16", "with torch.no_grad():", "", [(6, "warning")]),
        ("float32", "bfloat16", "with torch.no_grad():", "", []),
        ("bfloat16", "float32", "with torch.no_grad():", "logits = logits.float()\n    ", []),
        ("bfloat16", "float32", "if True:", "", []),  # one of the two formats, which the text does not decide
    ],
)
def test_a_reference_without_gradients_does_not_decide_the_format(policy, ref, context, cast, expected):
    """One function computes the log-probabilities of both models: those of the policy are in its own format."""
    text = IMPORTS + PREFERENCES.format(policy=policy, ref=ref, context=context, cast=cast)
    assert places(text) == expected
