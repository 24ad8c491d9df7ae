# `engine.scale(...)` is DeepSpeed's, and no GradScaler is involved.
import deepspeed
engine, _, _, _ = deepspeed.initialize(model=model, config=path)
for x, y in loader:
    engine.scale(loss_fn(engine(x), y)).backward()
    engine.step()
