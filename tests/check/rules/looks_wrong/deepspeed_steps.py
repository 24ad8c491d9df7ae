# float16 autocast without a GradScaler: the DeepSpeed engine scales the loss and takes the step.
import deepspeed
import torch

ds_config = {
    "train_batch_size": 8,
    "gradient_clipping": 0.0,
    "torch_autocast": {"enabled": True, "dtype": "float16"},
}
engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=params, config=ds_config)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = engine(x, y)
    engine.backward(loss)
    engine.step()
