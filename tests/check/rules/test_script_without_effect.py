"""Regions, scalers and steps that change nothing: float32 autocast, a scaler no line uses, a step without gradients."""

import pytest

from check_scripts import reported

REGION = """\
import torch
for x in loader:
    optimizer.zero_grad()
    with {region}:
        loss = model(x)
        loss.backward()
        optimizer.step()
"""
TABLE = """\
{{"low": torch.autocast("cuda", dtype=torch.{low}), "full": torch.autocast("cuda", dtype=torch.float32)}}[args.precision]"""
UNUSED = """\
import torch

class Runner:
    def run_epoch(self, loader, mode):
        scaler = torch.amp.GradScaler("cuda")
        for i, x in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.{dtype}):
                total_loss = self.criterion(self.model(x))
            if mode == "train":
                {backward}
                self.optimizer.step()
                self.optimizer.zero_grad()
            {log}
"""
PARALLEL = """\
import torch
from torch.cuda.amp import GradScaler, autocast
{model}
net = Net(args).cuda()
net = {wrap}
scaler = GradScaler()
for x in loader:
    optimizer.zero_grad()
    loss = net(x)
    scaler.scale(loss.mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""
OWN = """\
class Net(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)
"""
LOGS = ["self.write_training_log(i)", "self.log_train_step(total_loss.item())", "plot_training(i)"]
CALLS = ["self.train_part(x)", "update_all(x)", "self.strategy.run(i)"]


@pytest.mark.parametrize("code", ["HS140", "HS141"])
def test_only_lower_precision_has_to_end_before_the_step(code):
    """A region in float32 casts nothing to 16 bits, neither in backward nor in the step; one of a table may."""
    assert code not in reported(REGION.format(region='torch.autocast("cuda", dtype=torch.float32)'))
    assert code in reported(REGION.format(region='torch.autocast("cuda", dtype=torch.bfloat16)'))
    assert code in reported(REGION.format(region=TABLE.format(low="bfloat16")))


@pytest.mark.parametrize("log", LOGS)
def test_a_step_without_backward_trains_nothing(log):
    """Neither a log nor a plot computes the gradients that the step lacks."""
    wrong = UNUSED.format(dtype="bfloat16", backward="pass", log=log)
    assert {"HS122", "HS156"} <= set(reported(wrong))
    assert "HS156" not in reported(wrong.replace("pass", "total_loss.backward()"))


@pytest.mark.parametrize("call", CALLS)
def test_what_another_file_trains_is_left_alone(call):
    """A call under a name of training may compute the gradients in another file."""
    assert "HS156" not in reported(UNUSED.format(dtype="bfloat16", backward="pass", log=call))


def test_a_scaler_that_is_used_is_accepted():
    """Scaling the loss and stepping through the scaler is a use."""
    right = UNUSED.format(dtype="float16", backward="scaler.scale(total_loss).backward()", log="print(i)")
    assert "HS122" not in reported(
        right.replace("self.optimizer.step()", "scaler.step(self.optimizer); scaler.update()")
    )


def test_a_model_that_data_parallel_runs_in_threads():
    """Autocast has to be entered in the forward there; a forward of another file may do so, one of this file shows it."""
    assert "HS134" in reported(PARALLEL.format(model="from models import Net\n", wrap="net"))
    assert "HS134" not in reported(PARALLEL.format(model="from models import Net\n", wrap="torch.nn.DataParallel(net)"))
    assert "HS134" in reported(PARALLEL.format(model=OWN, wrap="torch.nn.DataParallel(net)"))
