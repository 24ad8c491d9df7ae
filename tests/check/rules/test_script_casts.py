"""HS161: weights that a flag casts to float16, and the plain step that follows."""

import pytest

from check_scripts import codes

MAIN = """\
import torch

def main(args):
    model = Net().cuda()
    {cast}
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    if args.evaluate:
        return validate(model)
    for epoch in range(args.epochs):
        train(model, loader, optimizer, args)

def train(model, loader, optimizer, args):
    for x, y in loader:
        optimizer.zero_grad()
        {forward}
        {backward}
        {step}
"""


def main(cast, *, forward="loss = model(x.half(), y)", backward="loss.backward()", step="optimizer.step()"):
    return MAIN.format(cast=cast, forward=forward, backward=backward, step=step)


@pytest.mark.parametrize(
    "text",
    [
        main("if args.fp16: model.half()"),
        main("if args.precision == 'fp16': model = model.half()"),
        main("if args.half: model.to(torch.float16)", forward="loss = model(x, y) + scaled_kl"),
        main("if args.fp16: model.half()", step="if args.fp16: optimizer.step()"),
    ],
)
def test_cast_under_a_flag_is_reported(text):
    """A model cast to float16 under a flag and stepped regardless of the flag is reported at the cast."""
    assert codes(text) == ["HS161:5"]


@pytest.mark.parametrize(
    "text",
    [
        main("if args.evaluate: model.half()"),
        main("if args.export: model.half()"),
        main("if not args.fp16: model.half()"),
        main("if args.fp16: model.half()", step="if not args.fp16: optimizer.step()"),
        main("if args.fp16: model.half()", step="(fp16_step() if args.fp16 else optimizer.step())"),
        main("if args.fp16: model.half()", backward="(loss * args.loss_scale).backward()"),
        main("if args.fp16: model.half()", backward="(optimizer.backward(loss) if args.fp16 else loss.backward())"),
        main("if args.fp16: model.half()", step="optimizer.step(); copy_back(master_params, model)"),
        main("if args.fp16: model.half(); wrap = FP16_Optimizer"),
        main("if args.fp16: teacher.half()"),
    ],
)
def test_cast_that_is_not_trained_is_silent(text):
    """Unrelated flags, the opposite branch, master weights and loss scaling give no finding."""
    assert codes(text) == []
