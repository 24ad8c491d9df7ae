# HS121:6 A method creates the scaler once per epoch; the checkpoint's file name contains `model`.
import torch

class Trainer:
    def _train_epoch(self, data):
        scaler = torch.amp.GradScaler("cuda", enabled=self.amp)
        for batch in data:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", enabled=self.amp):
                loss = self.model(batch)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()

    def _save(self, **kwargs):
        saved_model_file = kwargs.pop("saved_model_file", self.path)
        torch.save(self.model.state_dict(), saved_model_file)

    def fit(self, data):
        for epoch in range(self.epochs):
            self._train_epoch(data)
            self._save()
