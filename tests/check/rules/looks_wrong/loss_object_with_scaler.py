# The backward has no visible scale(): the loss object was constructed with the scaler.
import torch

class ScaledLoss:
    def __init__(self, scaler, plain):
        self.scaler = scaler
        self.plain = plain

    def __call__(self, output, target):
        return self.scaler.scale(self.plain(output, target))

class Loop:
    def __init__(self, loss):
        self.scaler = torch.amp.GradScaler("cuda")
        self.loss = ScaledLoss(self.scaler, loss)

    def epoch(self, loader):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.loss(self.model(x), y)
            loss.backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
