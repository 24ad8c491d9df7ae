# scaler.scale is reachable under no_grad, but only in the training stage.
import torch

class Learner:
    def batch(self, stage, x):
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.model(x)
        if stage == Stage.TRAIN:
            self.optimizer.zero_grad()
            self.scaler.scale(self.loss(out)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return out

    def fit(self, loader):
        self.scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            self.batch(Stage.TRAIN, x)

    def predict(self, loader):
        with torch.no_grad():
            return [self.batch(Stage.INFERENCE, x) for x in loader]
