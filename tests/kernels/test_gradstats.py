"""The norm that decides a step, against float64 over everything a gradient can be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.gradstats import dense_values, flag_and_norm, sums_of_squares, total_norm

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(
    not triton_runs_on(DEVICE), reason="Requires: [a CUDA device, or TRITON_INTERPRET=1]"
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]

# Some versions of torch say so whenever a sparse tensor is made, here or in coalesce().
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def reference(grads):
    """The norm in float64, from the densest form of every gradient."""
    total = 0.0
    for grad in grads:
        dense = grad.to_dense() if grad.is_sparse else grad
        dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        total += dense.double().square().sum().item()
    return total**0.5


def random_grad(shape, dtype, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn(shape, generator=generator, dtype=torch.float64) * size
    if dtype.is_complex:
        return torch.complex(real, torch.randn(shape, generator=generator, dtype=torch.float64) * size).to(dtype)
    return real.to(dtype)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6), st.integers(0, 999), st.integers(-8, 8))
def test_norm_is_the_float64_norm_over_mixed_gradients(kinds, seed, exponent):
    """Any mixture of dtypes and shapes, empty and scalar ones included, gives the norm to fp32 accuracy."""
    size = 2.0**exponent
    grads = [random_grad(shape, dtype, seed + i, size) for i, (shape, dtype) in enumerate(kinds)]
    norm = total_norm(grads, CPU)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    assert norm.item() == pytest.approx(reference(grads), rel=2e-6)


def test_norm_of_no_gradients_is_zero():
    """No gradients at all, or only empty ones, have norm 0."""
    assert total_norm([], CPU).item() == 0
    assert total_norm([torch.zeros(0), torch.zeros(3, 0, dtype=torch.float16)], CPU).item() == 0


def test_norm_of_no_gradients_is_fp32_whatever_the_default_dtype():
    """An empty norm has the dtype of every other norm, so that flags and divisors made from it fit together."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        norm = total_norm([], CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert norm.dtype is torch.float32


def test_norm_of_a_long_vector_does_not_stagnate():
    """A million equal fp16 or bf16 elements are all counted."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert total_norm([torch.full((1 << 20,), 0.25, dtype=dtype)], CPU).item() == pytest.approx(256.0, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_beyond_fp16_do_not_overflow(dtype):
    """Loss-scaled 16-bit gradients have squares far above 65504; their norm is still finite and right."""
    grads = [torch.full((10,), 60000.0, dtype=dtype), torch.full((3, 3), -40000.0, dtype=dtype)]
    assert total_norm(grads, CPU).item() == pytest.approx(reference(grads), rel=1e-6)


def test_squares_below_fp16_do_not_vanish():
    """The smallest fp16 subnormals, whose squares fp16 cannot hold, still have a norm."""
    grads = [torch.full((4,), 2.0**-24, dtype=torch.float16)]
    assert total_norm(grads, CPU).item() == pytest.approx(2.0**-23, rel=1e-6)


def test_fp64_gradients_are_summed_in_fp64():
    """fp64 gradients whose squares leave fp32's range are still finite."""
    grads = [torch.tensor([3e30, 4e30], dtype=torch.float64)]
    assert total_norm(grads, CPU).item() == pytest.approx(5e30, rel=1e-6)


def test_sparse_gradients_count_summed_rows():
    """After coalescing, duplicate rows count as the sum they are; the norm equals the dense one."""
    embedding = nn.Embedding(10, 3, sparse=True)
    (embedding(torch.tensor([1, 1, 4, 1])) * torch.arange(1.0, 13.0).view(4, 3)).sum().backward()
    grad = embedding.weight.grad
    assert not grad.is_coalesced()
    summed = grad.coalesce()
    assert total_norm([summed], CPU).item() == pytest.approx(reference([grad]), rel=1e-6)


def test_dense_values_share_memory_with_the_gradient():
    """What is changed through dense_values is changed in the gradient: dense, sparse, complex, sparse complex."""
    dense, complex_ = torch.ones(3), torch.ones(3, dtype=torch.complex64)
    sparse = torch.sparse_coo_tensor(
        [[0, 2]], torch.ones(2, dtype=torch.complex64), (4,), check_invariants=True
    ).coalesce()
    for grad in (dense, complex_, sparse):
        values = dense_values(grad)
        assert not values.is_sparse
        assert not values.is_complex()
        values.mul_(2)
    assert dense.tolist() == [2, 2, 2]
    assert complex_.tolist() == [2 + 0j] * 3
    assert sparse.to_dense().tolist() == [2, 0, 2, 0]


def test_gradients_with_a_lazy_conjugate_are_taken():
    """Autograd gives complex parameters gradients whose conjugation is only noted; they are gradients all the same."""
    param = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    (param.conj() * (1 + 2j)).real.sum().backward()
    assert param.grad.is_conj()
    expected = param.grad.resolve_conj().clone()
    assert total_norm([param.grad], CPU).item() == pytest.approx(reference([param.grad]), rel=1e-6)
    dense_values(param.grad).mul_(2)
    assert torch.equal(param.grad.resolve_conj(), expected * 2)


@given(
    st.lists(st.tuples(shapes.filter(lambda s: 0 not in s), st.sampled_from(DTYPES)), min_size=1, max_size=4),
    st.sampled_from([torch.inf, -torch.inf, torch.nan]),
    st.data(),
)
def test_one_bad_element_anywhere_makes_the_norm_non_finite(kinds, bad, data):
    """An inf or NaN at any position of any gradient is detected."""
    grads = [random_grad(shape, dtype, i) for i, (shape, dtype) in enumerate(kinds)]
    values = dense_values(grads[data.draw(st.integers(0, len(grads) - 1), label="gradient")]).reshape(-1)
    position = data.draw(st.integers(0, values.numel() - 1), label="position")
    values[position] = bad
    assert not total_norm(grads, CPU).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_bad_element_of_a_large_gradient_is_seen(dtype):
    """Vectorised reductions see the first, the last and any other element."""
    for position in (0, 1, 4095, 4096, 70000, 99_999):
        grad = torch.zeros(100_000, dtype=dtype)
        grad[position] = torch.nan
        assert total_norm([torch.ones(5), grad], CPU).isnan()


def test_a_bad_element_of_a_sparse_gradient_is_seen():
    """Values of sparse gradients are looked at too, and duplicate rows that overflow when summed."""
    twice = torch.tensor([40000.0, 40000.0], dtype=torch.float16)
    grad = torch.sparse_coo_tensor([[1, 1]], twice, (5,), check_invariants=True)
    assert total_norm([grad], CPU).isfinite()
    assert total_norm([grad.coalesce()], CPU).isinf()
    bad = torch.sparse_coo_tensor([[3]], torch.tensor([torch.nan]), (5,), check_invariants=True)
    assert total_norm([bad], CPU).isnan()


def test_non_contiguous_gradients_count_each_element_once():
    """Transposed and expanded gradients have the norm of what they show."""
    base = torch.randn(4, 6)
    grads = [base.t(), base[:, ::2], torch.tensor(2.0).expand(5)]
    assert total_norm(grads, CPU).item() == pytest.approx(reference(grads), rel=1e-6)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,), (torch.float32, torch.bfloat16, torch.float32), (torch.float64,)]
)
def test_flag_and_norm_are_those_of_all_gradients(dtypes):
    """One dtype or several, other addresses in the next call: the norm is that of float64, and one bad element sets the flag."""
    tables = {}
    for turn in range(3):
        grads = [random_grad((3, 70 + i), dtype, 10 * turn + i) for i, dtype in enumerate(dtypes)]
        grads.append(torch.zeros(0, dtype=dtypes[0]))
        flag, norm = flag_and_norm(grads, tables)
        assert norm.item() == pytest.approx(reference(grads), rel=2e-6)
        assert (flag.item(), flag.dtype, norm.dtype) == (0.0, torch.float32, torch.float32)
        for bad in (float("nan"), float("inf")):
            grads[turn % len(dtypes)][1, 5] = bad
            flag, norm = flag_and_norm(grads, tables)
            assert flag.item() == 1.0
            assert not norm.isfinite()


def test_flag_and_norm_take_strided_and_sparse_gradients():
    """What the kernel does not read is left to torch."""
    dense = random_grad((4, 6), torch.float32, 0)
    grads = [dense.t(), random_grad((5,), torch.float32, 1).to_sparse()]
    assert flag_and_norm(grads, {})[1].item() == pytest.approx(reference(grads), rel=2e-6)


@needs_kernels
def test_sums_of_several_dtypes_are_in_the_order_of_the_gradients():
    """fp32 gradients between bf16 ones, other addresses, another order of dtypes, the same memory again: each sum is its own."""
    tables = {}
    kinds = [(torch.float32, torch.bfloat16, torch.float32, torch.float16), (torch.bfloat16,) * 3, (torch.float32,)]
    for turn, dtypes in enumerate([kinds[0], kinds[0], *kinds]):
        grads = [random_grad((i + 1, 30), dtype, 10 * turn + i).to(DEVICE) for i, dtype in enumerate(dtypes)]
        expected = [grad.double().square().sum().item() for grad in grads]
        for _ in range(2):
            assert sums_of_squares(grads, tables).tolist() == pytest.approx(expected, rel=2e-6)
        grads[-1].mul_(2)  # in the same memory
        assert sums_of_squares(grads, tables).tolist() == pytest.approx([*expected[:-1], 4 * expected[-1]], rel=2e-6)


@needs_kernels
def test_sums_of_gradients_that_come_back_to_the_memory_of_an_earlier_step():
    """Two sets of addresses in turn, then other sizes and another dtype in the same memory: each sum is its own."""
    tables = {}
    memory = [[torch.zeros(96, device=DEVICE) for _ in range(3)] for _ in range(2)]
    for turn in range(12):
        buffers = memory[turn % 2]
        sizes = (90, 64, 33) if turn < 8 else (64, 33, 90)
        grads = [buffer[:size] for buffer, size in zip(buffers, sizes, strict=True)]
        if turn >= 10:
            grads = [grad.view(torch.bfloat16) for grad in grads]
        for i, grad in enumerate(grads):
            grad.copy_(random_grad(grad.shape, grad.dtype, 10 * turn + i))
        expected = [grad.double().square().sum().item() for grad in grads]
        assert sums_of_squares(grads, tables).tolist() == pytest.approx(expected, rel=2e-6)


def test_without_tables_or_with_other_dtypes_there_are_no_sums():
    """What kernels cannot read, and a caller who keeps no tables, are left to torch."""
    grads = [random_grad((4,), torch.float32, 0), random_grad((4,), torch.float64, 1)]
    assert sums_of_squares(grads[:1], None) is None
    assert sums_of_squares(grads, {}) is None
    assert sums_of_squares([], {}) is None
