"""A GAN in fp16: two optimizers, one loss scaler, each optimizer unscaled once and `update()` called once per iteration.

One scaler is enough, because both losses are scaled by the same factor, and an overflow of either lowers it. Three mistakes
are easy to make here: `update()` after each optimizer (the scale grows twice as fast, and the second step is unscaled by
another factor than its loss was scaled by), the discriminator's gradients of the generator's loss left in place for its next
step, and a discriminator that ends in a sigmoid (its BCELoss raises under autocast; logits do not).
"""

import torch
import torch.nn.functional as F
from torch import nn

import halfstep

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))  # logits, no sigmoid
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
scaler = halfstep.GradScaler("cpu", init_scale=2.0**16)  # torch.amp.GradScaler with skip accounting and a hard stop
real_label, fake_label = torch.ones(64, 1), torch.zeros(64, 1)


def real_points():
    """The distribution to learn: a circle of radius 1 around (2, 2)."""
    angle = torch.rand(64) * 2 * torch.pi
    return torch.stack([2 + angle.cos(), 2 + angle.sin()], dim=1)


def judge(points, label):
    with torch.autocast("cpu", torch.float16):
        logits = discriminator(points)
    return F.binary_cross_entropy_with_logits(logits.float(), label)


def make(count):
    with torch.autocast("cpu", torch.float16):
        return generator(torch.randn(count, 4))


def distance():
    """From the mean of the generated points to that of the real ones."""
    with torch.no_grad():
        return (make(512).float().mean(0) - 2).norm().item()


before = distance()
for _ in range(300):
    # The discriminator learns to separate; `detach` keeps this backward out of the generator.
    fake = make(64)
    loss_d = judge(real_points(), real_label) + judge(fake.detach(), fake_label)
    optimizer_d.zero_grad()
    scaler.scale(loss_d).backward()
    scaler.unscale_(optimizer_d)  # before clipping
    nn.utils.clip_grad_norm_(discriminator.parameters(), 1.0)
    scaler.step(optimizer_d)

    # The generator learns to fool it. This backward reaches the discriminator too; its zero_grad above clears that.
    loss_g = judge(fake, real_label)
    optimizer_g.zero_grad()
    scaler.scale(loss_g).backward()
    scaler.step(optimizer_g)

    scaler.update()  # once, after both

after = distance()
print(f"distance of the means {before:.2f} -> {after:.2f}, loss scale {scaler.get_scale():g}")
assert after < 0.5 * before
