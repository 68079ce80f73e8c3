"""Which operators compute in which number type: autocast's lists, as data.

What stands in neither list computes in the widest type of what it reads, as torch promotes.
"""

from __future__ import annotations

from enum import Enum

from torch._ops import OpOverload
from torch.fx import Node


def names(text: str) -> frozenset[str]:
    """Return the words of ``text``."""
    return frozenset(text.split())


class Policy(Enum):
    """In which type an operator computes."""

    COMPUTE = "compute"  # the plan's compute type: matrix products and attention
    WIDE = "wide"  # float32, and so is the result: losses and sums
    WIDE_INSIDE = "wide inside"  # float32 within, the result in the type of its input: norms
    ALIKE = "alike"  # one type for all that has the shape of the first: our fused norms
    WIDEST = "widest"  # the widest of what it reads


_COMPUTE = names(
    "linear matmul mm bmm mv dot addmm addmv addr addbmm baddbmm chain_matmul einsum bilinear "
    "conv1d conv2d conv3d conv_transpose1d convolution scaled_dot_product_attention prelu"
)
_WIDE = names(
    "mean sum var std var_mean std_mean nansum prod cumsum cumprod logsumexp norm "
    "linalg_vector_norm exp expm1 log log1p log2 log10 rsqrt reciprocal erfinv sinh cosh tan "
    "softplus dist cdist renorm cosine_similarity kl_div view_as_complex complex polar"
)
_WIDE_INSIDE = names(
    "layer_norm native_layer_norm rms_norm group_norm instance_norm batch_norm softmax "
    "log_softmax _softmax _log_softmax"
)
_SUMS = frozenset({"mean", "sum", "var", "std"})


def policy_of(node: Node) -> Policy:
    """Return how the operator of ``node`` computes."""
    name = operator_name(node)
    if "cross_entropy" in name or "loss" in name or name in _WIDE:
        return Policy.WIDE
    if name.startswith("fft_"):
        return Policy.WIDE  # no half precision of complex numbers
    if name == "pow" and any(operator_name(user) in _SUMS for user in node.users):
        return Policy.WIDE  # the square inside a variance
    if name in _WIDE_INSIDE:
        return Policy.WIDE_INSIDE
    if name in _COMPUTE:
        return Policy.COMPUTE
    return Policy.ALIKE if "norm" in name else Policy.WIDEST


def operator_name(node: Node) -> str:
    """Return the bare name of what a node calls: "linear" of ``aten::linear``."""
    if not isinstance(node.target, OpOverload):
        return ""
    return node.target._schema.name.split("::")[-1]
