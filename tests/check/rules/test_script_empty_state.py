"""HS601 and HS602: states of disabled scalers, and scaler classes of the script's own."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule reports something."""
    return [f.line for f in findings(text, code)]


RESUMED = """\
import torch
def save(path, optimizer, scaler, args):
    torch.save({{"optimizer": optimizer.state_dict(), "scaler": {state}, "args": args}}, path)

def main(args, model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda", enabled={enabled})
    if args.resume:
        checkpoint = torch.load(args.resume)
        optimizer.load_state_dict(checkpoint["optimizer"])
        {load}
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    save(args.path, optimizer, scaler, args)
"""
LOAD = 'scaler.load_state_dict(checkpoint["scaler"])'


def resumed(enabled="args.amp", load=LOAD, state="scaler.state_dict()"):
    return RESUMED.format(enabled=enabled, load=load, state=state)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enabled": "args.dtype == 'fp16'"},
        {"load": f"if args.amp and 'scaler' in checkpoint: {LOAD}"},
        {"load": f"if checkpoint['scaler'] is not None: {LOAD}"},
        {"load": "scaler.load_state_dict(checkpoint.get('scaler'))"},
        {"enabled": "not args.disable_amp"},
        {"enabled": "not (args.dtype == 'bf16' and torch.cuda.is_bf16_supported())"},
        {"load": f"args.start_epoch = checkpoint['epoch']; {LOAD}"},
        {"load": f"args.lr = checkpoint['args'].lr; {LOAD}"},
    ],
)
def test_an_empty_state_is_loaded(options):
    """A test that the entry exists does not exclude an empty one."""
    assert lines(resumed(**options), "HS601") == [10]


@pytest.mark.parametrize(
    "options",
    [
        {"enabled": "True"},
        {"enabled": "torch.cuda.is_available()"},
        {"enabled": "not torch.cuda.is_bf16_supported()"},
        {"load": f"if checkpoint['scaler']: {LOAD}"},
        {"load": f"if checkpoint.get('scaler'): {LOAD}"},
        {"load": f"if len(checkpoint['scaler']) > 0: {LOAD}"},
        {"load": f"if checkpoint['args'].amp and args.amp: {LOAD}"},
        {"load": f"args = checkpoint['args']; {LOAD}"},
        {"load": f"args.amp = checkpoint['amp']; {LOAD}"},
        {"load": f"args.dtype = checkpoint['dtype']; {LOAD}", "enabled": "args.dtype == 'fp16'"},
        {"enabled": "not (torch.cuda.is_bf16_supported() and torch.cuda.is_available())"},
        {"load": "scaler.load_state_dict(checkpoint['grad_scaler'])"},
        {"state": "scaler.state_dict() if args.amp else None"},
        {"state": "None"},
    ],
)
def test_a_state_that_is_not_loaded_or_not_empty(options):
    """The flag is the same in both runs, the entry is of another format, or something looks at what it contains."""
    assert lines(resumed(**options), "HS601") == []


PARTS = """\
import torch
class Trainer:
    def setup(self, config):
        self.use_amp = config["train"]["amp"]
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.use_amp)

    def save(self, path, optimizer, scaler=None):
        states = {{"optimizer": optimizer.state_dict()}}
        if {saved}:
            states["scaler"] = scaler.state_dict()
        torch.save(states, path)

    def resume(self, path, optimizer, scaler=None):
        states = torch.load(path)
        {settings}
        optimizer.load_state_dict(states["optimizer"])
        if {loaded}:
            scaler.load_state_dict(states["scaler"])

    def train(self, model, loader, optimizer, path):
        self.resume(path, optimizer, scaler=self.scaler)
        for x in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.use_amp):
                loss = model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(optimizer)
            self.scaler.update()
        self.save(path, optimizer, scaler=self.scaler)
"""


def parts(saved="scaler is not None", loaded="scaler is not None", settings="pass"):
    return PARTS.format(saved=saved, loaded=loaded, settings=settings)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"saved": "scaler"},
        {"saved": "self.config.save_scaler and scaler is not None"},
        {"saved": "self.save_scaler_state"},
        {"loaded": "scaler"},
        {"loaded": "scaler and 'scaler' in states"},
        {"loaded": "scaler.is_enabled()"},
        {"loaded": "isinstance(scaler, torch.amp.GradScaler)"},
        {"settings": "old_config = states['config']; split = old_config.get('data', {}).get('split')"},
        {
            "settings": "ckpt_cfg = states.get('config'); width = ckpt_cfg['model']['width']; heads = ckpt_cfg['model']['heads']"
        },
    ],
)
def test_tests_that_do_not_look_at_the_state(options):
    """That the scaler exists, or is to be saved, does not exclude an empty state; nor do other settings of the saved run."""
    assert lines(parts(**options), "HS601") == [18]


@pytest.mark.parametrize(
    "options",
    [
        {"saved": "self.use_amp"},
        {"saved": "scaler is not None and scaler.is_enabled()"},
        {"saved": "self.use_scaler"},
        {"loaded": "scaler and states['scaler']"},
        {"loaded": "states.get('scaler')"},
        {"settings": "old_config = states['config']; self.use_amp = old_config['train']['amp']"},
        {"settings": "old_config = states['config']; self.setup(old_config)"},
        {"settings": "old_config = states['config']; train_cfg = old_config['train']; self.use_amp = train_cfg['amp']"},
    ],
)
def test_tests_that_look_at_the_state_or_the_flag(options):
    """The state is saved with mixed precision only, is looked at, or the saved run's flag is the new one's."""
    assert lines(parts(**options), "HS601") == []


OWN = """\
import torch
class {name}:
    def scale(self, loss):
        return {scaled}
    def unscale_(self, optimizer):
        {unscale}
    def step(self, optimizer):
        for p in self.params:
            {divide}
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("scaled", "unscale", "divide", "expected"),
    [
        ("loss * self.factor", "pass", "p.grad.div_(self.factor)", [5]),
        ("loss.mul(self.factor)", '"""Done in step."""', "p.grad = p.grad / self.factor", [5]),
        ("loss * self.factor", "return None", "p.grad.data.mul_(1 / self.factor)", [5]),
        ("loss", "pass", "p.grad.div_(self.factor)", []),
        ("loss * self.factor", "raise NotImplementedError", "p.grad.div_(self.factor)", []),
        ("loss * self.factor", "self.divide(optimizer)", "p.grad.div_(self.factor)", []),
        ("loss * self.factor", "pass", "log(p)", []),
    ],
)
def test_unscale_of_a_class(scaled, unscale, divide, expected):
    """Only a class that scales and divides elsewhere promises what its empty method does not do."""
    text = OWN.format(name="Scaler", scaled=scaled, unscale=unscale, divide=divide)
    assert lines(text, "HS602") == expected


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("bool(args.amp and torch.cuda.is_available())", [11]),
        ("bool(args.mixed and device.type == 'cuda')", [11]),
        ("args.amp and torch.cuda.is_available()", [11]),
        ("bool(torch.cuda.is_available())", []),
        ("bool(torch.cuda.is_available() and device.type == 'cuda')", []),
    ],
)
def test_an_option_and_the_hardware_decide(flag, expected):
    """On one machine the option still chooses between the two runs; what the hardware alone decides stays the same."""
    text = resumed(enabled="use_amp").replace("    scaler = torch", f"    use_amp = {flag}\n    scaler = torch", 1)
    assert lines(text, "HS601") == expected


@pytest.mark.parametrize(
    ("flag", "saved", "expected"),
    [
        ("self.amp and self.dtype == 'float16'", "self.amp", [18]),
        ("self.amp and self.dtype == torch.float16", "self.amp and scaler is not None", [18]),
        ("self.amp and self.dtype == 'fp16' and torch.cuda.is_available()", "self.amp", [18]),
        ("self.amp and self.dtype == 'float16'", "self.amp and self.dtype == 'float16'", []),
        ("self.amp and self.dtype == 'float16'", "self.amp and scaler.is_enabled()", []),
        ("self.amp and self.dtype == 'float16'", "self.use_scaler", []),
        ("self.amp and self.dtype != 'float32'", "self.amp", []),
        ("self.amp", "self.amp", []),
    ],
)
def test_a_state_is_saved_with_mixed_precision_in_either_format(flag, saved, expected):
    """In bfloat16 the scaler is off, so what is saved whenever mixed precision is on may be empty."""
    text = parts(saved=saved).replace('self.use_amp = config["train"]["amp"]', "self.amp, self.dtype = config")
    text = text.replace("enabled=self.use_amp)\n\n", f"enabled={flag})\n\n").replace("self.use_amp", "self.amp")
    assert lines(text, "HS601") == expected
