"""HS139 on the forms of settings and parameters that training scripts declare: fields for a format, models of pydantic, namespaces of a call."""

import pytest

from check_scripts import findings

LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""
INNER = LOOP.replace("\n", "\n    ")


def reported(text):
    """The lines at which HS139 is reported."""
    return [f.line for f in findings(text, "HS139")]


FIELDS = """\
import torch
{head}
    name: str = "x"
    lr: float = 0.1
    epochs: int = 1
    batch: int = 2
    seed: int = 3
    {field}
config = Settings()
model = build(config.name, config.lr, config.epochs, config.batch, config.seed)
"""
DATACLASS, PYDANTIC = "@dataclass\nclass Settings:", "\nclass Settings(BaseSettings):"


@pytest.mark.parametrize(
    ("head", "field", "rest", "expected"),
    [
        (DATACLASS, 'amp_dtype: str = "bfloat16"', "", [9]),
        (DATACLASS, 'amp_dtype: str = "bfloat16"', "dtype = config.amp_dtype\n", []),
        (DATACLASS, 'amp_dtype: str = "bfloat16"', "model = Transformer(config)\n", []),  # which may read it
        (DATACLASS, 'amp_dtype: str = "bfloat16"', "opt = optimizer\nopt.zero_grad()\nscaler.step(opt)\n", [9]),
        (DATACLASS, 'dtype: str = "int8"', "", []),
        (PYDANTIC, 'precision: str = Field("fp16", pattern="^(fp16|fp32)$")', "", [9]),
        (PYDANTIC, "use_amp: bool = True", "", [9]),
        (PYDANTIC, "use_amp: bool = True", "log(config.model_dump())\n", []),
        ("\nclass Settings(Base):", "use_amp: bool = True", "", []),  # Base may read it
    ],
)
def test_fields_for_a_format(head, field, rest, expected):
    """A field that names a format decides nothing where the file computes in a format of its own and nothing reads the field."""
    assert reported(FIELDS.format(head=head, field=field) + rest + LOOP) == expected


PARSED = """\
import argparse, torch
def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", action="store_true")
    return parser.parse_args()
class Trainer:
    def __init__(self, args, device):
        self.args, self.device = args, device
    def amp(self):
        return torch.autocast("cuda", dtype=torch.bfloat16, enabled={enabled})
    def restore(self, state):
        for name in ("model", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
def main(args):
    trainer = Trainer(args, "cuda")
    {use}
    INNER
main(get_args())
""".replace("INNER", INNER)


@pytest.mark.parametrize(
    ("enabled", "use", "expected"),
    [
        ("True", "epoch(trainer.amp())", [4]),
        ("self.args.amp", "run(trainer.amp())", []),
        ("True", "build(args)", []),
        ("True", "build(trainer.args)", [4]),
        ("True", "flag = getattr(args, name)", []),
    ],
)
def test_options_that_a_call_parses(enabled, use, expected):
    """`main(parse_args())` makes the parameter of `main` the namespace; a method named like the option is not the option."""
    assert reported(PARSED.format(enabled=enabled, use=use)) == expected


def test_an_option_for_an_amplitude():
    """`--amp` is about mixed precision unless its help says that it is an amplitude."""
    option = '"--amp", type=int, default=2, help="amplification of the kernel"'
    text = PARSED.format(enabled="True", use="pass")
    assert reported(text.replace('"--amp", action="store_true"', option)) == []


def test_a_namespace_that_another_file_receives_unnamed():
    """What a call of another file gets, as in `train(get_args())` of an import, is read there."""
    assert reported(PARSED.format(enabled="True", use="pass").replace("def main", "def other")) == []


STATE = """\
import torch
def backward(state, batch):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = state.model(batch).mean()
    state.scaler.scale(loss).backward()
def step(state):
    state.scaler.step(state.optimizer)
    state.scaler.update()
def window(state, batches):
    for batch in batches:
        backward(state, batch)
    step(state)
def run(model, loader, *, epochs=3, use_fp16=True):
    state = create(model)
    for epoch in range(epochs):
        for batches in loader:
            window(state, batches)
        save(state{use})
"""


@pytest.mark.parametrize(("use", "expected"), [("", [13]), (", use_fp16", [])])
def test_a_flag_of_a_function_that_trains_through_others(use, expected):
    """The function that trains may leave the backward pass and the step to other functions of the file."""
    assert reported(STATE.format(use=use)) == expected


STORED = """\
import torch
class Trainer:
    def __init__(self, model, optimizer, use_amp=True):
        self.model, self.optimizer = model, optimizer
        self.{name} = {value}
        self.scaler = torch.amp.GradScaler("cuda"{flag})
    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16{flag}):
            loss = self.model(x).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""


@pytest.mark.parametrize(
    ("name", "value", "flag", "expected"),
    [
        ("amp_enabled", "use_amp", "", [5]),
        ("use_amp", "use_amp and torch.cuda.is_available()", "", [5]),
        ("use_amp", "bool(use_amp)", "", [5]),
        ("amp_enabled", "use_amp", ", enabled=self.amp_enabled", []),
        ("use_amp", "setup(use_amp)", "", []),  # which may do something about it
    ],
)
def test_a_flag_that_is_stored_under_another_name(name, value, flag, expected):
    """A flag that a class stores and never uses is reported whatever the attribute is called, or which condition it is part of."""
    assert reported(STORED.format(name=name, value=value, flag=flag)) == expected


def test_a_stored_flag_whose_default_is_always_used():
    """A flag that the class reads is no idle one, also where the only call of the file leaves it at its default."""
    text = STORED.format(name="amp_enabled", value="use_amp", flag=", enabled=self.amp_enabled")
    assert reported(text + "Trainer(model, optimizer)\n") == []


def test_a_limit_at_the_top_of_a_script():
    """`MAX_NORM` at the top of a script that trains is the limit of the gradient norm."""
    assert reported("import torch\nMAX_NORM = 1.0" + LOOP) == [2]
    assert reported("import torch\nMAX_NORM = 1.0\nlayer = Embedding(max_norm=MAX_NORM)" + LOOP) == []
