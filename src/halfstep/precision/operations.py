"""Operations whose dtypes a Halfstep region decides, by name: what torch's two autocast lists lack.

How it works. Autocast casts the inputs of the operations on its list, and each device has its own list. What one device's
list lacks, the region takes from the other's. Some operations are on neither list: with fp32 weights that never shows, but
next to 16-bit weights (lean presets, frozen bases) they raise a dtype mismatch or have no 16-bit kernel at all. There are
six kinds:

    fp32     16-bit inputs are cast to fp32: sums, exponentials, losses, decompositions of matrices
    lower    inputs are cast to the region's 16 bits: products of matrices and vectors
    widest   if dtypes are mixed, 16-bit inputs are cast to fp32
    first    the other inputs are cast to the dtype of the first: operations in place, and large tables
    norm     weights and statistics of mixed dtypes are cast to fp32; the result has the input's dtype

    loss     cross_entropy by a fused kernel that reads 16 bits and computes in fp32

Lean presets (16-bit weights) have a different rule for the fp32 operations. Most of them give a result as large as their
input, and an fp32 one would flow on through the network: twice the memory traffic of a pure 16-bit model. Their kernels
compute in fp32 inside, so there they take and give 16 bits (`LEAN_16_BIT`). What reduces still gives fp32, except where
it keeps the reduced dimension: such a result scales its input, and `x / x.norm(dim=-1, keepdim=True)` would be fp32; so does
a division by one that was given the dimension back (`LEAN_QUOTIENTS`). fp16 keeps fp32 results where its range needs them
(`FP16_RANGE`).

Names are base names; `engine/region` reads the overloads from the installed torch.
"""

from __future__ import annotations

__all__ = [
    "BROADCAST_BACK", "FP16_RANGE", "FP32_INPUTS", "FP32_OUTPUTS", "KINDS", "LEAN_16_BIT", "LEAN_FP32", "LEAN_QUOTIENTS",
    "ON_EVERY_DEVICE", "ON_THE_OTHER_LIST", "SCALED_NORMS",
]  # fmt: skip

KINDS = ("fp32", "lower", "widest", "first", "norm", "loss")

# Operations that CUDA's autocast runs in fp32 and the CPU's does not; the planner uses them as well. CUDA casts the
# inputs of the first group, and has kernels for the second that read 16 bits and write fp32.
FP32_INPUTS = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "logsumexp", "dist", "renorm", "cosine_similarity", "pdist",
)  # fmt: skip
FP32_OUTPUTS = ("sum", "prod", "cumsum", "cumprod", "norm", "linalg_vector_norm", "linalg_matrix_norm")
# Also on CUDA's fp32 list, for which the CPU has no 16-bit kernel. CUDA's other upsamplings and its normalisation layers
# have 16-bit kernels on a CPU with fp32 inside, and stay.
_RESIZED = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
# Cells of recurrent layers are on CUDA's list too; on a CPU they work as they are, with an fp32 cell state.
_PRODUCTS = (
    "mv", "addmv", "addr", "einsum", "chain_matmul", "linalg_multi_dot", "convolution", "_convolution",
)  # fmt: skip
_PROMOTED = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "scatter_add", "tensordot",
)  # fmt: skip

# No 16-bit kernels, or none that computes the backward pass too. A CPU's list has a part of them.
_LINEAR_ALGEBRA = (
    "linalg_det", "det", "logdet", "linalg_slogdet", "slogdet", "_linalg_det", "_linalg_slogdet",
    "linalg_matrix_exp", "matrix_exp", "linalg_qr", "qr", "geqrf", "orgqr", "ormqr", "linalg_householder_product",
    "linalg_inv", "linalg_inv_ex", "inverse", "linalg_pinv", "pinverse", "linalg_tensorinv",
    "linalg_solve", "linalg_solve_ex", "_linalg_solve_ex", "linalg_tensorsolve", "linalg_solve_triangular",
    "triangular_solve", "linalg_lstsq", "linalg_cholesky", "linalg_cholesky_ex", "cholesky", "cholesky_solve",
    "cholesky_inverse", "linalg_svd", "_linalg_svd", "linalg_svdvals", "svd", "linalg_eig", "linalg_eigvals",
    "linalg_eigh", "linalg_eigvalsh", "_linalg_eigh", "linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex",
    "linalg_lu_solve", "_lu_with_info", "lu_solve", "lu_unpack", "linalg_ldl_factor", "linalg_ldl_factor_ex",
    "linalg_ldl_solve", "linalg_cond", "linalg_matrix_rank", "linalg_vander",
)  # fmt: skip
_FOURIER = (
    "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft", "fft_fft2", "fft_ifft2", "fft_rfft2",
    "fft_irfft2", "fft_hfft2", "fft_ihfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_hfftn", "fft_ihfftn",
    "stft", "istft", "complex", "polar", "view_as_complex",
)  # fmt: skip
_FUNCTIONS = (
    "lgamma", "digamma", "polygamma", "special_i1", "special_i1e", "special_i0e", "special_log_ndtr", "special_ndtri",
    "special_erfcx", "special_zeta", "special_airy_ai", "special_bessel_j0", "special_bessel_j1", "special_bessel_y0",
    "special_bessel_y1", "special_spherical_bessel_j0", "special_modified_bessel_i0", "special_modified_bessel_i1",
    "special_modified_bessel_k0", "special_modified_bessel_k1", "special_scaled_modified_bessel_k0",
    "special_scaled_modified_bessel_k1", "special_chebyshev_polynomial_t", "special_chebyshev_polynomial_u",
    "special_chebyshev_polynomial_v", "special_chebyshev_polynomial_w", "special_shifted_chebyshev_polynomial_t",
    "special_shifted_chebyshev_polynomial_u", "special_shifted_chebyshev_polynomial_v",
    "special_shifted_chebyshev_polynomial_w", "special_hermite_polynomial_h", "special_hermite_polynomial_he",
    "special_laguerre_polynomial_l", "special_legendre_polynomial_p",
    "_sample_dirichlet", "_standard_gamma", "quantile", "nanquantile", "histogram", "histogramdd",
)  # fmt: skip
_MIXED = (
    "lerp", "index_add", "index_copy", "index_reduce", "scatter", "scatter_reduce", "masked_scatter", "put", "meshgrid",
    "linalg_cross", "isclose", "heaviside",
)  # fmt: skip
_IN_PLACE = (
    "lerp_", "index_put_", "index_add_", "index_copy_", "index_reduce_", "scatter_", "scatter_add_", "scatter_reduce_",
    "masked_scatter_", "put_", "addmv_", "addr_", "addmm_", "addbmm_", "baddbmm_", "heaviside_",
)  # fmt: skip

_NORMS = ("layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "batch_norm", "instance_norm")

# By device type and kind: what its list lacks and the other device's has.
ON_THE_OTHER_LIST: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "fp32": (*FP32_INPUTS, "softmax", "log_softmax", *FP32_OUTPUTS, *_RESIZED),
        "lower": _PRODUCTS,
        "widest": _PROMOTED,
    },
    "cuda": {"fp32": ("ctc_loss",), "loss": ("cross_entropy_loss",)},
}
# By device type and kind: what needs a cast whatever the lists have. The layer that a Transformer runs in eval mode skips
# autocast on a CPU. CUDA's own list has the normalisation layers, and its batch norm is called too often for a check.
_EVERYWHERE: dict[str, tuple[str, ...]] = {
    "fp32": (*_LINEAR_ALGEBRA, *_FOURIER, *_FUNCTIONS),
    "lower": ("_transformer_encoder_layer_fwd",),
    "widest": _MIXED,
    "first": ("embedding_bag", *_IN_PLACE),
}
ON_EVERY_DEVICE: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": _EVERYWHERE | {"norm": (*_NORMS, "rms_norm")},
    "cuda": _EVERYWHERE | {"norm": ("instance_norm", "rms_norm")},
}

# Lean presets. Normalisation layers whose weights are 16-bit too; batch norm's stay fp32, and its kernels mix them.
SCALED_NORMS = ("layer_norm", "native_layer_norm", "group_norm", "rms_norm")
_UPSAMPLINGS = (
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
    "upsample_bicubic2d", *_RESIZED,
)  # fmt: skip
# As large as their input, with fp32 inside their kernels. log_softmax is left out: it is half of a loss, and
# log-probabilities of a large vocabulary (-10 and below) would have an error of 2^-5 in bf16.
LEAN_16_BIT = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "renorm", "softmax", *_UPSAMPLINGS,
)  # fmt: skip
# Of those, results that can pass 65504 where the input did not. A cube and the square of a ReLU are exceptions: see
# `engine/region/casts.py`.
FP16_RANGE = ("cosh", "exp", "expm1", "pow", "reciprocal", "sinh", "tan")
# Reductions that follow their input's dtype where they keep the reduced dimension; in fp16 norms do, for sums its range is
# too small.
BROADCAST_BACK = ("sum", "prod", "norm", "linalg_vector_norm")
# On no list of torch's, but how hand-written losses end: `(x - y).pow(2).mean()` is fp32 under torch.amp because pow is. The
# mean of all elements only; over a dimension it is a layer (pooling).
LEAN_FP32 = ("mean",)
# Divisions by an fp32 tensor that is smaller than the 16-bit dividend give 16 bits in bf16: mostly by a sum that lost its
# dimension and got it back, `x / x.sum(-1).unsqueeze(-1)`, as if it had kept it. Products and differences are too frequent
# for a kernel of ours, and with a logsumexp a difference is half of a loss.
LEAN_QUOTIENTS = ("div", "div_")
