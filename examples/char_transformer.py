"""A character-level transformer in your own loop with the Engine: bf16 compute, fp32 weights, loss weighted by characters.

The text is written here, so that the example needs no download; replace TEXT by your own file.
"""

import torch
import torch.nn.functional as F
from torch import nn

import halfstep

TEXT = "".join(f"{n} times {m} is {n * m}. " for n in range(2, 10) for m in range(2, 10))
CONTEXT, WIDTH = 32, 32

torch.manual_seed(0)
characters = sorted(set(TEXT))
codes = torch.tensor([characters.index(c) for c in TEXT])


class Transformer(nn.Module):
    """Embeddings, one causal block, and logits over the characters."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(len(characters), WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, len(characters))

    def forward(self, tokens):
        """Logits of the next character at every place."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.token(tokens) + self.place[:length]
        return self.head(self.block(hidden, src_mask=mask, is_causal=True))


model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = halfstep.Engine(model, optimizer, "bf16", max_norm=1.0)


def batch(size=8):
    starts = torch.randint(len(codes) - CONTEXT - 1, (size,))
    windows = torch.stack([codes[s : s + CONTEXT + 1] for s in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


losses = []
for _ in range(60):
    inputs, targets = batch()
    with engine.forward():
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())  # in fp32, whatever the logits are
    engine.backward(loss, weight=targets.numel())
    engine.step()
    losses.append(loss.item())

text = "7 times "
with engine.evaluate():
    for _ in range(12):
        window = torch.tensor([[characters.index(c) for c in text[-CONTEXT:]]])
        text += characters[model(window)[0, -1].argmax().item()]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; it writes: {text!r}")
assert losses[-1] < 0.6 * losses[0]
engine.close()
