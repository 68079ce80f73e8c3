"""A digest of Python objects: a model's state and the code that its forward runs.

Two models of equal digests hardly ever trace to unlike programs. It follows what a trace reaches:
attributes, closures, defaults, and of each function the compiled code, the globals that it names,
and the methods that have a name which some function reads. Code of torch, of Python and of
autoshard itself goes by its name: their versions are in the key. What is followed depends on no
address and no order of hashing, so that another process finds the same digest.

An object that can't be looked into raises Opaque: the program is then not cached, never guessed.
Not seen: environment variables, files, names made at run time, what C holds. The captured graph,
which is in the key beside this, shows what came of them.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import hashlib
import logging
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from weakref import ReferenceType

import torch
from torch import nn

KNOWN = frozenset({"torch", "numpy", "sympy", "functorch", "autoshard", *sys.stdlib_module_names})
MOST_OBJECTS = 2_000_000  # a model that holds its data set would cost more than compiling does
_HEAP = 1 << 9  # of a class' flags: made by a class statement, not in C
_IMPORT = dis.opmap["IMPORT_NAME"]
_PLAIN = (str, int, float, complex, bool, bytes, type(None), type(...), range)
_AS_TEXT: tuple[type, ...] = (torch.dtype, torch.layout, torch.memory_format, re.Pattern)
_AS_TEXT += (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_AS_TEXT += (types.UnionType, types.GenericAlias)
# What can't decide what a model computes, or is the same thing in another form.
_IDLE: tuple[type, ...] = (logging.Logger, logging.Handler, torch.Generator, ReferenceType)
_IDLE += (type(threading.Lock()), type(threading.RLock()), threading.local)
_TABLES = ("_parameters", "_buffers", "_modules", "_flat_weights")  # of a module: told apart
# Hugging Face's configurations hold a hash of themselves, which differs from process to process.
_RESTLESS = frozenset({"_original_object_hash"})
_UNSEEN = frozenset({"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__"})
_MAKERS = frozenset({"__init__", "__repr__", "__str__", "__del__", "__reduce__", "__setstate__"})


class Opaque(Exception):
    """Say what a digest can't look into."""


class Digest:
    """Feeds objects into a hash; each is followed once."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._met: dict[int, int] = {}  # id of an object -> when it was met
        self._alive: list[object] = []  # an id stays an object's own as long as that lives
        self._classes: list[type] = []
        self._names: set[str] = {"forward"}  # that some function reads
        self._looked_up: set[tuple[type, str]] = set()
        self._files: set[str] = set()  # modules of which something was followed

    def add(self, value: object) -> Digest:
        """Take an object in."""
        try:
            self._add(value)
        except RecursionError as error:
            raise Opaque("objects that are nested too deeply") from error
        return self

    def text(self) -> str:
        """Follow what was left for later; return the digest as hexadecimal digits."""
        self._methods()
        for name in sorted(self._files):
            self._file(name)
        return self._hash.hexdigest()

    def _put(self, *words: object) -> None:
        for word in words:
            raw = word if isinstance(word, bytes) else str(word).encode("utf-8", "backslashreplace")
            self._hash.update(len(raw).to_bytes(8, "little"))
            self._hash.update(raw)

    def _add(self, value: object) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._put(kind.__name__, repr(value))
        elif isinstance(value, torch.device):
            self._put("device", value.type)
        elif isinstance(value, _AS_TEXT):
            self._put(kind.__name__, value)
        elif isinstance(value, _IDLE) or kind is object:
            self._put(kind.__name__)
        elif isinstance(value, types.ModuleType):
            self._put("module", value.__name__)
        elif isinstance(value, type):
            self._class(value)
        elif type(value) is tuple:  # whether equal ones are one object differs by process
            self._sequence(value)
        elif self._is_new(value):
            self._follow(value)

    def _is_new(self, value: object) -> bool:
        """Note an object; where it was met before, when is all there is to say."""
        if id(value) in self._met:
            self._put("again", self._met[id(value)])
            return False
        if len(self._met) > MOST_OBJECTS:
            raise Opaque(f"more than {MOST_OBJECTS} objects")
        self._met[id(value)] = len(self._met)
        self._alive.append(value)
        return True

    def _follow(self, value: object) -> None:
        for known, follow in _FOLLOW:
            if isinstance(value, known):
                follow(self, value)
                return
        self._instance(value)

    # values -------------------------------------------------------------------------------------
    def _sequence(self, value: Sequence) -> None:
        self._class(type(value))
        self._put(len(value))
        for item in value:
            self._add(item)
        self._attributes(value)

    def _mapping(self, value: Mapping) -> None:
        self._class(type(value))
        self._put(len(value))
        for key, item in value.items():
            self._add(key)
            self._add(item)
        self._add(getattr(value, "default_factory", None))
        self._attributes(value)

    def _set(self, value: Iterable) -> None:
        """Sets have no order of their own: take plain items in by their text, others by name."""
        self._put("set")
        for item in sorted(value, key=_order):
            self._add(item)

    def _tensor(self, value: torch.Tensor) -> None:
        self._put("tensor", value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
        self._put(value.device.type)
        if value.device.type != "meta" and type(value) in (torch.Tensor, nn.Parameter):
            flat = value.detach().cpu().contiguous().reshape(-1)
            self._put(flat.view(torch.uint8).numpy().tobytes())

    def _instance(self, value: object) -> None:
        """Take in an object by its class and its attributes; arrays by their bytes."""
        self._class(type(value))
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            self._put(getattr(value, "dtype", ""), getattr(value, "shape", ""), value.tobytes())
        elif not self._attributes(value):
            raise Opaque(f"a value of type '{type(value).__name__}'")

    def _attributes(self, value: object) -> bool:
        """Take in what an object holds by name; tell whether it is made so that it can."""
        held = dict(getattr(value, "__dict__", {}))
        bases = [base for base in type(value).__mro__ if "__slots__" in vars(base)]
        names = [name for base in bases for name in _slots(base) if hasattr(value, name)]
        held |= {name: getattr(value, name) for name in names}
        for name, item in held.items():
            if name not in _RESTLESS:
                self._put(name)
                self._add(item)
        is_python = bool(type(value).__flags__ & _HEAP) and hasattr(value, "__dict__")
        return bool(bases) or is_python  # else what it is may lie where no name leads

    def _module(self, value: nn.Module) -> None:
        """Take in a module: attributes, but of parameters and buffers only what they are like."""
        self._class(type(value))
        for name, item in vars(value).items():
            if name in _TABLES:
                continue
            self._put(name)
            self._add(item)
        for held in (value._parameters, value._buffers):
            for name, tensor in held.items():
                self._put(name)
                self._described(tensor)
        for name, child in value._modules.items():
            self._put(name)
            self._add(child)

    def _described(self, tensor: torch.Tensor | None) -> None:
        if tensor is None or self._is_new(tensor):
            said = () if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.stride())
            is_meta = tensor is not None and tensor.is_meta
            self._put(*said, is_meta, tensor is not None and tensor.requires_grad)

    # code ---------------------------------------------------------------------------------------
    def _class(self, cls: type) -> None:
        self._put("class", cls.__module__, cls.__qualname__)
        if not self._is_new(cls):
            return
        for base in cls.__mro__:
            is_own = not _is_known(base.__module__)
            if is_own and base not in self._classes:
                self._put(base.__module__, base.__qualname__)
                self._classes.append(base)
                self._files.add(base.__module__)
            forward = vars(base).get("forward")
            if not is_own and isinstance(forward, types.FunctionType):
                self._add(forward)  # someone may have put another one there

    def _methods(self) -> None:
        """Follow what classes have under the names that are read, until nothing new turns up."""
        before = -1
        while before != len(self._looked_up):
            before = len(self._looked_up)
            for cls in tuple(self._classes):
                held = vars(cls)
                for name in sorted(n for n in held if self._is_read(cls, n)):
                    if (cls, name) not in self._looked_up:
                        self._looked_up.add((cls, name))
                        self._put(name)
                        self._lenient(held[name])

    def _is_read(self, cls: type, name: str) -> bool:
        if name in _UNSEEN or (name in _MAKERS and issubclass(cls, nn.Module)):
            return False
        is_special = name.startswith("__") and isinstance(vars(cls)[name], types.FunctionType)
        return name in self._names or is_special

    def _function(self, value: types.FunctionType) -> None:
        module = value.__globals__.get("__name__", "")
        self._put("function", module, value.__qualname__)
        for cell in value.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            self._add(held)
        self._add(value.__defaults__)
        self._add(value.__kwdefaults__)
        self._add(vars(value).get("__wrapped__"))
        if not _is_known(module):
            self._files.add(module)
            self._code(value.__code__, value.__globals__)

    def _code(self, code: types.CodeType, names: Mapping[str, object]) -> None:
        self._put(code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_flags)
        self._put(Path(code.co_filename).name, code.co_firstlineno, code.co_linetable)
        for item in code.co_consts:
            if isinstance(item, types.CodeType):
                self._code(item, names)
            else:
                self._add(item)
        self._names.update(code.co_names)
        for name in code.co_names:
            if name in names:
                self._global(names[name], code.co_names)
        if _IMPORT in code.co_code[::2]:
            self._imports(code, names)

    def _global(self, value: object, names: tuple[str, ...]) -> None:
        """Take in what a function reads by name: of a module the names that are read there."""
        if not isinstance(value, types.ModuleType):
            self._lenient(value)
            return
        known = _is_known(value.__name__)
        self._put("module", value.__name__)
        held = vars(value)
        for name in names:
            found = held.get(name)
            is_own = isinstance(found, types.FunctionType) if known else name in held
            if is_own and not isinstance(found, types.ModuleType):
                self._lenient(found)

    def _lenient(self, value: object) -> None:
        """Take in a global by its class where it can't be looked into, as an open file."""
        try:
            self._add(value)
        except Opaque:
            self._put("opaque", type(value).__module__, type(value).__qualname__)

    def _imports(self, code: types.CodeType, names: Mapping[str, object]) -> None:
        """Take in what a function imports while it runs."""
        package = str(names.get("__package__") or "")
        for found in dis.get_instructions(code):
            if found.opname != "IMPORT_NAME":
                continue
            for name in (str(found.argval), f"{package}.{found.argval}"):
                if _is_known(name) or not name.strip("."):
                    continue
                self._files.add(name)
                if name in sys.modules:
                    self._global(sys.modules[name], code.co_names)

    def _file(self, name: str) -> None:
        """Take in the text of a module: what was not followed may matter all the same."""
        path = _file_of(name)
        if path is not None and path.suffix == ".py" and path.is_file():
            self._put(name, path.read_bytes())


def _wrapped(name: str) -> Callable[[Digest, object], None]:
    def follow(digest: Digest, value: object) -> None:
        digest._put(type(value).__name__)
        digest._add(getattr(value, name))

    return follow


def _property(digest: Digest, value: property) -> None:
    digest._add((value.fget, value.fset))


def _bound(digest: Digest, value: types.MethodType) -> None:
    digest._add((value.__func__, value.__self__))


def _partial(digest: Digest, value: functools.partial) -> None:
    digest._add((value.func, value.args, value.keywords))


def _named(digest: Digest, value: object) -> None:
    name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
    digest._put("named", getattr(value, "__module__", ""), name)


def _enum(digest: Digest, value: enum.Enum) -> None:
    digest._put("enum", type(value).__module__, type(value).__qualname__, value.name)


# What an object is, most particular first, and how it is taken in.
_FOLLOW: tuple[tuple[type | tuple[type, ...], Callable], ...] = (
    (nn.Module, Digest._module),
    (torch.Tensor, Digest._tensor),
    (enum.Enum, _enum),
    ((dict, types.MappingProxyType), Digest._mapping),
    ((list, tuple, collections.deque), Digest._sequence),
    ((set, frozenset), Digest._set),
    (types.FunctionType, Digest._function),
    (types.MethodType, _bound),
    ((staticmethod, classmethod), _wrapped("__func__")),
    (property, _property),
    (functools.cached_property, _wrapped("func")),
    (functools.partial, _partial),
    (
        (
            types.BuiltinFunctionType,
            types.MethodDescriptorType,
            types.WrapperDescriptorType,
            types.MethodWrapperType,
            types.GetSetDescriptorType,
            types.MemberDescriptorType,
        ),
        _named,
    ),
)


def _is_known(module: str) -> bool:
    """Tell whether a module is of a package whose version stands for its code."""
    return module.split(".", 1)[0] in KNOWN


def _order(item: object) -> str:
    """Return what to sort the items of a set by."""
    if isinstance(item, _PLAIN) or (isinstance(item, tuple) and all(map(_order, item))):
        return f"{type(item).__name__} {item!r}"
    name = getattr(item, "__qualname__", None) or getattr(item, "name", None)
    if not isinstance(name, str):
        raise Opaque(f"a set of '{type(item).__name__}'")
    return f"{getattr(item, '__module__', type(item).__name__)} {name}"


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


def _file_of(name: str) -> Path | None:
    """Return where a module's text lies; packages are not imported to find out."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        place = getattr(loaded, "__file__", None)
    elif "." not in name or name.rpartition(".")[0] in sys.modules:
        try:
            found = find_spec(name)
        except (ImportError, ValueError):  # no such module: then none of its code can run
            return None
        place = None if found is None else found.origin
    else:
        return None
    return None if place is None else Path(place)
