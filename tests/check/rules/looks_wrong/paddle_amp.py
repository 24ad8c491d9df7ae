# PaddlePaddle's GradScaler has the names of torch's, and its own rules.
import paddle

scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
for x, y in loader:
    loss = loss_fn(model(x), y)
    if fp16:
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
    optimizer.step()
    optimizer.clear_grad()
