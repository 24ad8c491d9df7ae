"""Strategies for every kind of tree that a checkpoint can store, and an exact comparison."""

import math
import struct
from collections import Counter, OrderedDict

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def bits(tensor):
    """The raw bytes of a tensor of any dtype."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def same(a, b):
    """Equal in type, structure, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@st.composite
def tensors(draw):
    """A tensor of any dtype with random bits, of rank 0 to 3, sometimes empty, not always contiguous."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    data = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    tensor = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(shape)
    layout = draw(st.sampled_from(["plain", "transposed", "every second", "expanded"]))
    if layout == "transposed" and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    elif layout == "every second" and tensor.dim():
        tensor = tensor[::2]
    elif layout == "expanded":
        tensor = tensor.expand(2, *tensor.shape)
    return tensor


TEXT = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["$dict", "$", "nan", "", "a.b", "__metadata__", "\ud800"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.binary(max_size=8)
KEYS = (
    TEXT
    | st.integers()
    | st.booleans()
    | st.floats()
    | st.none()
    | st.binary(max_size=4)
    | st.tuples(st.integers(), TEXT)
)
NUMPY = st.sampled_from([
    np.float32(1.5), np.int64(-3), np.bool_(1), np.float64("nan"), np.arange(6, dtype=np.uint32).reshape(2, 3),
    np.array(2.5), np.zeros((0, 2), np.complex128), np.array([1.0, 2.0])[::-1],
])  # fmt: skip
TREES = st.recursive(
    SCALARS | tensors() | NUMPY,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(TEXT, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)
