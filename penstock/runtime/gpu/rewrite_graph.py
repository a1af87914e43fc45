"""Rewrites of a recorded run that Inductor does not make: fewer passes over memory between matrix products.

Three patterns, each found in networks as they come (`nn.TransformerEncoder`, Vision Transformers, BERT):

- GELU or ReLU after a linear layer becomes part of the product's kernel (cuBLASLt's epilogues). That GELU is the
  approximation by tanh (Hendrycks and Gimpel 2016, "Gaussian error linear units", section 2), which differs from the
  exact one by at most 5e-4; so it is only done where products are in bf16 or fp16, whose own rounding is larger.
- A batch of products with one weight, which `nn.MultiheadAttention` gives for inputs that are transposed, becomes one
  product with its bias.
- Queries, keys and values that were copied only to lie contiguously are read where they are: attention takes strides.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

# Counted up where what is compiled changes: files of compiled batches are kept.
REVISION = 1

aten: Any = torch.ops.aten
_ADDMM, _BMM, _CLONE = aten.addmm.default, aten.bmm.default, aten.clone.default
# What these give is contiguous.
_PRODUCTS = (_ADDMM, aten.mm.default)
# By target: whether it is GELU.
_ACTIVATIONS = {aten.gelu.default: True, aten.relu.default: False, aten.relu_.default: False}
_SAME_ORDER = (aten.view.default, aten._unsafe_view.default)
_VIEWS = (
    *_SAME_ORDER,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
)
_ATTENTION = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
_REDUCED = (torch.bfloat16, torch.float16)
# Kernels of attention load 16 bytes at once.
_ALIGNMENT_BYTES = 16


def rewrite_graph(graph: GraphModule) -> int:
    """Rewrite a recorded run in place.

    Args:
        graph: As `recorded` gives it.

    Returns:
        The number of rewrites.
    """
    count = _fuse_activations(graph) + _merge_products(graph) + _read_in_place(graph)
    if count:
        graph.graph.eliminate_dead_code()
        graph.recompile()
    return count


def _fuse_activations(graph: GraphModule) -> int:
    count = 0
    for node in _called(graph, *_ACTIVATIONS):
        product = _behind(node.args[0], _SAME_ORDER)
        if product.target != _ADDMM or product.kwargs or _value(product).dtype not in _REDUCED:
            continue
        if not _used_once(node.args[0], product) or _value(product.args[0]).dim() != 1:
            continue
        with graph.graph.inserting_before(product):
            options: dict[str, Any] = {"use_gelu": _ACTIVATIONS[node.target]}
            fused = graph.graph.call_function(aten._addmm_activation.default, product.args, options)
        _replace(product, fused)
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
        graph.graph.erase_node(product)
        count += 1
    return count


def _merge_products(graph: GraphModule) -> int:
    count = 0
    for node in _called(graph, aten.add.Tensor):
        if node.kwargs or not all(isinstance(each, Node) for each in node.args):
            continue
        products, bias = _behind(node.args[0], _SAME_ORDER), node.args[1]
        if products.target != _BMM or not _used_once(node.args[0], products) or _value(bias).dim() != 1:
            continue
        weight = _behind(products.args[1], (*_SAME_ORDER, aten.expand.default))
        left, right, sum_BMN = _value(products.args[0]), _value(products.args[1]), _value(node)
        if right.stride(0) != 0 or _value(weight).shape != right.shape[1:]:
            continue
        if sum_BMN.shape != _value(products).shape or len({left.dtype, sum_BMN.dtype, _value(bias).dtype}) != 1:
            continue
        rows, length = left.shape[0] * left.shape[1], left.shape[2]
        with graph.graph.inserting_before(node):
            flat = graph.graph.call_function(aten.reshape.default, (products.args[0], [rows, length]))
            product = graph.graph.call_function(_ADDMM, (bias, flat, weight))
            whole = graph.graph.call_function(aten.view.default, (product, list(sum_BMN.shape)))
        flat.meta["val"] = left.new_empty(rows, length)
        product.meta["val"] = sum_BMN.new_empty(rows, sum_BMN.shape[-1])
        _replace(node, whole)
        graph.graph.erase_node(node)
        count += 1
    return count


def _read_in_place(graph: GraphModule) -> int:
    count = 0
    for node in _called(graph, *_ATTENTION):
        for index, given in enumerate(node.args[:3]):
            copy = _behind(given, _VIEWS)
            if copy.target != _CLONE or not _value(copy).is_contiguous():
                continue
            original = copy.args[0]
            owner = _behind(original, _VIEWS)
            strides = _strides_in(_value(original), _value(copy), _value(given))
            if strides is None or owner.target not in _PRODUCTS:
                continue
            with graph.graph.inserting_before(node):
                view = graph.graph.call_function(
                    aten.as_strided.default, (owner, list(_value(given).shape), strides.steps, strides.offset)
                )
            view.meta["val"] = _value(owner).as_strided(_value(given).shape, strides.steps, strides.offset)
            node.update_arg(index, view)
            count += 1
    return count


class _Strides(NamedTuple):
    steps: list[int]
    offset: int


def _strides_in(original: Tensor, copy: Tensor, view: Tensor) -> _Strides | None:
    """Return the strides with which a view of a contiguous copy lies in the original; None where it has none.

    A dimension of the view has a stride in the original if it walks along one dimension of the copy, and if the
    dimensions of the view that share one never leave it.
    """
    pitches, owned = _numbers(copy.stride()), _numbers(original.stride())
    # By dimension of the copy: the farthest element that the view reaches in it.
    reached = [0] * copy.dim()
    offset, left = int(original.storage_offset()), int(view.storage_offset() - copy.storage_offset())
    for dim in range(copy.dim()):
        reached[dim], left = divmod(left, pitches[dim])
        offset += reached[dim] * owned[dim]
    steps: list[int] = []
    for size, stride in zip(_numbers(view.shape), _numbers(view.stride()), strict=True):
        if size == 1:
            steps.append(0)
            continue
        walked = [dim for dim in range(copy.dim()) if copy.shape[dim] > 1 and stride and stride % pitches[dim] == 0]
        # Pitches fall: the first is the longest that divides the stride.
        if not walked:
            return None
        dim = walked[0]
        each = stride // pitches[dim]
        reached[dim] += each * (size - 1)
        steps.append(each * owned[dim])
    if any(most >= size for most, size in zip(reached, copy.shape, strict=True)):
        return None
    aligned = _ALIGNMENT_BYTES // original.element_size()
    if steps[-1] != 1 or offset % aligned or any(step % aligned for step in steps[:-1]):
        return None
    return _Strides(steps, offset)


def _numbers(sizes: Sequence[Any]) -> list[int]:
    return [int(each) for each in sizes]


def _called(graph: GraphModule, *targets: Any) -> list[Any]:
    return [node for node in graph.graph.nodes if node.op == "call_function" and node.target in targets]


def _behind(node: Any, views: tuple[Any, ...]) -> Any:
    """Follow views back to what they show."""
    *_, last = _chain(node, views)
    return last


def _chain(node: Any, views: tuple[Any, ...]) -> Iterator[Any]:
    yield node
    while node.op == "call_function" and node.target in views:
        node = node.args[0]
        yield node


def _used_once(node: Any, last: Any) -> bool:
    """Tell whether all from one node back to another have a single use."""
    for each in _chain(node, _SAME_ORDER):
        if len(each.users) != 1:
            return False
        if each is last:
            return True
    return False


def _value(node: Any) -> Tensor:
    return node.meta["val"]


def _replace(node: Node, by: Node) -> None:
    by.meta.update(node.meta)
    node.replace_all_uses_with(by)
