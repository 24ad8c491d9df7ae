# HS104:18 Clipping without unscale_, in a method that receives a scaler that may be None.
import torch

class Trainer:
    def train(self):
        scaler = torch.amp.GradScaler("cuda") if self.amp else None
        for i, batch in enumerate(self.loader):
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
                loss = self.model(batch)
            if scaler is not None:
                scaler.scale(loss).backward()
                self._optim_step(scaler)
            else:
                loss.backward()
                self._optim_step(None)

    def _optim_step(self, scaler):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if scaler is not None:
            scaler.step(self.optim)
            scaler.update()
        else:
            self.optim.step()
        self.optim.zero_grad()
