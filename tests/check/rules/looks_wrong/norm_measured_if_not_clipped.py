# Only one of the two clippings runs: the second measures the norm where there was nothing to clip to.
from accelerate import Accelerator


class Trainer:
    def __init__(self, model, optimizer, loader, max_norm):
        self.accelerator = Accelerator(mixed_precision="fp16")
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.max_norm = max_norm

    def train(self):
        for batch in self.loader:
            self.accelerator.backward(self.model(**batch).loss)
            norm = None
            if self.max_norm > 0:
                norm = self.clip()
            self.log(self.norm_of(norm))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def clip(self):
        return self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def norm_of(self, norm=None):
        if norm is None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), float("inf"))
        return norm
