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
