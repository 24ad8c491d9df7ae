"""Forms of public scripts whose findings a reader judged false, each with the nearest form that stays a finding."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule reports something."""
    return [f.line for f in findings(text, code)]


SUBCLASSED = """\
from transformers import Trainer, TrainingArguments
class Weighted(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()
args = TrainingArguments("out"{options})
Weighted(model, args).train()
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (", bf16=True", []),
        (", fp16=False", []),
        (", fp16=True", [5]),
        ("", [5]),  # `accelerate launch --mixed_precision fp16`
        (", bf16=use_bf16, fp16=not use_bf16", [5]),
        (", bf16=True, deepspeed='ds.json'", [5]),
    ],
)
def test_a_trainer_that_scales_nothing_is_not_bypassed(options, expected):
    """The Trainer has a scaler in fp16 only: `loss.backward()` is its own backward where every argument excludes that."""
    assert lines(SUBCLASSED.format(options=options), "HS185") == expected


IDLE = """\
import torch
class Runner:
    def __init__(self, model, optimizer):
        self.model, self.count = model, 0
        self.optimizer = optimizer
    def run(self):
        for x in loader:
            self.model(x)
            {step}
def main():
    model = load_model()
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    {use}
    Runner(model, optimizer).run()
main()
"""


@pytest.mark.parametrize(
    ("step", "use", "expected"),
    [
        ("# self.optimizer.step()", "schedule = get_cosine_schedule_with_warmup(optimizer, 10, 100)", []),
        ("pass", "optimizer = model.add_groups(optimizer)", []),
        ("pass", "print(len(optimizer.param_groups))", []),
        ("self.optimizer.step()", "pass", [14]),
        ("pass", "train_one_epoch(model, optimizer)", [14]),
        ("pass", "states = [optimizer]", [14]),
        ("pass", "return optimizer", [14]),
    ],
)
def test_an_optimizer_that_never_steps_rounds_nothing(step, use, expected):
    """A file whose step is commented out, and that passes its optimizer to no other code, updates no weights."""
    assert lines(IDLE.format(step=step, use=use), "HS151") == expected


BENCHMARK = """\
import torch
if __name__ == "__main__":
    torch.set_default_dtype(torch.bfloat16)
    weight = torch.randn(8, 8, requires_grad=True)
    {optimizer}
    for x in inputs:
        kernel(x, weight).backward(gradient)
        {step}
"""


@pytest.mark.parametrize(
    ("optimizer", "step", "expected"),
    [
        ("expected = weight.clone()", "compare(weight.grad)", []),
        ("sgd = torch.optim.SGD([weight], lr=0.1)", "sgd.step()", [3]),
        ("updates = make(weight)", "updates.step()", [3]),
    ],
)
def test_a_file_without_an_optimizer_trains_nothing_in_the_default_dtype(optimizer, step, expected):
    """The benchmark of a kernel runs backward under a 16-bit default and updates no weights."""
    assert lines(BENCHMARK.format(optimizer=optimizer, step=step), "HS162") == expected


SEARCH = """\
import torch
def find(model, data, accumulation_steps):
    optimizer = torch.optim.AdamW(model.parameters())
    {loop}:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(data[:16]) / accumulation_steps
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        {rest}
"""


@pytest.mark.parametrize(
    ("loop", "rest", "expected"),
    [
        ("for batch_size in (8, 16, 32)", "pass", []),
        ("while batch_size < limit", "batch_size *= 2", []),
        ("for batch in data", "pass", [9]),
        ("while step < limit", "step += 1", [9]),
    ],
)
def test_a_search_for_a_batch_size_accumulates_nothing(loop, rest, expected):
    """A loop over batch sizes measures the memory of one step each; its model is not the one that is trained."""
    assert lines(SEARCH.format(loop=loop, rest=rest), "HS181") == expected


REGISTERED = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
{model}
class Preference(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return preference_loss(model(**inputs).logits)
model = AutoModelForCausalLM.from_pretrained("saved")
args = TrainingArguments("out", gradient_accumulation_steps=4)
Preference(model, args).train()
"""
IN_FILE = """\
class Net(torch.nn.Module):
    def forward(self, input_ids{kwargs}):
        return self.head(input_ids)
AutoModelForCausalLM.register(NetConfig, Net)"""


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("from model import Net, NetConfig\nAutoModelForCausalLM.register(NetConfig, Net)", []),
        (IN_FILE.format(kwargs=", labels=None"), []),
        (IN_FILE.format(kwargs=", **kwargs"), [8]),
        ("", [5]),
    ],
)
def test_a_registered_model_may_leave_the_division_to_the_trainer(model, expected):
    """The Trainer divides the loss itself for a forward without `**kwargs`, and the project's own model may have one."""
    assert lines(REGISTERED.format(model=model), "HS180") == expected


def message(text, code):
    """The message of the only finding of a rule."""
    (finding,) = findings(text, code)
    return finding.message


CHOSEN = """\
import torch
from peft import get_peft_model
model = load_model()
if config.use_lora:
    model.requires_grad_(False)
    model = get_peft_model(model, lora)
else:
    model.to(device, dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for x in loader:
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_condition_is_printed_once():
    """An option that chooses the cast and what is frozen is one condition."""
    assert message(CHOSEN, "HS151").count("`not config.use_lora`") == 1


MEASURED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    {measure}
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("log(sum(p.grad.norm() for p in model.parameters()))", "the norm of `p.grad` is measured"),
        ("log(torch.norm(model.head.weight.grad))", "the norm of `model.head.weight.grad` is measured"),
        ("log(torch.nn.utils.clip_grad_norm_(ps, float('inf')))", "`clip_grad_norm_` measures the norm"),
    ],
)
def test_a_message_names_whose_norm_is_measured(measure, expected):
    """The tensor of `p.grad.norm()` is the gradient, and `norm` is no tensor."""
    assert message(MEASURED.format(measure=measure), "HS110").startswith(expected)


UNSCALED_TWICE = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    if scheme == "exact" and not is_approximate:
        scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_message_quotes_the_whole_condition():
    """Both parts of a condition are needed for the second unscale_ to raise."""
    assert "if `scheme == 'exact'` and not `is_approximate`:" in message(UNSCALED_TWICE, "HS105")


STRICT = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    try:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0{strict})
    except RuntimeError as error:
        raise FloatingPointError("gradients are not finite") from error
    if not torch.isfinite(norm):
        raise FloatingPointError("the norm is not finite")
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(("strict", "expected"), [(", error_if_nonfinite=True", [9]), ("", [13])])
def test_the_first_line_that_raises_is_reported(strict, expected):
    """A test of the norm below a clip that raises is not reached."""
    assert lines(STRICT.format(strict=strict), "HS175") == expected


REPEATED = """\
import torch
{constant}scaler = torch.amp.GradScaler("cuda")
{head}    for x in loader:
        for _ in range({size}):
            with torch.autocast("cuda", dtype=torch.float16):
                loss_d = loss_fn(d(x))
            optim_d.zero_grad()
            scaler.scale(loss_d).backward()
            scaler.step(optim_d)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(g(x))
        optim_g.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optim_g)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("constant", "head", "size", "expected"),
    [
        ("D_STEPS = 1\n", "def train(loader):\n", "D_STEPS", []),
        ("D_STEPS = 2\n", "def train(loader):\n", "D_STEPS", [11]),
        ("", "def train(loader, d_steps=1):\n", "d_steps", [10]),
        ("", "def train(loader):\n", "cfg.d_steps", [10]),
    ],
)
def test_a_loop_with_one_iteration_repeats_no_step(constant, head, size, expected):
    """A loop over the constant 1 runs its step once per update; a parameter or setting may have another value."""
    assert lines(REPEATED.format(constant=constant, head=head, size=size), "HS101") == expected


CLOSURE = """\
import torch
def main(args):
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    amp = {amp}
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float16
    scaler = torch.amp.GradScaler(enabled=args.amp and torch.cuda.is_available() and dtype == torch.float16)
    def update(x):
        with torch.autocast(device_type=device, dtype=dtype, enabled=amp):
            loss = loss_fn(model(x))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    for x in loader:
        update(x)
"""


@pytest.mark.parametrize(
    ("amp", "expected"), [("args.amp and torch.cuda.is_available()", []), ("args.amp and args.mixed", [6])]
)
def test_a_region_that_needs_cuda_like_its_scaler(amp, expected):
    """Without CUDA the region is off as well if the variable that enables it asks for CUDA."""
    assert lines(CLOSURE.format(amp=amp), "HS123") == expected


OPTIONAL_NETWORK = """\
import torch
def train(cfg, loader, use_gan):
    d = Discriminator().cuda() if use_gan else None
    use_amp = cfg["amp"] and torch.cuda.is_available()
    scaler = torch.amp.GradScaler("cuda") if (use_amp and {part}) else None
    optimizer = torch.optim.Adam(d.parameters()) if d is not None else None
    for x in loader:
        if d is not None:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
                loss = loss_fn(d(x))
            if scaler:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
"""


@pytest.mark.parametrize(("part", "expected"), [("d", []), ("use_scale", [17])])
def test_a_scaler_that_also_depends_on_the_network_it_trains(part, expected):
    """Where the network exists, `amp and network` is `amp`: the branch without the scaler computes in float32."""
    assert lines(OPTIONAL_NETWORK.format(part=part), "HS123") == expected


OWN_TRAIN = """\
import torch
from transformers import Trainer
class Unlearner(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
    def train(self):
        for batch in self.train_dataset:
            {call}
    def training_step(self, model, inputs):
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        self.sgd.step()
"""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("self.training_step(self.model, batch)", []),
        ("super().train()", [13]),
        ("self.training_step(self.accelerator.prepare(self.model), batch)", [13]),
    ],
)
def test_a_trainer_with_a_loop_of_its_own_bypasses_nothing(call, expected):
    """A `train` that leaves no part of a step to the library has no accelerator to bypass."""
    assert lines(OWN_TRAIN.format(call=call), "HS185") == expected


SAVED_APART = """\
import torch
from checkpoints import save_model_checkpoint, save_optimizer_checkpoint
scaler = torch.amp.GradScaler("cuda")
for epoch in range(epochs):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    save_model_checkpoint(model, optimizer, rank, epoch=epoch)
{more}"""


@pytest.mark.parametrize(
    ("more", "expected"), [("", [12]), ("    save_optimizer_checkpoint(model, optimizer, rank)\n", [13])]
)
def test_the_function_named_for_the_optimizer_saves_it(more, expected):
    """Of two functions of another file that receive an optimizer, the one named for the model saves the weights."""
    assert lines(SAVED_APART.format(more=more), "HS170") == expected


ADAPTED_AVERAGE = """\
import torch
from transformers import AutoModelForCausalLM, TrainerCallback
from peft import get_peft_model
class EMACallback(TrainerCallback):
    def __init__(self, model):
        self.model = model
        self.names = {{n for n, p in model.named_parameters(){condition}}}
    def on_step_end(self, args, state, control, **kwargs):
        self.weights = {{n: w.clone() for n, w in self.model.state_dict().items() if n in self.names}}
model = AutoModelForCausalLM.from_pretrained("x", torch_dtype=torch.bfloat16)
{adapt}callback = EMACallback(model)
"""


@pytest.mark.parametrize(
    ("condition", "adapt", "expected"),
    [
        (" if p.requires_grad", "model = get_peft_model(model, config)\n", []),
        (" if p.requires_grad", "", [11]),
    ],
)
def test_an_average_of_adapters_has_their_format(condition, adapt, expected):
    """An average of the trained weights alone is of adapters, where there are some, and PEFT creates those in float32."""
    assert lines(ADAPTED_AVERAGE.format(condition=condition, adapt=adapt), "HS153") == expected
