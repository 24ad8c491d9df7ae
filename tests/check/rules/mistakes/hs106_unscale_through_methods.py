# HS106:10 unscale_ runs on every micro-batch, behind a method.
import torch

class Model(torch.nn.Module):
    def setup(self):
        self._scaler = torch.amp.GradScaler("cuda", enabled=self.amp)

    def _unscale(self):
        if self.amp:
            self._scaler.unscale_(self._optimizer)

    def optimize_parameters(self):
        with torch.autocast("cuda", enabled=self.amp):
            self.forward()
        self.loss = self._scaler.scale(self.loss)
        make_optimizer_step = self._count()
        self.loss.backward()
        self._unscale()
        torch.nn.utils.clip_grad_value_(self.parameters(), 1.0)
        if make_optimizer_step:
            self._scaler.step(self._optimizer)
        self._scaler.update()
