"""The census of a GPU, read from profiler traces."""

import pytest
import torch

from halfstep.comparison.census_trace import read_trace, trace_step


def op(number, name, types=(), dims=()):
    args = {"External id": number, "Input type": list(types), "Input Dims": [list(d) for d in dims]}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": 5, "args": args}


def kernel(number, name, microseconds):
    return {"ph": "X", "cat": "kernel", "name": name, "dur": microseconds, "args": {"External id": number}}


def read(*events):
    return list(read_trace({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))


def test_a_kernel_counts_for_the_operator_that_launched_it():
    """An entry has the kernel's time and the operator's name, input format and shape."""
    (entry,) = read(
        op(7, "aten::mm", ["c10::BFloat16", "c10::BFloat16"], [[128, 1024], [1024, 4096]]),
        kernel(7, "sm90_xmma_gemm_bf16bf16_bf16f32_f32", 250.0),
    )
    assert (entry.op, entry.format, entry.seconds, entry.shape) == ("mm", "bf16", 250e-6, (128, 1024, 4096))


@pytest.mark.parametrize(
    ("events", "form"),
    [
        ((op(1, "aten::copy_", ["c10::BFloat16", "float"]), kernel(1, "direct_copy_kernel_cuda", 1)), "casts"),
        ((op(1, "aten::copy_", ["float", "float"]), kernel(1, "direct_copy_kernel_cuda", 1)), "fp32"),
        ((op(1, "aten::mm", ["float", "float"]), kernel(1, "cutlass_tensorop_s1688gemm_tf32_128", 1)), "tf32"),
        ((op(1, "aten::mm", ["float", "float"]), kernel(1, "ampere_sgemm_128x64", 1)), "fp32"),
        ((op(1, "aten::add", ["c10::Half", "float", "Scalar"]), kernel(1, "elementwise_kernel", 1)), "fp32"),
        ((kernel(9, "triton_poi_fused_gelu_bf16_3", 1),), "bf16"),
        ((kernel(9, "void at::native::elementwise<float>(int)", 1),), "fp32"),
        ((kernel(9, "memset", 1),), "other"),
    ],
)
def test_formats_come_from_types_or_names(events, form):
    """Casts are copies between formats; TF32 appears only in the kernel's name."""
    assert [entry.format for entry in read(*events)] == [form]


def test_a_kernel_without_an_operator_has_a_short_name():
    """Template arguments are removed."""
    assert (
        read(kernel(9, "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)", 1))[0].op
        == "at::native::reduce_kernel"
    )


@pytest.mark.gpu
def test_a_step_on_a_gpu_has_a_bf16_product():
    """The trace of a real step is read."""
    a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    entries = trace_step(lambda: a @ a)
    assert any(e.format == "bf16" and e.op == "mm" and e.seconds > 0 for e in entries)
