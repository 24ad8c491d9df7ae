"""Assertions about precision: a correct loop, and three mistakes that train silently worse.

Run it with `python examples/assert_truth.py`, or with pytest. With the pytest plugin a marker does the same:

    @pytest.mark.precision(master="fp32", states="fp32")
    def test_step(inspect_precision): ...
"""

import torch
import torch.nn.functional as F

import halfstep

torch.manual_seed(0)
x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))


def build(dtype=torch.float32):
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).to(dtype)


def one_step(model, optimizer, micro_batches=2):
    """Autocast in bf16, two micro-batches, a loss in fp32."""
    for part_x, part_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(part_x)
        (F.cross_entropy(logits.float(), part_y) / micro_batches).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_autocast_over_fp32_weights():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    with halfstep.inspect(model, optimizer) as step:
        one_step(model, optimizer)
    print(step)
    step.expect(master="fp32", states="fp32", compute="bf16", loss="fp32", grads="fp32", accumulate="fp32")


def test_16_bit_weights_with_a_split_master():
    model = build(torch.bfloat16)
    optimizer = halfstep.optim.AdamW(model.parameters(), master="split", states="8bit")
    with halfstep.inspect(model, optimizer) as step:
        one_step(model, optimizer)
    step.expect(weights="bf16", master="fp32", states="8bit", loss="fp32")


def fails(inspection, **formats):
    try:
        inspection.expect(**formats)
    except halfstep.ExpectationError as error:
        print(error, end="\n\n")
        return True
    return False


def test_16_bit_weights_without_a_master():
    model = build(torch.bfloat16)
    assert fails(halfstep.inspect(model, torch.optim.AdamW(model.parameters())), master="fp32")


def test_16_bit_accumulation_and_loss():
    model = build(torch.bfloat16)
    optimizer = halfstep.optim.AdamW(model.parameters())
    with halfstep.inspect(model, optimizer) as step:
        for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
            F.cross_entropy(model(part_x.bfloat16()), part_y).backward()
        optimizer.step()
    assert fails(step, loss="fp32", accumulate="fp32")


def test_16_bit_ema():
    model = build(torch.bfloat16)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9999))
    assert fails(halfstep.inspect(model, ema=ema), ema="fp32")


if __name__ == "__main__":
    test_autocast_over_fp32_weights()
    test_16_bit_weights_with_a_split_master()
    test_16_bit_weights_without_a_master()
    test_16_bit_accumulation_and_loss()
    test_16_bit_ema()
