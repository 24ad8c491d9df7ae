"""Independent implementations of the five scaler rules in plain Python, written from the logic of their sources."""


class TorchRule:
    """_amp_update_scale_: no hysteresis, the counter must reach the interval."""

    def __init__(self, scale, growth, backoff, interval, hysteresis, floor, cap):
        self.scale, self.growth, self.backoff, self.interval = scale, growth, backoff, interval
        self.full = self.left = hysteresis
        self.floor, self.cap = floor, cap
        self.clean = 0

    def lower(self):
        self.scale = max(self.scale * self.backoff, self.floor)

    def raise_(self):
        self.scale = min(self.scale * self.growth, self.cap)

    def update(self, overflow):
        if overflow:
            self.lower()
            self.clean = 0
        else:
            self.clean += 1
            if self.clean == self.interval:
                self.raise_()
                self.clean = 0


class ApexRule(TorchRule):
    """update_scale_hysteresis.cu: an overflow is tolerated while the tracker stays above 0; a clean step resets it."""

    def update(self, overflow):
        if overflow:
            self.left -= 1
            if self.left > 0:
                self.clean = 0
                return
        super().update(overflow)
        if not overflow:
            self.left = self.full


class MegatronRule(TorchRule):
    """DynamicGradScaler: hysteresis is reset only by growth."""

    def update(self, overflow):
        if overflow:
            self.clean = 0
            self.left -= 1
            if self.left <= 0:
                self.lower()
        else:
            self.clean += 1
            if self.clean == self.interval:
                self.clean = 0
                self.left = self.full
                self.raise_()


class DeepSpeedRule(TorchRule):
    """DynamicLossScaler with raise_error_at_min_scale=False."""

    consecutive = False

    def __init__(self, *args):
        super().__init__(*args)
        self.cur_iter, self.last_overflow_iter = 0, -1

    def update(self, overflow):
        if overflow:
            if self.full == 1 or self.left == 1:
                self.lower()
            else:
                self.left -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive:
                self.left = self.full
            since = self.cur_iter - self.last_overflow_iter - 1
            if since > 0 and since % self.interval == 0:
                if not self.consecutive:
                    self.left = self.full
                self.raise_()
        self.cur_iter += 1


class DeepSpeedConsecutiveRule(DeepSpeedRule):
    """The same with consecutive_hysteresis=True."""

    consecutive = True


RULES = {
    "torch": TorchRule,
    "apex": ApexRule,
    "megatron": MegatronRule,
    "deepspeed": DeepSpeedRule,
    "deepspeed-consecutive": DeepSpeedConsecutiveRule,
}
