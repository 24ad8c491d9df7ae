# float16 autocast without a GradScaler: the DeepSpeed engine scales the loss and takes the step.
import deepspeed
import torch

engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=params, config="ds.json")
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = engine(x, y)
    engine.backward(loss)
    engine.step()
