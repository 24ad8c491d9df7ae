# The variable `scaler` is scikit-learn's StandardScaler, not a GradScaler.
import torch
from sklearn.preprocessing import StandardScaler

scaler = StandardScaler()
features = scaler.fit_transform(features)
model = Net()
optimizer = torch.optim.Adam(model.parameters())
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "mean": scaler.mean_}, "x.pt")
optimizer.load_state_dict(torch.load("x.pt")["optimizer"])
