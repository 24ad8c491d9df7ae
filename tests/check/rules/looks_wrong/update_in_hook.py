# update() is called by a hook that is looked up by name.
import torch

class Trainer:
    def setup(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def run(self):
        for x, y in self.loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.call("after_step")

    def after_step(self):
        self.scaler.update()
        self.optimizer.zero_grad()
