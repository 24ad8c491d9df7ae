"""Wrong scripts as people write them, each with the rules that `--fix` must cure in it; all are run before and after."""

HEAD = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(8, 4), torch.randn(8, 3)) for _ in range(4)]
loss_fn = nn.MSELoss()
clip_grad_norm_ = nn.utils.clip_grad_norm_
"""
GAN = """\
import itertools
import torch
from torch import nn
torch.manual_seed(0)
netD, netG = nn.Linear(4, 1), nn.Linear(4, 4)
optD = torch.optim.SGD(netD.parameters(), lr=0.1)
optG = torch.optim.SGD(netG.parameters(), lr=0.1)
batches = [torch.randn(8, 4) for _ in range(4)]
scaler = torch.amp.GradScaler("cuda")
"""
SCALER = 'scaler = torch.amp.GradScaler("cuda")\n'
TRAINER = """\
import torch
from torch import nn
class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")
        self.data = [(torch.randn(8, 4), torch.randn(8, 3)) for _ in range(4)]
"""

# (name, the codes that --fix cures, the script)
WRONG = [
    # HS101: update is missing
    ("update_in_a_plain_loop", {"HS101"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # comment
"""),
    ("update_in_a_method", {"HS101"}, TRAINER + """\
    def fit(self):
        for x, y in self.data:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
Trainer().fit()
"""),
    ("update_in_a_helper_with_other_names", {"HS101"}, HEAD + """\
def train_step(net, optim, gs, batch):
    optim.zero_grad()
    inputs, targets = batch
    gs.scale(loss_fn(net(inputs), targets)).backward()
    gs.step(optim)
def main():
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        train_step(model, optimizer, scaler, batch)
main()
"""),
    ("update_after_a_loop_over_optimizers", {"HS101"}, HEAD + SCALER + """\
head = nn.Linear(3, 3)
optimizers = [optimizer, torch.optim.SGD(head.parameters(), lr=0.1)]
for x, y in loader:
    for o in optimizers:
        o.zero_grad()
    scaler.scale(loss_fn(head(model(x)), y)).backward()
    for o in optimizers:
        scaler.step(o)
print("done")
"""),
    ("update_in_an_accumulation_window", {"HS101"}, HEAD + SCALER + """\
for i, (x, y) in enumerate(loader):
    loss = loss_fn(model(x), y) / 2
    scaler.scale(loss).backward()
    if (i + 1) % 2 == 0:
        scaler.step(optimizer)
        optimizer.zero_grad()
"""),
    ("update_of_two_optimizers", {"HS101"}, GAN + """\
for real in batches:
    optD.zero_grad()
    lossD = (netD(real) - 1).square().mean() + netD(netG(real).detach()).square().mean()
    scaler.scale(lossD).backward()
    scaler.step(optD)
    optG.zero_grad()
    lossG = (netD(netG(real)) - 1).square().mean()
    scaler.scale(lossG).backward()
    scaler.step(optG)
"""),
    ("update_of_an_optional_scaler", {"HS101"}, HEAD + """\
def train(scaler=None):
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        else:
            loss.backward()
            optimizer.step()
train()
train(torch.amp.GradScaler("cuda"))
"""),
    ("update_on_one_line", {"HS101"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad(); loss = loss_fn(model(x), y)
    scaler.scale(loss).backward(); scaler.step(optimizer)
"""),
    ("update_with_tabs", {"HS101"}, HEAD + SCALER + """\
for epoch in range(2):
\tfor x, y in loader:
\t\toptimizer.zero_grad()
\t\tscaler.scale(loss_fn(model(x), y)).backward()
\t\tscaler.step(optimizer)
"""),
    ("update_in_a_try_block", {"HS101"}, HEAD + SCALER + """\
for x, y in loader:
    try:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
    except RuntimeError as error:
        raise SystemExit(str(error))
    finally:
        pass
"""),
    ("update_last_line_without_newline", {"HS101"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)"""),
    # HS102: the loss is not scaled
    ("scale_a_plain_loss", {"HS102"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    scaler.scale(torch.ones(1))
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
"""),
    ("scale_a_sum_in_parentheses", {"HS102"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    a, b = loss_fn(model(x), y), model.weight.square().sum()
    (
        a
        + 0.1 * b
    ).backward()
    scaler.step(optimizer)
    scaler.update()
"""),
    ("scale_an_attribute", {"HS102"}, TRAINER + """\
    def fit(self):
        for x, y in self.data:
            self.optimizer.zero_grad()
            self.loss = nn.functional.mse_loss(self.model(x), y)
            self.loss.backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
Trainer().fit()
"""),
    ("scale_with_retain_graph", {"HS102"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    losses = (model(x) - y) ** 2
    losses.mean().backward(retain_graph=True)
    scaler.step(optimizer)
    scaler.update()
"""),
    ("autograd_backward_has_no_fix", set(), HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    scaler.scale(loss)
    torch.autograd.backward(loss)
    scaler.step(optimizer)
    scaler.update()
"""),
    ("scaled_step_in_one_branch_only", set(), HEAD + """\
for use_amp in (False, True):
    scaler = torch.amp.GradScaler("cuda") if use_amp else None
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        if use_amp:
            scaler.scale(torch.ones(1))
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
"""),
    ("scale_in_an_accumulation_window", {"HS102"}, HEAD + SCALER + """\
for i, (x, y) in enumerate(loader):
    loss = loss_fn(model(x), y) / 2
    loss.backward()
    if (i + 1) % 2 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""),
    ("scaled_loss_is_dropped", {"HS102"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    scaler.scale(loss)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
"""),
    ("two_losses", {"HS102"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    first, second = loss_fn(model(x), y), loss_fn(model(-x), y)
    first.backward()
    second.backward()
    scaler.step(optimizer)
    scaler.update()
"""),
    ("scale_before_an_unscaled_clip", {"HS102"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
"""),
    ("scale_with_a_global_scaler", {"HS102"}, HEAD + """\
def step(x, y):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
if __name__ == "__main__":
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        step(x, y)
"""),
    # HS104: scaled gradients are clipped
    ("clip_in_a_plain_loop", {"HS104"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
"""),
    ("clip_under_if_then_another", {"HS104"}, HEAD + SCALER + """\
by_value = True
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    if by_value:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
"""),
    ("clip_in_both_branches", {"HS104"}, HEAD + SCALER + """\
by_value = False
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    if by_value:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    else:
        clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
"""),
    ("clip_of_two_optimizers_in_turn", {"HS104"}, GAN + """\
for real in batches:
    optD.zero_grad()
    scaler.scale((netD(real) - 1).square().mean() + netD(netG(real).detach()).square().mean()).backward()
    nn.utils.clip_grad_norm_(netD.parameters(), 0.01)
    scaler.step(optD)
    optG.zero_grad()
    scaler.scale((netD(netG(real)) - 1).square().mean()).backward()
    nn.utils.clip_grad_norm_(netG.parameters(), 0.01)
    scaler.step(optG)
    scaler.update()
"""),
    ("clip_of_two_optimizers_together", {"HS104"}, GAN + """\
for real in batches:
    optD.zero_grad()
    optG.zero_grad()
    loss = (netD(netG(real)) - 1).square().mean()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(netG.parameters(), 0.01)
    nn.utils.clip_grad_norm_(netD.parameters(), 0.01)
    scaler.step(optD)
    scaler.step(optG)
    scaler.update()
"""),
    ("clip_of_the_optimizer_that_is_not_unscaled", {"HS104"}, GAN + """\
for real in batches:
    optD.zero_grad()
    optG.zero_grad()
    scaler.scale((netD(netG(real)) - 1).square().mean()).backward()
    scaler.unscale_(optG)
    nn.utils.clip_grad_norm_(netG.parameters(), 0.01)
    nn.utils.clip_grad_norm_(netD.parameters(), 0.01)
    scaler.step(optD)
    scaler.step(optG)
    scaler.update()
"""),
    ("clip_of_two_optimizers_at_once_has_no_fix", set(), GAN + """\
for real in batches:
    optD.zero_grad()
    optG.zero_grad()
    scaler.scale((netD(netG(real)) - 1).square().mean()).backward()
    nn.utils.clip_grad_norm_(itertools.chain(netG.parameters(), netD.parameters()), 0.01)
    scaler.step(optD)
    scaler.step(optG)
    scaler.update()
"""),
    ("clip_of_two_optimizers_in_a_class", {"HS104"}, """\
import torch
from torch import nn
class Gan:
    def __init__(self):
        torch.manual_seed(0)
        self.d, self.g = nn.Linear(4, 1), nn.Linear(4, 4)
        self.opt_d = torch.optim.SGD(self.d.parameters(), 0.1)
        self.opt_g = torch.optim.SGD(self.g.parameters(), 0.1)
        self.scaler = torch.amp.GradScaler("cuda")
    def step(self, real):
        self.opt_d.zero_grad()
        self.opt_g.zero_grad()
        self.scaler.scale((self.d(self.g(real)) - 1).square().mean()).backward()
        nn.utils.clip_grad_norm_(self.d.parameters(), 0.01)
        self.scaler.step(self.opt_d)
        self.scaler.step(self.opt_g)
        self.scaler.update()
gan = Gan()
for _ in range(3):
    gan.step(torch.randn(8, 4))
"""),
    ("clip_in_a_helper_with_other_names", {"HS104"}, HEAD + """\
def train_step(net, optim, gs, inputs, targets):
    optim.zero_grad()
    gs.scale(loss_fn(net(inputs), targets)).backward()
    clip_grad_norm_(net.parameters(), 0.01)
    gs.step(optim)
    gs.update()
def main():
    my_scaler = torch.amp.GradScaler("cuda")
    for a, b in loader:
        train_step(model, optimizer, my_scaler, a, b)
main()
"""),
    ("clip_in_a_helper_without_the_scaler", {"HS104"}, HEAD + """\
def limit(net):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
def main():
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y)).backward()
        limit(model)
        scaler.step(optimizer)
        scaler.update()
main()
"""),
    ("step_in_a_helper_clip_in_the_caller", {"HS104"}, HEAD + SCALER + """\
def advance(gs, o):
    gs.step(o)
    gs.update()
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    clip_grad_norm_(model.parameters(), 0.01)
    advance(scaler, optimizer)
"""),
    ("clip_and_step_in_two_helpers_of_a_helper", set(), HEAD + """\
def limit(net):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
def advance(gs, o):
    gs.step(o)
    gs.update()
def train_step(net, o, gs, x, y):
    o.zero_grad()
    gs.scale(loss_fn(net(x), y)).backward()
    limit(net)
    advance(gs, o)
def main():
    amp_scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        train_step(model, optimizer, amp_scaler, x, y)
main()
"""),
    ("clip_with_an_optional_scaler", {"HS104"}, HEAD + """\
def train(use_amp):
    scaler = torch.amp.GradScaler("cuda") if use_amp else None
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        if scaler is not None:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        clip_grad_norm_(model.parameters(), 0.01)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
train(False)
train(True)
"""),
    ("clip_with_a_scaler_that_defaults_to_none", {"HS104"}, HEAD + """\
def train_one_epoch(net, optim, scaler=None):
    for x, y in loader:
        optim.zero_grad()
        loss = loss_fn(net(x), y)
        if scaler:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.01)
        if scaler:
            scaler.step(optim)
            scaler.update()
        else:
            optim.step()
train_one_epoch(model, optimizer)
train_one_epoch(model, optimizer, scaler=torch.amp.GradScaler("cuda"))
"""),
    ("clip_with_a_scaler_created_under_a_flag", {"HS104"}, HEAD + """\
for use_amp in (False, True):
    if use_amp:
        scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        if use_amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        clip_grad_norm_(model.parameters(), 0.01)
        if use_amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
"""),
    ("clip_under_the_flag_of_the_step", {"HS104"}, HEAD + SCALER + """\
use_amp = True
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    if use_amp:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    if use_amp:
        clip_grad_norm_(model.parameters(), 0.01)
    if use_amp:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
"""),
    ("clip_each_parameter", {"HS104"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    for p in model.parameters():
        clip_grad_norm_(p, 0.01)
    scaler.step(optimizer)
    scaler.update()
"""),
    ("clip_under_if_on_one_line", {"HS104"}, HEAD + SCALER + """\
limit = 0.01
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    if limit > 0: clip_grad_norm_(model.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()
"""),
    ("clip_on_one_line", {"HS104"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad(); scaler.scale(loss_fn(model(x), y)).backward()
    name = "\u00e9\u4e2d"; clip_grad_norm_(model.parameters(), 0.01); scaler.step(optimizer); scaler.update()
"""),
    ("clip_with_windows_line_endings", {"HS104"}, (HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    # \u00fc\u4e2d
    clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
""").replace("\n", "\r\n")),
    ("clip_with_tabs_and_an_optional_scaler", {"HS104"}, HEAD + """\
def train(scaler):
\tfor x, y in loader:
\t\toptimizer.zero_grad()
\t\tloss = loss_fn(model(x), y)
\t\tif scaler is not None:
\t\t\tscaler.scale(loss).backward()
\t\telse:
\t\t\tloss.backward()
\t\tclip_grad_norm_(model.parameters(), 0.01)
\t\tif scaler is not None:
\t\t\tscaler.step(optimizer)
\t\t\tscaler.update()
\t\telse:
\t\t\toptimizer.step()
train(None)
train(torch.amp.GradScaler("cuda"))
"""),
    ("clip_in_an_accumulation_window", {"HS104"}, HEAD + SCALER + """\
for i, (x, y) in enumerate(loader):
    scaler.scale(loss_fn(model(x), y) / 2).backward()
    if (i + 1) % 2 == 0 or i + 1 == len(loader):
        clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""),
    ("clip_of_every_micro_batch_has_no_fix", set(), HEAD + SCALER + """\
for i, (x, y) in enumerate(loader):
    scaler.scale(loss_fn(model(x), y) / 2).backward()
    clip_grad_norm_(model.parameters(), 0.01)
    if (i + 1) % 2 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""),
    ("clip_with_micro_batches_in_an_inner_loop", {"HS104"}, HEAD + SCALER + """\
for epoch in range(2):
    for start in range(0, 4, 2):
        optimizer.zero_grad()
        for x, y in loader[start : start + 2]:
            scaler.scale(loss_fn(model(x), y) / 2).backward()
        clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
"""),
    ("clip_in_a_try_block", {"HS104"}, HEAD + SCALER + """\
for x, y in loader:
    try:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y)).backward()
        clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    except torch.OutOfMemoryError:
        optimizer.zero_grad()
"""),
    ("clip_in_a_with_block", {"HS104"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    with torch.no_grad():
        total = clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
"""),
    ("clip_of_two_models_with_one_optimizer", {"HS104"}, HEAD + SCALER + """\
head = nn.Linear(3, 3)
both = torch.optim.SGD(list(model.parameters()) + list(head.parameters()), lr=0.1)
for x, y in loader:
    both.zero_grad()
    scaler.scale(loss_fn(head(model(x)), y)).backward()
    clip_grad_norm_(model.parameters(), 0.01)
    clip_grad_norm_(head.parameters(), 0.01)
    scaler.step(both)
    scaler.update()
"""),
    ("clip_then_unscale_has_no_fix", set(), HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    clip_grad_norm_(model.parameters(), 0.01)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
"""),
    ("clip_with_an_early_continue", {"HS104"}, HEAD + SCALER + """\
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    norm = clip_grad_norm_(model.parameters(), 0.01)
    if not torch.isfinite(loss):
        scaler.update()
        continue
    scaler.step(optimizer)
    scaler.update()
"""),
    ("clip_in_a_nested_function", {"HS104"}, HEAD + """\
def main():
    scaler = torch.amp.GradScaler("cuda")
    def step(x, y):
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y)).backward()
        clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    for x, y in loader:
        step(x, y)
main()
"""),
    ("clip_in_a_method_with_everything_passed", {"HS104"}, HEAD + """\
class Loop:
    def __init__(self, parts):
        self.parts = parts
    def run(self):
        for x, y in loader:
            self.parts["optimizer"].zero_grad()
            self.parts["scaler"].scale(loss_fn(model(x), y)).backward()
            clip_grad_norm_(model.parameters(), 0.01)
            self.parts["scaler"].step(self.parts["optimizer"])
            self.parts["scaler"].update()
Loop({"scaler": torch.amp.GradScaler("cuda"), "optimizer": optimizer}).run()
"""),
    # HS170: the scaler is not in the checkpoint
    ("checkpoint_of_a_script", {"HS170"}, HEAD + """\
import io
path = io.BytesIO()
scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
for epoch in range(2):
    if epoch:
        path.seek(0)
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    path = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
"""),
    ("checkpoint_loaded_above_the_scaler", set(), HEAD + """\
import io
file = io.BytesIO()
def main(resume):
    if resume:
        file.seek(0)
        state = torch.load(file)
        optimizer.load_state_dict(state["optimizer"])
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    file.seek(0)
    torch.save({"optimizer": optimizer.state_dict()}, file)
main(False)
main(True)
"""),
    ("checkpoint_loaded_in_a_function_before_the_scaler_exists", set(), HEAD + """\
import io
file = io.BytesIO()
torch.save({"optimizer": optimizer.state_dict()}, file)
def restore():
    file.seek(0)
    state = torch.load(file)
    optimizer.load_state_dict(state["optimizer"])
restore()
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"optimizer": optimizer.state_dict()}, io.BytesIO())
"""),
    ("checkpoint_of_a_class", {"HS170"}, TRAINER + """\
    def fit(self):
        for x, y in self.data:
            self.optimizer.zero_grad()
            self.scaler.scale(nn.functional.mse_loss(self.model(x), y)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
    def save(self, file):
        torch.save({
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }, file)
    def load(self, file):
        state = torch.load(file)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
import io
trainer, file = Trainer(), io.BytesIO()
trainer.fit()
trainer.save(file)
file.seek(0)
Trainer().load(file)
"""),
    ("checkpoint_loaded_in_the_constructor", set(), """\
import io
import torch
from torch import nn
file = io.BytesIO()
class Trainer:
    def __init__(self, resume):
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if resume:
            self.load()
        self.scaler = torch.amp.GradScaler("cuda")
    def load(self):
        file.seek(0)
        state = torch.load(file)
        self.optimizer.load_state_dict(state["optimizer"])
    def save(self):
        file.seek(0)
        torch.save({"optimizer": self.optimizer.state_dict()}, file)
    def fit(self):
        for _ in range(3):
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(torch.randn(8, 4)).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.save()
Trainer(False).fit()
Trainer(True).fit()
"""),
    ("old_checkpoint_without_the_scaler", {"HS170"}, HEAD + """\
import io
old = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": getattr(optimizer, "state_dict")()}, old)
old.seek(0)
scaler = torch.amp.GradScaler("cuda")
ckpt = torch.load(old)
model.load_state_dict(ckpt["model"])
optimizer.load_state_dict(ckpt["optimizer"])
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
"""),
    ("checkpoint_of_two_optimizers", {"HS170"}, GAN + """\
import io
def save(file):
    torch.save(dict(d=netD.state_dict()) | {"opt_d": optD.state_dict(), "opt_g": optG.state_dict()}, file)
def load(file):
    state = torch.load(file)
    optD.load_state_dict(state["opt_d"])
    optG.load_state_dict(state["opt_g"])
for real in batches:
    optD.zero_grad()
    optG.zero_grad()
    scaler.scale((netD(netG(real)) - 1).square().mean()).backward()
    scaler.step(optD)
    scaler.step(optG)
    scaler.update()
file = io.BytesIO()
save(file)
file.seek(0)
load(file)
"""),
    ("checkpoint_function_without_the_scaler", set(), HEAD + """\
import io
def save(model, optimizer, file):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
def load(optimizer, file):
    optimizer.load_state_dict(torch.load(file)["optimizer"])
def main():
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    file = io.BytesIO()
    save(model, optimizer, file)
    file.seek(0)
    load(optimizer, file)
main()
"""),
    ("checkpoint_of_a_run_without_amp", {"HS170"}, HEAD + """\
import io
def run(use_amp, file=None):
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    if file is not None:
        state = torch.load(file)
        optimizer.load_state_dict(state["optimizer"])
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    out = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict()}, out)
    out.seek(0)
    return out
run(True, run(False))
"""),
    # HS190: deprecated names
    ("deprecated_imports", {"HS190"}, HEAD + """\
from torch.cuda.amp import autocast, GradScaler
scaler = GradScaler(2.0**10, enabled=True)
for x, y in loader:
    optimizer.zero_grad()
    with autocast(True, torch.bfloat16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
assert scaler.get_growth_interval() == 2000
"""),
    ("deprecated_name_used_as_a_value", set(), HEAD + """\
import contextlib
from torch.cuda.amp import autocast
context = autocast if torch.is_grad_enabled() else contextlib.nullcontext
with autocast():
    model(loader[0][0])
with context():
    model(loader[0][0])
"""),
    ("deprecated_name_in_a_partial", set(), HEAD + """\
from functools import partial
from torch.cuda.amp import autocast
amp = partial(autocast, enabled=True)
with autocast(), amp():
    model(loader[0][0])
"""),
    ("deprecated_name_that_is_also_a_parameter", set(), HEAD + """\
import contextlib
from torch.cuda.amp import autocast
def forward(x, autocast=contextlib.nullcontext):
    with autocast():
        return model(x)
with autocast():
    forward(loader[0][0])
"""),
    ("deprecated_decorator", {"HS190"}, HEAD + """\
@torch.cuda.amp.autocast(enabled=False)
def forward(x):
    return model(x)
forward(loader[0][0])
"""),
    ("deprecated_module_alias", {"HS190"}, HEAD + """\
from torch.cuda import amp
scaler = amp.GradScaler(init_scale=4.0)
with amp.autocast():
    model(loader[0][0])
assert scaler.get_scale() in {1.0, 4.0}
"""),
    ("deprecated_import_in_a_function", {"HS190"}, HEAD + """\
def evaluate():
    from torch.cuda.amp import autocast
    with torch.no_grad(), autocast(enabled=True):
        return model(loader[0][0])
evaluate()
"""),
    ("deprecated_name_in_annotations_and_isinstance", {"HS190"}, HEAD + """\
from torch.cuda.amp import GradScaler
def check(scaler: GradScaler) -> bool:
    return isinstance(scaler, GradScaler)
assert check(GradScaler())
"""),
    ("deprecated_base_class", set(), HEAD + """\
from torch.cuda.amp import GradScaler
class Mine(GradScaler):
    def __init__(self):
        super().__init__(init_scale=4.0)
print(GradScaler(), Mine())
"""),
    ("deprecated_name_in_an_export_list", set(), HEAD + """\
from torch.cuda.amp import autocast
__all__ = ["autocast"]
with autocast():
    model(loader[0][0])
"""),
    ("deprecated_custom_function", {"HS190"}, HEAD + """\
class Double(torch.autograd.Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    @torch.cuda.amp.custom_bwd
    def backward(ctx, grad):
        return 2 * grad
Double.apply(torch.ones(2, requires_grad=True)).sum().backward()
"""),
]  # fmt: skip
