"""Operators of the dispatcher."""

import torch

from halfstep.watching.operators import is_product, operand_format


def test_products_are_known_by_name():
    """Attention and convolutions are products, foreach operators are not."""
    assert all(map(is_product, ("mm", "aten::addmm", "convolution_backward", "_scaled_dot_product_flash_attention")))
    assert not any(map(is_product, ("add", "_foreach_addmm_like", "gelu")))


def test_the_largest_input_decides_the_format_of_a_product():
    """The fp32 statistics of an attention do not make it fp32; of other operators the widest input decides."""
    large, small = torch.zeros(8, 8, dtype=torch.bfloat16), torch.zeros(2)
    assert operand_format("mm", [large, small], None) == "bf16"
    assert operand_format("add", [large, small], None) == "fp32"
    assert operand_format("add", [torch.zeros(2, dtype=torch.int64)], None) == "other"
