"""HS139: settings of a file that trains, in every form that people write them in, and who may read them."""

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


READ = "model = build({0}name{1}, {0}lr{1}, {0}epochs{1}, {0}batch{1}, {0}seed{1})\n"
CLASS = "class CFG:\n    name = 1\n    lr = 2\n    epochs = 3\n    batch = 4\n    seed = 5\n    use_amp = True\n"
TABLE = "config = {'name': 1, 'lr': 2, 'epochs': 3, 'batch': 4, 'seed': 5, 'use_amp': True}\n"
OF_CLASS, OF_TABLE = READ.format("CFG.", ""), READ.format("config['", "']")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CLASS + OF_CLASS, [8]),
        (CLASS + OF_CLASS + "enabled = CFG.use_amp\n", []),
        (CLASS + OF_CLASS + "log(vars(CFG))\n", []),
        (CLASS + "model = build(CFG.name)\n", []),  # another file may read the rest
        (CLASS.replace("CFG", "Names") + OF_CLASS.replace("CFG", "Names"), []),
        (TABLE + OF_TABLE, [2]),
        (TABLE + OF_TABLE + "enabled = config['use_amp']\n", []),
        (TABLE + OF_TABLE + "train(config)\n", []),
        ("USE_AMP = True\nif __name__ == '__main__':\n    run()\n", [2]),
        ("USE_AMP = True\nenabled = USE_AMP\n", []),
    ],
)
def test_settings_at_the_top_of_a_file(text, expected):
    """A class, a dictionary or a constant is read where the file reads the others, or nowhere."""
    assert reported("import torch\n" + text + LOOP) == expected


COMMAND = """\
import torch, {library}
{decorators}def train(name: str = "x", fp16: bool = False):
    model = build(name)
    {first}
{loop}
{start}
"""


@pytest.mark.parametrize(
    ("library", "decorators", "first", "start", "is_reported"),
    [
        ("click", "@click.command()\n@click.option('--name')\n@click.option('--fp16')\n", "pass", "train()", True),
        ("click", "@click.command()\n@click.option('--fp16')\n", "dtype = pick(fp16)", "train()", False),
        ("click", "@registry.command\n@cached\n", "pass", "train()", False),
        ("typer", "", "pass", "typer.run(train)", True),
        ("fire", "", "pass", "fire.Fire(train)", True),
        ("fire", "", "log(**locals())", "fire.Fire(train)", False),
    ],
)
def test_options_of_a_command(library, decorators, first, start, is_reported):
    """The parameters of a command are the options of the program."""
    text = COMMAND.format(library=library, decorators=decorators, first=first, loop=INNER, start=start)
    assert reported(text) == [2 + decorators.count("\n")] * is_reported


NAMESPACE = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()
{use}
"""


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("if not hasattr(args, 'epochs'): stop()", [4]),
        ("utils.init_distributed_mode(args)", [4]),
        ("loader = DataLoader(ImageDataset(args))", [4]),
        ("wandb.config.update(args)", [4]),
        ("enabled = getattr(args, 'fp16', False)", []),
        ("enabled = getattr(args, name)", []),
        ("engine = build_engine(args)", []),
    ],
)
def test_functions_of_other_files_that_get_all_options(use, expected):
    """Those that are about one other option, data, processes or logs read no precision."""
    assert reported(NAMESPACE.format(use=use) + LOOP) == expected


LIMIT = CLASS.replace("use_amp = True", "MAX_GRAD_NORM = 1.0")
DATACLASS = """\
from dataclasses import dataclass, fields
@dataclass
class TrainConfig:
    name: str = "x"
    lr: float = 0.1
    epochs: int = 1
    batch: int = 2
    seed: int = 3
    {field}
def read(table):
    names = {{f.name for f in fields(TrainConfig)}}
    return TrainConfig(**{{k: v for k, v in table.items() if k in names}})
config = read(load())
"""
OF_DATACLASS = READ.format("config.", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LIMIT + OF_CLASS, [8]),
        (LIMIT + OF_CLASS + "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", [8]),
        (LIMIT + OF_CLASS + "limit = CFG.MAX_GRAD_NORM\n", []),
        (LIMIT + OF_CLASS + "limit = getattr(CFG, 'MAX_GRAD_NORM', 0)\n", []),
        (LIMIT + OF_CLASS + "values = {n: getattr(CFG, n) for n in dir(CFG)}\n", []),
        (LIMIT.replace("1.0", "None") + OF_CLASS, []),  # nothing to clip at
        (LIMIT.replace("MAX_GRAD_NORM = 1.0", "clip_min = 1.0") + OF_CLASS, []),
        (LIMIT.replace("MAX_GRAD_NORM = 1.0", "ACCUM_STEPS = 4") + OF_CLASS, [8]),
        (
            LIMIT.replace("MAX_GRAD_NORM = 1.0", "ACCUM_STEPS = 1") + OF_CLASS,
            [8],
        ),  # another number would change nothing
        (LIMIT.replace("MAX_GRAD_NORM = 1.0", "ACCUM_STEPS = 0") + OF_CLASS, []),
        (LIMIT + OF_CLASS + "clip_gradients(model, CFG)\n", []),  # of another file, which may read it
        (LIMIT + OF_CLASS + "show(CFG)\n", [8]),
        (TABLE.replace("'use_amp': True", "'grad_clip': 0.5") + OF_TABLE, [2]),
        ("GRADIENT_ACCUMULATION_STEPS = 8\nif __name__ == '__main__':\n    run()\n", [2]),
        ("GRADIENT_ACCUMULATION_STEPS = 8\nif __name__ == '__main__':\n    run(GRADIENT_ACCUMULATION_STEPS)\n", []),
        (DATACLASS.format(field="use_bfloat16: bool = False") + OF_DATACLASS, [10]),
        (DATACLASS.format(field="clip_grad_norm: float = 1.0") + OF_DATACLASS, [10]),
        (DATACLASS.format(field="clip_grad_norm: float = 1.0") + OF_DATACLASS + "x = config.clip_grad_norm\n", []),
        (DATACLASS.format(field="use_bfloat16: bool = False") + OF_DATACLASS + "x = getattr(config, key)\n", []),
        (DATACLASS.format(field="use_bfloat16: bool = False") + OF_DATACLASS + "x = getattr(torch, dtype)\n", [10]),
    ],
)
def test_settings_of_a_step(text, expected):
    """The limit of the gradient norm and the number of micro-batches, where this file clips and steps itself."""
    assert reported("import torch\n" + text + LOOP) == expected


def test_a_file_that_leaves_the_step_to_another_may_leave_it_the_limit():
    """Without a step here, the object that steps may read the limit."""
    assert reported("import torch\n" + LIMIT + OF_CLASS + LOOP.replace("optimizer.step()", "trainer.step(CFG)")) == []


@pytest.mark.parametrize(
    ("option", "loop", "expected"),
    [
        ("'--max_grad_norm', type=float, default=1.0", LOOP, [4]),
        ("'--gradient-accumulation-steps', type=int, default=4", LOOP, [4]),
        ("'--max_grad_norm', type=float, default=0.0", LOOP, [4]),  # what a command passes changes nothing
        ("'--grad_accum', type=int, default=1", LOOP, [4]),
        ("'--grad_accum', type=int, default=1", LOOP + "wandb.init(config={'accum': args.grad_accum})\n", [4]),
        ("'--grad_accum', type=int, default=1", LOOP + "save({'accum': args.grad_accum})\n", []),
        ("'--max_grad_norm', type=float, default=1.0", LOOP + "clip(args.max_grad_norm)\n", []),
        ("'--max_norm', type=float, default=1.0", LOOP, []),  # of an embedding, or of anything else
    ],
)
def test_options_of_a_step(option, loop, expected):
    """The same as an option of the command line."""
    text = f"import argparse\nimport torch\nparser = argparse.ArgumentParser()\nparser.add_argument({option})\nargs = parser.parse_args()\n"
    assert reported(text + loop) == expected
