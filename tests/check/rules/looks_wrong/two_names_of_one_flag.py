# The scaled backward and the scaled step depend on two different names for the same flag.
import torch

class Engine:
    def __init__(self, model, optimizer, cfg):
        self.model, self.optimizer = model, optimizer
        self.use_amp = cfg.amp
        self.scaler = torch.amp.GradScaler("cuda") if cfg.amp else None

    def run(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.use_amp):
                loss = self.model(x, y)
            if self.scaler is not None:
                self.scaler.scale(loss).backward()
            else:
                loss.backward()
            if self.use_amp:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
