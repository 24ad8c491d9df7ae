"""Reinforcement-learning loops, plain and converted: PPO and SAC on fixed rollouts of an invented environment."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from loops.amp import Amp
from loops.layers import MLP, STEPS, generator

OBSERVATIONS, ACTIONS = 4, 3

# PPO: several epochs over each rollout, clipped policy and value losses, and an early stop on the divergence.


class ActorCritic(nn.Module):
    """A policy and a value function with separate bodies."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = MLP(OBSERVATIONS, ACTIONS), MLP(OBSERVATIONS, 1)

    def forward(self, x):
        return self.actor(x).float().log_softmax(-1), self.critic(x).float()[:, 0]


def start_ppo():
    torch.manual_seed(0)
    agent = ActorCritic()
    return agent, torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)


def rollouts():
    """Observations, actions, advantages and returns that a rollout would have collected."""
    g = generator(1)
    for _ in range(4):
        x = torch.randn(16, OBSERVATIONS, generator=g)
        action = torch.randint(ACTIONS, (16,), generator=g)
        advantage = (action == x[:, :ACTIONS].argmax(-1)).float() * 2 - 0.6
        yield x, action, advantage, x.sum(-1) + 0.1 * torch.randn(16, generator=g)


def ppo_loss(agent, rollout, old, rows):
    """The loss on some rows of a rollout, and the estimated divergence from the policy that collected it."""
    x, action, advantage, target = (t[rows] for t in rollout)
    log_probs, value = agent(x)
    log_prob = log_probs.gather(1, action[:, None])[:, 0]
    ratio = (log_prob - old[0][rows]).exp()
    policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    clipped = old[1][rows] + (value - old[1][rows]).clamp(-0.2, 0.2)
    value_loss = torch.max((value - target).square(), (clipped - target).square()).mean() / 2
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    divergence = ((ratio - 1) - (log_prob - old[0][rows])).mean().item()
    return policy + 0.5 * value_loss - 0.01 * entropy, divergence


def minibatches():
    """The rows of each minibatch, over four epochs."""
    return [rows for epoch in range(4) for rows in torch.randperm(16, generator=generator(epoch)).chunk(2)]


def plain_ppo(preset):
    agent, optimizer = start_ppo()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for rollout in rollouts():
        with torch.no_grad(), amp.autocast():
            log_probs, value = agent(rollout[0])
            old = log_probs.gather(1, rollout[1][:, None])[:, 0], value
        for rows in minibatches():
            with amp.autocast():
                loss, divergence = ppo_loss(agent, rollout, old, rows)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            losses.append(loss.item())
            if divergence > 0.035:
                break
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return losses


def train_ppo(agent, engine):
    """The converted loop."""
    losses = []
    for rollout in rollouts():
        with torch.no_grad(), engine.forward():
            log_probs, value = agent(rollout[0])
            old = log_probs.gather(1, rollout[1][:, None])[:, 0], value
        for rows in minibatches():
            with engine.forward():
                loss, divergence = ppo_loss(agent, rollout, old, rows)
            engine.backward(loss)
            losses.append(loss.item())
            if divergence > 0.035:
                engine.reset_window()  # this minibatch is not used
                break
            engine.step()
    return losses


def converted_ppo(precision):
    agent, optimizer = start_ppo()
    with halfstep.Engine(agent, optimizer, precision, max_norm=0.5) as engine:
        return train_ppo(agent, engine)


# The same with actor and critic as two modules, which one engine trains with one norm for the clipping.


def plain_ppo_two_modules(preset):
    return plain_ppo(preset)


def converted_ppo_two_modules(precision):
    agent, optimizer = start_ppo()
    with halfstep.Engine([agent.actor, agent.critic], optimizer, precision, max_norm=0.5) as engine:
        return train_ppo(agent, engine)


# SAC: actor, two critics and a temperature, each with its own optimizer, and target critics that follow.


class Critics(nn.Module):
    """Two value functions of observation and action."""

    def __init__(self):
        super().__init__()
        self.first, self.second = MLP(OBSERVATIONS + 1, 1), MLP(OBSERVATIONS + 1, 1)

    def forward(self, x, action):
        both = torch.cat([x, action], -1)
        return self.first(both).float(), self.second(both).float()


class Temperature(nn.Module):
    """The logarithm of the entropy coefficient."""

    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(1))


def start_sac():
    torch.manual_seed(1)
    actor, critics, temperature = MLP(OBSERVATIONS, 2), Critics(), Temperature()
    return actor, critics, copy.deepcopy(critics).requires_grad_(False), temperature


def transitions():
    """Batches from a replay buffer, with the noise that samples actions."""
    g = generator(2)
    for _ in range(STEPS):
        x, action = torch.randn(8, OBSERVATIONS, generator=g), torch.rand(8, 1, generator=g) * 2 - 1
        reward = -(action - x[:, :1].tanh()).square()
        yield x, action, reward, x + 0.1 * action, torch.randn(2, 8, 1, generator=g)


def sample(actor, x, noise):
    """A squashed Gaussian action and its log-probability."""
    mean, log_std = actor(x).float().chunk(2, -1)
    log_std = log_std.clamp(-2, 1)
    raw = mean + noise * log_std.exp()
    return raw.tanh(), -noise.square() / 2 - log_std - torch.log(1 - raw.tanh().square() + 1e-6)


@torch.no_grad()
def polyak(target, source, rate=0.1):
    """Move the target critics towards the trained ones."""
    for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
        slow.data.mul_(1 - rate).add_(rate * fast.data)


def critic_loss(critics, target, actor, alpha, batch):
    """Both critics against the soft value of the next state."""
    x, action, reward, following, noise = batch
    with torch.no_grad():
        next_action, log_prob = sample(actor, following, noise[0])
        goal = reward + 0.9 * (torch.min(*target(following, next_action)) - alpha * log_prob)
    return sum(F.mse_loss(q, goal) for q in critics(x, action))


def actor_loss(critics, actor, alpha, batch):
    """The actor's loss, and the log-probability that the temperature's loss needs."""
    action, log_prob = sample(actor, batch[0], batch[4][1])
    return (alpha * log_prob - torch.min(*critics(batch[0], action))).mean(), log_prob.detach()


def plain_sac(preset):
    actor, critics, target, temperature = start_sac()
    optimizers = [torch.optim.Adam(m.parameters(), lr=3e-3) for m in (actor, critics, temperature)]
    amp, losses = Amp(preset), []
    scalers = [amp.scaler() for _ in optimizers]

    def update(index, loss):
        optimizers[index].zero_grad()
        scalers[index].scale(loss).backward()
        scalers[index].step(optimizers[index])
        scalers[index].update()

    for batch in transitions():
        alpha = temperature.log_alpha.float().exp().detach()
        with amp.autocast():
            loss_q = critic_loss(critics, target, actor, alpha, batch)
        update(1, loss_q)
        with amp.autocast():
            loss_pi, log_prob = actor_loss(critics, actor, alpha, batch)
        update(0, loss_pi)
        loss_alpha = -(temperature.log_alpha.float() * (log_prob - 1.0)).mean()
        update(2, loss_alpha)
        polyak(target, critics)
        losses += [loss_q.item(), loss_pi.item()]
    return losses


def train_sac(actor, critics, target, log_alpha, engines):
    """The converted loop: one engine for each optimizer."""
    losses = []

    def update(engine, loss):
        engine.backward(loss)
        engine.step()

    for batch in transitions():
        alpha = log_alpha.float().exp().detach()
        with engines[1].forward():
            loss_q = critic_loss(critics, target, actor, alpha, batch)
        update(engines[1], loss_q)
        critics.requires_grad_(False)  # the actor is trained through them
        with engines[0].forward():
            loss_pi, log_prob = actor_loss(critics, actor, alpha, batch)
        update(engines[0], loss_pi)
        critics.requires_grad_(True)
        with engines[2].forward():
            loss_alpha = -(log_alpha.float() * (log_prob - 1.0)).mean()
        update(engines[2], loss_alpha)
        polyak(target, critics)
        losses += [loss_q.item(), loss_pi.item()]
    return losses


def converted_sac(precision):
    actor, critics, target, temperature = start_sac()
    engines = [
        halfstep.Engine(m, torch.optim.Adam(m.parameters(), lr=3e-3), precision) for m in (actor, critics, temperature)
    ]
    return train_sac(actor, critics, target, temperature.log_alpha, engines)


# The same with the temperature as a parameter of no module.


def plain_sac_loose_parameter(preset):
    return plain_sac(preset)


def converted_sac_loose_parameter(precision):
    actor, critics, target, _ = start_sac()
    log_alpha = nn.Parameter(torch.zeros(1))
    engines = [halfstep.Engine(m, torch.optim.Adam(m.parameters(), lr=3e-3), precision) for m in (actor, critics)]
    engines.append(halfstep.Engine({"log_alpha": log_alpha}, torch.optim.Adam([log_alpha], lr=3e-3), precision))
    return train_sac(actor, critics, target, log_alpha, engines)
