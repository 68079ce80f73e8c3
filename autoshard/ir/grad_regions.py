"""Make ``torch.no_grad()`` inside a forward explicit before export's own inlining forgets it.

    with torch.no_grad(): m = f(x)      -->  m = detach(f(x))

Export keeps such a region as one node; making the program functional inlines it as if gradients
flowed through it, which silently changes them. So regions are inlined here, with a ``detach``
wherever a value leaves a region without gradients for one with them. Autocast regions stay nodes
(torch bakes their casts when it inlines them), unless they switch autocast off where it is off.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autoshard.compat import AUTOCAST_REGION, SET_GRAD_REGION
from autoshard.ir.node_info import may_have_gradient

aten = torch.ops.aten
_DETACH = aten.detach.default
# They return their input itself where it is as they want it, in a region as outside.
_SAME = (
    *(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other),
    *(aten.type_as.default, aten.contiguous.default),
)


def inline_grad_regions(module: GraphModule, in_autocast: bool = False) -> bool:
    """Inline all regions of ``module`` in place; return whether there were any.

    ``in_autocast`` says that ``module`` is itself the body of a region with autocast on.
    """
    if not _has_regions(module):
        return False
    work = _Inliner(module, in_autocast)
    work.copy(module, {}, enabled=True)
    module.graph = work.graph
    module.recompile()
    return True


def _has_regions(module: GraphModule) -> bool:
    return any(node.target in (SET_GRAD_REGION, AUTOCAST_REGION) for node in module.graph.nodes)


class _Inliner:
    def __init__(self, root: GraphModule, in_autocast: bool) -> None:
        self.root = root
        self.in_autocast = in_autocast
        self.graph = Graph()
        self.graph._codegen = root.graph._codegen
        self.without_grad: set[Node] = set()
        self.detached: dict[Node, Node] = {}

    def copy(
        self, module: GraphModule, values: dict[Node, Node | tuple], enabled: bool
    ) -> tuple | Node:
        """Copy the nodes of ``module``; ``values`` holds its placeholders' values if inlined."""
        for node in module.graph.nodes:
            if node.op == "placeholder" and node in values:
                continue
            if node.op == "output":
                return self.finish(node, values, module is self.root)
            if node.target in (SET_GRAD_REGION, AUTOCAST_REGION):
                values[node] = self.region(module, node, values, enabled)
            elif node.target is operator.getitem and isinstance(values[node.args[0]], tuple):
                values[node] = values[node.args[0]][node.args[1]]
            elif not _is_region_body(node):
                values[node] = self.copy_node(module, node, values, enabled)
        raise AssertionError("a graph without an output")

    def finish(self, output: Node, values: dict, is_root: bool) -> tuple:
        """Return the values of a body; write the output node of the root."""
        results = map_arg(output.args[0], lambda n: self.read(values[n], True) if is_root else n)
        if not is_root:
            return tuple(None if n is None else values[n] for n in results)
        made = self.graph.output(results)
        made.meta = dict(output.meta)
        return results

    def region(self, module: GraphModule, node: Node, values: dict, enabled: bool) -> tuple | Node:
        """Inline a region, or copy it as a node where only torch can inline it."""
        is_grad = node.target is SET_GRAD_REGION
        place = 1 if is_grad else 4
        body = getattr(module, node.args[place].target)
        if not is_grad and (node.args[2] or self.in_autocast):
            inline_grad_regions(body, in_autocast=bool(node.args[2]))
            return self.copy_node(module, node, values, enabled)
        names = body.graph.find_nodes(op="placeholder")
        given = (values[argument] for argument in node.args[place + 1 :])
        inside = dict(zip(names, given, strict=True))
        return self.copy(body, inside, bool(node.args[0]) if is_grad else enabled)

    def copy_node(self, module: GraphModule, node: Node, values: dict, enabled: bool) -> Node:
        """Copy one node; what it reads from a region without gradients it reads detached."""
        if node.op == "get_attr":
            return self.copy_attribute(module, node)
        if not enabled and _is_its_input(node):
            return self.value(module, node.args[0], values)
        made = self.graph.node_copy(
            node, lambda n: self.read(self.value(module, n, values), enabled)
        )
        if not enabled:
            self.without_grad.add(made)
        return made

    def value(self, module: GraphModule, node: Node, values: dict) -> Node:
        """Return the copy of an argument; bodies of regions are copied on demand."""
        if node not in values:
            values[node] = self.copy_attribute(module, node)
        return values[node]

    def copy_attribute(self, module: GraphModule, node: Node) -> Node:
        name = node.target
        if module is not self.root:
            name = f"inlined_{len(self.root._modules)}_{name.replace('.', '_')}"
            setattr(self.root, name, operator.attrgetter(node.target)(module))
        made = self.graph.get_attr(name)
        made.meta = dict(node.meta)
        return made

    def read(self, value: Node, enabled: bool) -> Node:
        """Return ``value``, detached where it comes from a region without gradients."""
        is_open = not enabled or value not in self.without_grad
        if is_open or not may_have_gradient(value.meta.get("val")):
            return value
        if value not in self.detached:
            made = self.graph.call_function(_DETACH, (value,))
            made.meta = dict(value.meta)
            self.detached[value] = made
        return self.detached[value]


def _is_its_input(node: Node) -> bool:
    """Tell whether a call returns its input: what reads it behind the region gets its gradient."""
    if node.target not in _SAME or True in node.args[2:] or node.kwargs.get("copy"):
        return False
    made, given = node.meta["val"], node.args[0].meta["val"]
    return (made.dtype, made.device, made.stride()) == (given.dtype, given.device, given.stride())


def _is_region_body(node: Node) -> bool:
    """Tell whether a get_attr only names the bodies of regions: they are inlined."""
    regions = (SET_GRAD_REGION, AUTOCAST_REGION)
    return node.op == "get_attr" and all(user.target in regions for user in node.users)
