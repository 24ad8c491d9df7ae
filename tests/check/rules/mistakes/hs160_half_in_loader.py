# HS160:11 A loader method returns the model in float16.
import torch
from transformers import AutoModelForCausalLM

class Tuner:
    def __init__(self, name):
        self.model = self._load(name)

    def _load(self, name):
        model = AutoModelForCausalLM.from_pretrained(name)
        model.half()
        return model

    def train(self, data):
        scaler = torch.amp.GradScaler("cuda")
        for batch in data:
            self.train_step(batch, scaler)

    def train_step(self, batch, scaler):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
