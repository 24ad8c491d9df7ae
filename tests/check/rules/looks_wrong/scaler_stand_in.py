# optimizer.step() follows scale(), but inside a stand-in class whose scale() does nothing.
import torch

class NoScaler:
    def scale(self, loss):
        return loss

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass

class Trainer:
    def setup(self):
        if self.mixed_precision:
            self.scaler = torch.amp.GradScaler("cuda")
        else:
            self.scaler = NoScaler()

    def train(self, loader):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.mixed_precision):
                loss = self.model(x, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
