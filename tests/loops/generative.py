"""Generative loops, plain and converted: DCGAN, WGAN, WGAN-GP, a VAE, and diffusion with an EMA."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from loops.amp import Amp
from loops.layers import MLP, STEPS, generator, images

LATENT = 4


def noises(count, batch=4, seed=0):
    """Latent vectors for a generator network."""
    g = generator(seed)
    return [torch.randn(batch, LATENT, generator=g) for _ in range(count)]


# DCGAN: two models and two optimizers; the discriminator adds the gradients of a real and of a fake batch.


class Generator(nn.Module):
    """Transposed convolutions with batch norm."""

    def __init__(self, width=8):
        super().__init__()
        self.start = nn.ConvTranspose2d(LATENT, width, 4, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.end = nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1, bias=False)

    def forward(self, z):
        return self.end(F.relu(self.norm(self.start(z[:, :, None, None])))).tanh()


class Discriminator(nn.Module):
    """Strided convolutions with batch norm, and one logit per image."""

    def __init__(self, width=8):
        super().__init__()
        self.start = nn.Conv2d(1, width, 4, stride=2, padding=1, bias=False)
        self.middle, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.end = nn.Conv2d(width, 1, 4, bias=False)

    def forward(self, x):
        x = F.leaky_relu(self.start(x), 0.2)
        return self.end(F.leaky_relu(self.norm(self.middle(x)), 0.2)).flatten()


def start_dcgan():
    torch.manual_seed(0)
    netg, netd = Generator(), Discriminator()
    optg = torch.optim.Adam(netg.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optd = torch.optim.Adam(netd.parameters(), lr=5e-4, betas=(0.5, 0.999))
    return netg, netd, optg, optd, list(zip(images(STEPS), noises(STEPS), strict=True))


def realness_loss(logits, label):
    """Binary cross-entropy with one label for the whole batch."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


def plain_dcgan(preset):
    netg, netd, optg, optd, data = start_dcgan()
    amp, losses = Amp(preset), []
    scaler_g, scaler_d = amp.scaler(), amp.scaler()
    for real, z in data:
        netd.zero_grad()
        with amp.autocast():
            loss_real = realness_loss(netd(real).float(), 1.0)
        scaler_d.scale(loss_real).backward()
        with amp.autocast():
            fake = netg(z)
            loss_fake = realness_loss(netd(fake.detach()).float(), 0.0)
        scaler_d.scale(loss_fake).backward()
        scaler_d.step(optd)
        scaler_d.update()
        netg.zero_grad()
        with amp.autocast():
            loss_g = realness_loss(netd(fake).float(), 1.0)
        scaler_g.scale(loss_g).backward()
        scaler_g.step(optg)
        scaler_g.update()
        losses += [loss_real.item() + loss_fake.item(), loss_g.item()]
    return losses


def converted_dcgan(precision):
    netg, netd, optg, optd, data = start_dcgan()
    engine_g, engine_d = halfstep.Engine(netg, optg, precision), halfstep.Engine(netd, optd, precision)
    losses = []
    for real, z in data:
        with engine_d.forward():
            loss_real = realness_loss(netd(real), 1.0)
        engine_d.backward(loss_real)
        with engine_g.forward():
            fake = netg(z)
        with engine_d.forward():
            loss_fake = realness_loss(netd(fake.detach()), 0.0)
        engine_d.backward(loss_fake)  # a second loss of the same micro-batch: the gradients add up
        engine_d.step()
        netd.requires_grad_(False)  # the generator is trained through it, not it
        with engine_g.forward():
            loss_g = realness_loss(netd(fake), 1.0)
        engine_g.backward(loss_g)
        engine_g.step()
        netd.requires_grad_(True)
        losses += [loss_real.item() + loss_fake.item(), loss_g.item()]
    return losses


# WGAN: a critic whose weights are clamped through .data after every step, and several critic steps per generator step.


def start_wgan(seed=1):
    torch.manual_seed(seed)
    netg, critic = MLP(LATENT, 8, activation=nn.ReLU), MLP(8, 1, activation=nn.ReLU)
    g = generator(seed)
    reals = [0.5 * torch.randn(8, 8, generator=g) + 1 for _ in range(2 * STEPS)]
    return netg, critic, reals, noises(2 * STEPS, batch=8, seed=seed)


def wgan_optimizers(netg, critic):
    """RMSprop, as in the paper."""
    return [torch.optim.RMSprop(net.parameters(), lr=1e-3) for net in (netg, critic)]


def wgan_gp_optimizers(netg, critic):
    """Adam without momentum, as in the paper on gradient penalties."""
    return [torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.0, 0.9)) for net in (netg, critic)]


def clamp_weights(critic, limit=0.2):
    """The weight clipping of the paper, through .data as its code does it."""
    for param in critic.parameters():
        param.data.clamp_(-limit, limit)


def plain_wgan(preset):
    netg, critic, reals, latents = start_wgan()
    optg, optc = wgan_optimizers(netg, critic)
    amp, losses = Amp(preset), []
    scaler_g, scaler_c = amp.scaler(), amp.scaler()
    for step in range(STEPS):
        for real, z in zip(reals[2 * step : 2 * step + 2], latents[2 * step : 2 * step + 2], strict=True):
            with amp.autocast():
                loss_c = critic(netg(z).detach()).float().mean() - critic(real).float().mean()
            optc.zero_grad()
            scaler_c.scale(loss_c).backward()
            scaler_c.step(optc)
            scaler_c.update()
            clamp_weights(critic)
        with amp.autocast():
            loss_g = -critic(netg(z)).float().mean()
        optg.zero_grad()
        scaler_g.scale(loss_g).backward()
        scaler_g.step(optg)
        scaler_g.update()
        losses += [loss_c.item(), loss_g.item()]
    return losses


def converted_wgan(precision):
    netg, critic, reals, latents = start_wgan()
    optg, optc = wgan_optimizers(netg, critic)
    engine_g, engine_c = halfstep.Engine(netg, optg, precision), halfstep.Engine(critic, optc, precision)
    losses = []
    for step in range(STEPS):
        for real, z in zip(reals[2 * step : 2 * step + 2], latents[2 * step : 2 * step + 2], strict=True):
            with engine_c.forward():
                loss_c = critic(netg(z).detach()).float().mean() - critic(real).float().mean()
            engine_c.backward(loss_c)
            engine_c.step()
            clamp_weights(critic)
        critic.requires_grad_(False)
        with engine_g.forward():
            loss_g = -critic(netg(z)).float().mean()
        engine_g.backward(loss_g)
        engine_g.step()
        critic.requires_grad_(True)
        losses += [loss_c.item(), loss_g.item()]
    return losses


# WGAN-GP: a penalty on the gradient of the critic, which is differentiated again. Under fp16 that first gradient needs
# the loss scale too, as torch's AMP examples show.


def mix_of(real, fake, step):
    """A random point between each real and fake sample."""
    share = torch.rand(len(real), 1, generator=generator(step))
    return (share * real + (1 - share) * fake).detach().requires_grad_()


def plain_wgan_gp(preset):
    netg, critic, reals, latents = start_wgan(2)
    optg, optc = wgan_gp_optimizers(netg, critic)
    amp, losses = Amp(preset), []
    scaler_g, scaler_c = amp.scaler(), amp.scaler()
    for step in range(STEPS):
        real, z = reals[step], latents[step]
        with amp.autocast():
            fake = netg(z).float().detach()
            mixed = mix_of(real, fake, step)
            score = critic(mixed).float().sum()
        scale = scaler_c.get_scale()
        slope = torch.autograd.grad(scale * score, mixed, create_graph=True)[0].float() / scale
        with amp.autocast():
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss_c = critic(fake).float().mean() - critic(real).float().mean() + 10 * penalty
        optc.zero_grad()
        scaler_c.scale(loss_c).backward()
        scaler_c.step(optc)
        scaler_c.update()
        with amp.autocast():
            loss_g = -critic(netg(z)).float().mean()
        optg.zero_grad()
        scaler_g.scale(loss_g).backward()
        scaler_g.step(optg)
        scaler_g.update()
        losses += [loss_c.item(), loss_g.item()]
    return losses


def converted_wgan_gp(precision):
    netg, critic, reals, latents = start_wgan(2)
    optg, optc = wgan_gp_optimizers(netg, critic)
    engine_g, engine_c = halfstep.Engine(netg, optg, precision), halfstep.Engine(critic, optc, precision)
    losses = []
    for step in range(STEPS):
        real, z = reals[step], latents[step]
        with engine_c.forward():
            fake = netg(z).float().detach()
            mixed = mix_of(real, fake, step)
            score = critic(mixed).float().sum()
        scale = engine_c.scaler.get_scale()  # 1 where nothing is scaled
        slope = torch.autograd.grad(scale * score, mixed, create_graph=True)[0].float() / scale
        with engine_c.forward():
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss_c = critic(fake).float().mean() - critic(real).float().mean() + 10 * penalty
        engine_c.backward(loss_c)
        engine_c.step()
        critic.requires_grad_(False)
        with engine_g.forward():
            loss_g = -critic(netg(z)).float().mean()
        engine_g.backward(loss_g)
        engine_g.step()
        critic.requires_grad_(True)
        losses += [loss_c.item(), loss_g.item()]
    return losses


# A VAE: a sampled latent, a summed reconstruction loss and a divergence.


class Vae(nn.Module):
    """Encoder to mean and log-variance, decoder to logits of pixels."""

    def __init__(self, width=16):
        super().__init__()
        self.encoder, self.decoder = MLP(64, 2 * LATENT, width, nn.ReLU), MLP(LATENT, 64, width, nn.ReLU)

    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).float().chunk(2, -1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def vae_loss(logits, mean, log_variance, x):
    """Binary cross-entropy plus the divergence from a unit Gaussian, per sample."""
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    return (reconstruction - (1 + log_variance - mean.square() - log_variance.exp()).sum() / 2) / len(x)


def start_vae():
    torch.manual_seed(3)
    model = Vae()
    data = [(x.flatten(1) / 2 + 0.5, z) for x, z in zip(images(STEPS, seed=3), noises(STEPS, seed=3), strict=True)]
    return model, torch.optim.Adam(model.parameters(), lr=5e-3), data


def plain_vae(preset):
    model, optimizer, data = start_vae()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for x, noise in data:
        optimizer.zero_grad()
        with amp.autocast():
            logits, mean, log_variance = model(x, noise)
            loss = vae_loss(logits.float(), mean, log_variance, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def converted_vae(precision):
    model, optimizer, data = start_vae()
    losses = []
    with halfstep.Engine(model, optimizer, precision) as engine:
        for x, noise in data:
            with engine.forward():
                loss = vae_loss(*model(x, noise), x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


# Diffusion: noise at a random time step is predicted, and samples come from an EMA of the weights.


class Denoiser(nn.Module):
    """Convolutions with group norm and an embedding of the time step."""

    def __init__(self, width=8, times=10):
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(times, width), nn.Linear(width, width), nn.SiLU())
        self.enter, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(2, width)
        self.middle, self.out = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, time):
        h = self.enter(x)
        h = h + self.middle(F.silu(self.norm(h) + self.time(time)[:, :, None, None]))
        return self.out(F.silu(h))


def start_ddpm():
    torch.manual_seed(4)
    model, g = Denoiser(), generator(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    signal = torch.linspace(0.99, 0.1, 10)
    data = []
    for x in images(STEPS, seed=4):
        time, noise = torch.randint(10, (len(x),), generator=g), torch.randn(x.shape, generator=g)
        share = signal[time][:, None, None, None]
        data.append((share.sqrt() * x + (1 - share).sqrt() * noise, time, noise))
    return model, optimizer, data


def plain_ddpm(preset):
    model, optimizer, data = start_ddpm()
    ema = copy.deepcopy(model)
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for noisy, time, noise in data:
        with amp.autocast():
            loss = F.mse_loss(model(noisy, time).float(), noise)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
        losses.append(loss.item())
    with torch.no_grad(), amp.autocast():
        losses.append(sum(F.mse_loss(ema(x, t).float(), noise).item() for x, t, noise in data[:4]))
    return losses


def converted_ddpm(precision):
    model, optimizer, data = start_ddpm()
    losses = []
    with halfstep.Engine(model, optimizer, precision, max_norm=1.0, ema=0.9) as engine:
        for noisy, time, noise in data:
            with engine.forward():
                loss = F.mse_loss(model(noisy, time), noise)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with engine.evaluate(ema=True):
            losses.append(sum(F.mse_loss(model(x, t), noise).item() for x, t, noise in data[:4]))
    return losses


# The same with the user's own EMA left in the loop: it follows engine.masters(), which are fp32 in every preset.


def plain_ddpm_own_ema(preset):
    return plain_ddpm(preset)


def converted_ddpm_own_ema(precision):
    model, optimizer, data = start_ddpm()
    ema = copy.deepcopy(model)
    losses = []
    with halfstep.Engine(model, optimizer, precision, max_norm=1.0) as engine:
        for noisy, time, noise in data:
            with engine.forward():
                loss = F.mse_loss(model(noisy, time), noise)
            engine.backward(loss)
            engine.step()
            masters = engine.masters()
            with torch.no_grad():
                for name, slow in ema.named_parameters():
                    slow.copy_(0.9 * slow + 0.1 * masters[name])
            losses.append(loss.item())
        with torch.no_grad(), engine.forward():
            losses.append(sum(F.mse_loss(ema(x, t), noise).item() for x, t, noise in data[:4]))
    return losses
