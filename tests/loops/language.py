"""Language loops, plain and converted: nanoGPT, minGPT, Llama, T5, BERT, MLM by tokens, Whisper, GRU, LoRA."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from loops.amp import Amp
from loops.layers import STEPS, Attention, Block, RMSNorm, generator, tokens

VOCABULARY = 16


class Gpt(nn.Module):
    """A decoder whose output layer is the token embedding."""

    def __init__(self, width=16, length=8):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.2)
        self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits, ids):
    """Cross-entropy of each token given those before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def groups_by_shape(model, decay=0.1):
    """Weight decay for matrices, none for norms and biases."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def cosine_rate(step, peak=1e-2, warmup=4):
    """Linear warm-up, then a cosine to a tenth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (STEPS - warmup)))


# nanoGPT: accumulation by dividing the loss, clipping, the rate written into the groups, tied embeddings.


def start_nanogpt():
    torch.manual_seed(0)
    model = Gpt()
    return model, torch.optim.AdamW(groups_by_shape(model), betas=(0.9, 0.95)), tokens(2 * STEPS)


def plain_nanogpt(preset):
    model, optimizer, data = start_nanogpt()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = cosine_rate(step)
        total = 0.0
        for ids in data[2 * step : 2 * step + 2]:
            with amp.autocast():
                loss = next_token_loss(model(ids).float(), ids) / 2
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses


def converted_nanogpt(precision):
    model, optimizer, data = start_nanogpt()
    losses = []
    with halfstep.Engine(model, optimizer, precision, max_norm=1.0, accumulate=2) as engine:
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = cosine_rate(step)
            total = 0.0
            for ids in data[2 * step : 2 * step + 2]:
                with engine.forward():
                    loss = next_token_loss(model(ids), ids)
                engine.backward(loss)
                engine.step()
                total += loss.item() / 2
            losses.append(total)
    return losses


# minGPT: a trainer that owns the loop and calls back after each batch.


def start_mingpt():
    torch.manual_seed(1)
    model = Gpt()
    return model, torch.optim.AdamW(groups_by_shape(model), lr=1e-3, betas=(0.9, 0.95)), tokens(5, seed=1)


def plain_mingpt(preset):
    model, optimizer, data = start_mingpt()
    amp, losses, callbacks = Amp(preset), [], []
    callbacks.append(lambda loss: losses.append(loss.item()))
    scaler = amp.scaler()
    for step in range(STEPS):
        ids = data[step % len(data)]
        with amp.autocast():
            loss = next_token_loss(model(ids).float(), ids)
        model.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        for callback in callbacks:
            callback(loss)
    return losses


def converted_mingpt(precision):
    model, optimizer, data = start_mingpt()
    losses, results = [], []
    engine = halfstep.Engine(model, optimizer, precision, max_norm=1.0, on_step=results.append)
    for step in range(STEPS):
        ids = data[step % len(data)]
        with engine.forward():
            loss = next_token_loss(model(ids), ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    assert len(results) == STEPS
    return losses


# Llama: RMSNorm, rotary positions from fp32 buffers, SwiGLU, and accumulation weighted by tokens.


class LlamaBlock(nn.Module):
    """Rotary attention and a gated feed-forward layer."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, causal=True)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x, rotate):
        x = x + self.attention(self.norm1(x), rotate=rotate)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A decoder with rotary positions."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.token, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(2))
        self.norm = RMSNorm(width)
        self.register_buffer("frequencies", 100.0 ** -torch.linspace(0, 1, width // heads // 2), persistent=False)

    def forward(self, ids):
        angles = torch.arange(ids.shape[1])[:, None] * self.frequencies
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def rotate(x):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

        x = self.token(ids)
        for block in self.blocks:
            x = block(x, rotate)
        return self.head(self.norm(x))


def start_llama():
    torch.manual_seed(2)
    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    windows = [[tokens(1, length=n, seed=10 * s + n)[0] for n in (8, 3, 6)] for s in range(STEPS)]
    return model, optimizer, scheduler, windows


def num_predicted(ids):
    """How many tokens a micro-batch predicts."""
    return ids[:, 1:].numel()


def plain_llama(preset):
    model, optimizer, scheduler, windows = start_llama()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for window in windows:
        total = sum(num_predicted(ids) for ids in window)
        value = 0.0
        for ids in window:
            with amp.autocast():
                loss = next_token_loss(model(ids).float(), ids) * num_predicted(ids) / total
            scaler.scale(loss).backward()
            value += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(value)
    return losses


def converted_llama(precision):
    model, optimizer, scheduler, windows = start_llama()
    losses = []
    with halfstep.Engine(model, optimizer, precision, max_norm=1.0, accumulate=3, scheduler=scheduler) as engine:
        for window in windows:
            total = sum(num_predicted(ids) for ids in window)
            value = 0.0
            for ids in window:
                with engine.forward():
                    loss = next_token_loss(model(ids), ids)
                engine.backward(loss, weight=num_predicted(ids))
                engine.step()
                value += loss.item() * num_predicted(ids) / total
            losses.append(value)
    return losses


# T5: an encoder-decoder with relative positions, and a feed-forward layer that clamps where fp16 would overflow.


class T5Layer(nn.Module):
    """Attention with a position bias, and a feed-forward layer whose output is clamped in fp16."""

    def __init__(self, width, *, cross=False):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.norm_cross, self.cross = (RMSNorm(width), Attention(width)) if cross else (None, None)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x, bias, memory=None):
        h = self.norm1(x)
        scores = self.q(h) @ self.k(h).transpose(-1, -2) + bias
        attention = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        x = x + self.o(attention @ self.v(h))
        if self.cross is not None:
            x = x + self.cross(self.norm_cross(x), memory)
        x = x + self.down(F.relu(self.up(self.norm2(x))))
        if x.dtype is torch.float16:
            largest = torch.finfo(x.dtype).max - torch.where(x.isinf().any(), 1000, 0)
            x = x.clamp(min=-largest, max=largest)
        return x


class T5(nn.Module):
    """One shared embedding for encoder, decoder and output, which is scaled down before the logits."""

    def __init__(self, width=16, length=8):
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(2 * length, 1)
        self.encoder, self.decoder = T5Layer(width), T5Layer(width, cross=True)
        self.norm, self.norm_memory = RMSNorm(width), RMSNorm(width)

    def bias(self, length, *, causal):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        bias = self.positions(distance + 8)[..., 0]
        return bias.masked_fill(distance < 0, -1e4) if causal else bias

    def forward(self, source, target):
        memory = self.norm_memory(self.encoder(self.shared(source), self.bias(source.shape[1], causal=False)))
        x = self.decoder(self.shared(target), self.bias(target.shape[1], causal=True), memory)
        return F.linear(self.norm(x) * self.shared.embedding_dim**-0.5, self.shared.weight)


def start_t5():
    torch.manual_seed(3)
    model = T5()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3), tokens(STEPS, seed=3)


def plain_t5(preset):
    model, optimizer, data = start_t5()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for ids in data:
        optimizer.zero_grad()
        with amp.autocast():
            loss = next_token_loss(model(ids.flip(1), ids).float(), ids)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def converted_t5(precision):
    model, optimizer, data = start_t5()
    losses = []
    with halfstep.Engine(model, optimizer, precision) as engine:
        for ids in data:
            with engine.forward():
                loss = next_token_loss(model(ids.flip(1), ids), ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


# BERT: masked tokens with ignore_index, groups by parameter name, linear warm-up and decay.


class Bert(nn.Module):
    """An encoder with a transformed head tied to the embedding."""

    def __init__(self, width=16, length=8):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY + 1, width), nn.Embedding(length, width)
        self.embedding_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, VOCABULARY + 1)
        self.decoder.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.2)

    def forward(self, ids):
        x = self.embedding_norm(self.token(ids) + self.position(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.decoder(self.transform(x))


def masked(count, seed):
    """Batches of tokens with some replaced by the mask, and labels that are -100 everywhere else."""
    g, batches = generator(seed), []
    for ids in tokens(count, seed=seed):
        chosen = torch.rand(ids.shape, generator=g) < 0.3
        chosen[0, 0] = True
        batches.append((ids.masked_fill(chosen, VOCABULARY), ids.masked_fill(~chosen, -100)))
    return batches


def start_bert():
    torch.manual_seed(4)
    model = Bert()
    names = dict(model.named_parameters())
    plain = [name for name in names if name.endswith("bias") or "norm" in name]
    groups = [
        {"params": [p for name, p in names.items() if name not in plain], "weight_decay": 0.01},
        {"params": [names[name] for name in plain], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    warmup = 5

    def factor(step):
        return step / warmup if step < warmup else (STEPS - step) / (STEPS - warmup)

    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor), masked(2 * STEPS, 4)


def plain_bert(preset):
    model, optimizer, scheduler, data = start_bert()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for ids, labels in data[:STEPS]:
        with amp.autocast():
            loss = F.cross_entropy(model(ids).float().flatten(0, 1), labels.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def converted_bert(precision):
    model, optimizer, scheduler, data = start_bert()
    losses = []
    with halfstep.Engine(model, optimizer, precision, max_norm=1.0, scheduler=scheduler) as engine:
        for ids, labels in data[:STEPS]:
            with engine.forward():
                loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


# Masked tokens as the weight of a micro-batch: the count is a tensor, as it would be on a GPU.


def plain_masked_tokens(preset):
    model, optimizer, scheduler, data = start_bert()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for step in range(STEPS):
        window = data[2 * step : 2 * step + 2]
        count = sum((labels != -100).sum() for _, labels in window)
        value = 0.0
        for ids, labels in window:
            with amp.autocast():
                logits = model(ids).float()
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
            scaler.scale(loss).backward()
            value += loss.item()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(value)
    return losses


def converted_masked_tokens(precision):
    model, optimizer, scheduler, data = start_bert()
    losses = []
    with halfstep.Engine(model, optimizer, precision, accumulate=2, scheduler=scheduler) as engine:
        for step in range(STEPS):
            window = data[2 * step : 2 * step + 2]
            count = sum((labels != -100).sum() for _, labels in window)
            value = 0.0
            for ids, labels in window:
                num_masked = (labels != -100).sum()
                with engine.forward():
                    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
                engine.backward(loss, weight=num_masked)
                engine.step()
                value += (loss * num_masked / count).item()
            losses.append(value)
    return losses


# Whisper: convolutions over a spectrogram, sinusoids in a buffer, a decoder with cross-attention and a tied head.


class Whisper(nn.Module):
    """A small audio encoder and text decoder."""

    def __init__(self, mels=4, width=16, length=8):
        super().__init__()
        self.conv1 = nn.Conv1d(mels, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        angles = torch.arange(length)[:, None] * 50.0 ** -torch.linspace(0, 1, width // 2)
        self.register_buffer("sinusoids", torch.cat([angles.sin(), angles.cos()], -1))
        self.encoder, self.encoder_norm = Block(width), nn.LayerNorm(width)
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.zeros(length, width))
        self.decoder, self.decoder_norm = Block(width, causal=True, cross=True), nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.2)

    def forward(self, sound, ids):
        x = F.gelu(self.conv2(F.gelu(self.conv1(sound)))).transpose(1, 2)
        memory = self.encoder_norm(self.encoder((x + self.sinusoids[: x.shape[1]]).to(x.dtype)))
        x = self.decoder(self.token(ids) + self.position[: ids.shape[1]], memory)
        return self.decoder_norm(x) @ self.token.weight.t()


def start_whisper():
    torch.manual_seed(5)
    model = Whisper()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    g = generator(5)
    return model, optimizer, [(torch.randn(4, 4, 12, generator=g), ids) for ids in tokens(STEPS, seed=5)]


def plain_whisper(preset):
    model, optimizer, data = start_whisper()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for sound, ids in data:
        with amp.autocast():
            loss = next_token_loss(model(sound, ids).float(), ids)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def converted_whisper(precision):
    model, optimizer, data = start_whisper()
    losses = []
    with halfstep.Engine(model, optimizer, precision, max_norm=1.0) as engine:
        for sound, ids in data:
            with engine.forward():
                loss = next_token_loss(model(sound, ids), ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


# A translation model of GRUs with teacher forcing. (oneDNN has no LSTM in fp16 on many CPUs.)


class Translator(nn.Module):
    """A GRU encoder whose state starts a GRU decoder."""

    def __init__(self, width=16):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.encoder, self.decoder = nn.GRU(width, width, batch_first=True), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source, target):
        _, state = self.encoder(self.token(source))
        return self.head(self.decoder(self.token(target), state)[0])


def start_gru():
    torch.manual_seed(6)
    model = Translator()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2), tokens(STEPS, length=6, seed=6)


def plain_gru(preset):
    model, optimizer, data = start_gru()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for ids in data:
        optimizer.zero_grad()
        with amp.autocast():
            loss = next_token_loss(model(ids.flip(1), ids).float(), ids)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def converted_gru(precision):
    model, optimizer, data = start_gru()
    losses = []
    with halfstep.Engine(model, optimizer, precision, max_norm=1.0) as engine:
        for ids in data:
            with engine.forward():
                loss = next_token_loss(model(ids.flip(1), ids), ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses
