"""What keeps simulated runs from a training loop, and no longer does: rejecting checks, hooks, and searches."""

import pytest

from simulated_scripts import codes

CLIPPED = """
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        loss = model(x, y)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
SETUP = """
{before}
model = create(args)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
"""


@pytest.mark.parametrize(
    "before",
    [
        "def named(name):\n    if name == 'a':\n        return 1\n    if name == 'b':\n        return 2\n    raise ValueError(name)\nkind = named(args.kind)",
        "def first(features):\n    for key in features:\n        if features[key]['image']:\n            return key\n    raise ValueError('none')\nimage = first(args.features)",
        "ckpt = pathlib.Path(args.ckpt)\nif not ckpt.exists():\n    raise FileNotFoundError(ckpt)",
        "if not isinstance(args.bounds, list) or len(args.bounds) != 2:\n    raise ValueError('bounds')",
        "if args.slots and args.only:\n    raise ValueError('conflict')\nif args.only and not args.enabled:\n    raise ValueError('conflict')",
        "skipped = []\nfor k, v in state.items():\n    if k not in target:\n        skipped.append(k)\nif skipped:\n    raise SystemExit('mismatch')",
        "per_epoch = len(loader) // 8\nif per_epoch <= 0:\n    raise ValueError('too few batches')",
        "names = [n for n in []]\nassert len(names) > 0",
    ],
    ids=["names", "search", "checkpoint", "or", "and", "collected", "counted", "assert"],
)
def test_checks_of_the_script_let_a_run_through(before):
    """A run passes what a script rejects, if the text allows it."""
    assert codes(SETUP.format(before=before) + CLIPPED) == ["HS104"]


def test_a_value_that_a_script_rejects_is_not_run_with():
    """A window of several micro-batches is no mistake of a script that does not accept one."""
    text = """
        if args.accumulate > 1:
            raise NotImplementedError
        scaler = torch.amp.GradScaler("cuda")
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cuda"):
                loss = model(x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if (i + 1) % args.accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """
    assert codes(text) == []
    assert codes(text.replace("raise NotImplementedError", "pass")) == ["HS106"]


def test_a_main_function_in_the_exit_of_the_process():
    """`raise SystemExit(main())` runs it."""
    body = "\n".join(f"    {line}" for line in (SETUP.format(before="pass") + CLIPPED).splitlines())
    assert codes(
        f"def main():\n{body}\n    return 0\n\nif __name__ == '__main__':\n    raise SystemExit(main())\n"
    ) == ["HS104"]


HOOKS = """
class Trainer({base}):
    def __init__(self, model):
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler, self.model = torch.amp.GradScaler("cuda"), model
    def train_epoch(self, loader):
        for batch in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = self.model(batch)
            self.scaler.scale(loss).backward()
            {hook}
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""


@pytest.mark.parametrize(
    ("base", "hook", "expected"),
    [
        ("Base", "self.move_batch_to_device(batch)", ["HS104"]),
        ("Base", "self.is_due()", ["HS104"]),
        ("Base", "self.after_backward()", []),
        ("Base", "self.compute_gradients()", []),
        ("Base", "self.prepare_step()", []),
        ("torch.nn.Module", "self.encoder(batch)", ["HS104"]),
    ],
    ids=["moves", "asks", "hook", "gradients", "step", "submodule"],
)
def test_methods_of_a_base_class_end_what_a_run_can_say_unless_their_names_only_compute(base, hook, expected):
    """A hook may unscale; what moves a batch does not, and a submodule computes."""
    assert codes(HOOKS.format(base=base, hook=hook)) == expected


def test_a_method_that_subclasses_override():
    """What does nothing, or returns nothing, gives something unknown: here an optimizer."""
    text = """
        class Base(torch.nn.Module):
            def fetch_optimizer(self):
                return
            def fit(self, loader):
                self.optimizer = self.fetch_optimizer()
                self.scaler = torch.amp.GradScaler("cuda")
                for batch in loader:
                    self.zero_grad()
                    with torch.autocast("cuda"):
                        loss = self(batch)
                    self.scaler.scale(loss).backward()
                    torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
        """
    assert codes(text) == ["HS104"]


def test_a_repeated_forward_is_no_end_of_an_iteration():
    """A window that is unscaled in each micro-batch is HS106, whatever inner loops and functions without a step do."""
    text = """
        def forward(x, chunk):
            if chunk is None:
                return model(x)
            return model(x, chunk)
        scaler = torch.amp.GradScaler("cuda")
        for i, (x, y) in enumerate(loader):
            while True:
                try:
                    with torch.autocast("cuda"):
                        loss = forward(x, args.chunk)
                    break
                except RuntimeError:
                    continue
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if (i + 1) % args.accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """
    assert codes(text) == ["HS106"]


@pytest.mark.parametrize(("line", "expected"), [("pass", ["HS104"]), ("p.grad = p.grad / scaler.get_scale()", [])])
def test_gradients_that_the_script_assigns_are_not_known(line, expected):
    """It may divide them by the scale itself."""
    clipped = CLIPPED.replace("    torch.nn", f"    for p in model.parameters():\n        {line}\n    torch.nn")
    assert codes(SETUP.format(before="pass") + clipped) == expected


@pytest.mark.parametrize("positions", ["itertools.cycle(range(1, args.accumulate + 1))", "itertools.cycle([1, 2])"])
def test_positions_within_a_window_repeat(positions):
    """A loop over batches and positions starts a window where the position is 1 again, and not in between."""
    text = f"""
        import itertools
        model = create(args)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for (x, y), position in zip(loader, {positions}):
            if position == 1:
                optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = model(x, y) / args.accumulate
            scaler.scale(loss).backward()
            if position % {"args.accumulate" if "args" in positions else "2"} == 0:
                scaler.step(optimizer)
                scaler.update()
        """
    assert codes(text) == []


LEFTOVER = """
def is_engine(obj):
    return hasattr(obj, "backward") and hasattr(obj, "step")

def train_epoch(model, loader, optimizer, scaler, args):
    num_batches = 0
    for i, batch in enumerate(loader):
        if is_engine(model):
            loss = model(batch)
            model.backward(loss)
            model.step()
        else:
            with torch.autocast("cuda", enabled=scaler is not None):
                loss = model(batch) / args.accumulation_steps
            {skip}
            scaler.scale(loss).backward()
            if (i + 1) % args.accumulation_steps == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        num_batches += 1
        speed = num_batches / elapsed if elapsed > 0 else 0.0
        if num_batches % 100 == 1:
            log(speed if isinstance(loss, float) else loss.item())
    try:
        if num_batches % args.accumulation_steps != 0 and not is_engine(model):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    except Exception:
        pass
"""


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ("if not torch.isfinite(loss):\n                optimizer.zero_grad()\n                continue", ["HS115"]),
        ("if torch.isnan(loss).any():\n                optimizer.zero_grad(set_to_none=True); continue", ["HS115"]),
        ("pass", []),
        ("if not torch.isfinite(loss):\n                loss = torch.nan_to_num(loss)", []),
    ],
)  # fmt: skip
def test_a_leftover_step_counts_the_batches_that_the_window_counts(skip, expected):
    """A counter without the skipped batches steps once more after a window that has just ended; the engine's branch is the rare one."""
    assert codes(LEFTOVER.format(skip=skip)) == expected
