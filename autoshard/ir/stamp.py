"""Work on one of several equal graphs and stamp out the others.

The stages of a deep model are one graph many times over: only the names of parameters, boundary
values and modules differ, and the sites of dropout. ``outline`` reads a graph as a pattern and the
names in it; graphs of equal patterns have equal results but for these names, which ``stamp`` writes
into a copy.

    outline(stage 1) == pattern, (h.6.ln.weight, ...)     made from it: joint of stage 1
    outline(stage 2) == pattern, (h.12.ln.weight, ...)    stamp:        joint of stage 2
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from autoshard.ir.graph_function import GraphFunction, Port, copy_node
from autoshard.ir.node_info import NodeInfo, info, set_info
from autoshard.ir.rewrite import legal_name

SITE = "site"  # the argument that numbers a dropout


@dataclass(frozen=True)
class Outline:
    """A graph as ``pattern``, with the names that the pattern leaves out, in order of first use."""

    pattern: Hashable
    names: tuple[str, ...]  # of ports
    paths: tuple[str, ...]  # of modules
    sites: tuple[int, ...]  # of dropouts


class _Numbers:
    """Numbers values in order of first use."""

    def __init__(self) -> None:
        self.seen: dict = {}

    def __call__(self, value: Hashable) -> int:
        return self.seen.setdefault(value, len(self.seen))


def outline(function: GraphFunction, extra: Hashable = None, ports: Iterable[Port] = ()) -> Outline:
    """Return the outline of a graph; ``extra`` and the kinds of ``ports`` join the pattern."""
    names, paths, sites, order = _Numbers(), _Numbers(), _Numbers(), _Numbers()
    given = iter(function.inputs)
    nodes = []
    for node in function.graph.nodes:
        order(node)
        record = info(node)
        port = next(given) if node.op == "placeholder" else None
        nodes.append(
            (
                node.op if port is None else (port.kind, names(port.name)),
                node.target if node.op == "call_function" else None,
                _values(node, order, sites),
                _meta(node.meta.get("val")),
                paths(record.path),
                _but_path(record),
            )
        )
    ends = tuple((port.kind, names(port.name)) for port in (*function.outputs, *ports))
    pattern = (tuple(nodes), ends, extra)
    return Outline(pattern, tuple(names.seen), tuple(paths.seen), tuple(sites.seen))


def stamp(made: GraphFunction, old: Outline, new: Outline) -> GraphFunction:
    """Return a copy of ``made``, which came from ``old``'s graph, as it would come from ``new``'s.

    Ports whose names neither outline has keep them.
    """
    names = dict(zip(old.names, new.names, strict=True))
    paths = dict(zip(old.paths, new.paths, strict=True))
    sites = dict(zip(old.sites, new.sites, strict=True))
    inputs, outputs = (
        tuple(Port(p.kind, names.get(p.name, p.name)) for p in ports)
        for ports in (made.inputs, made.outputs)
    )
    graph, copies, given = Graph(), {}, iter(inputs)
    for node in made.graph.nodes:
        if node.op == "placeholder":
            copy = graph.placeholder(legal_name(next(given)))
            copy.meta = dict(node.meta)
        elif node.op == "output":
            graph.output(map_arg(node.args[0], copies.__getitem__))
            break
        else:
            copy = copy_node(graph, node, copies.__getitem__)
            _move_site(copy, sites)
        record = info(node)
        set_info(copy, replace(record, path=paths.get(record.path, record.path)))
        copies[node] = copy
    return GraphFunction(graph, inputs, outputs)


def _values(node: Node, order: _Numbers, sites: _Numbers) -> Hashable:
    """Return a node's arguments with nodes and sites replaced by their numbers."""
    args = list(node.args)
    place = _site_place(node)
    if place is not None:
        args[place] = ("site", sites(args[place]))

    def value(item: object) -> Hashable:
        if isinstance(item, Node):
            return ("node", order(item))
        # 1, 1.0 and True are equal as keys, but not as arguments.
        return (type(item).__name__, str(item) if isinstance(item, torch.device) else item)

    return repr(map_aggregate((tuple(args), dict(node.kwargs)), value))


def _move_site(node: Node, sites: dict[int, int]) -> None:
    place = _site_place(node)
    if place is not None:
        site = node.args[place]
        node.args = (*node.args[:place], sites.get(site, site), *node.args[place + 1 :])


def _site_place(node: Node) -> int | None:
    """Return which argument of a call is the site of a dropout."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name.split("::")[0] != "autoshard":
        return None
    names = [argument.name for argument in schema.arguments]
    return names.index(SITE) if SITE in names else None


def _but_path(record: NodeInfo) -> Hashable:
    """Return all that a record says of a node but where in the model it stands."""
    said = {**vars(record), "path": "", "placements": tuple(record.placements.items())}
    return tuple(said.values())


def _meta(value: object) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, str(value.device))
    if isinstance(value, list | tuple):
        return tuple(_meta(item) for item in value)
    return value
