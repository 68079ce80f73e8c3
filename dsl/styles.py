"""Read the style of a rule: its name, ours or Hugging Face's, and its options."""

from autoshard.diagnostics import Diagnostic
from autoshard.dsl.foreign import HF_REFUSED, HF_STYLES
from autoshard.dsl.nodes import written, wrong
from autoshard.dsl.specs import BlockSpec, StyleSpec
from autoshard.dsl.suggest import did_you_mean
from autoshard.dsl.tree import Argument, CallValue, Word
from autoshard.dsl.values import Flag
from autoshard.dsl.variables import Variables
from autoshard.plan import Style


def read_style(
    block: BlockSpec, node: CallValue, variables: Variables
) -> tuple[Style, list[Diagnostic]]:
    """Return the style with the options that are right, and what is wrong.

    A style that doesn't exist keeps its name, so that the rule's path is still checked.
    """
    known = HF_STYLES if block.name == "tensor" else {}
    name, options = known.get(node.name, (node.name, {}))
    spec = block.style(name)
    if spec is None:
        return Style(node.name), [_unknown_style(block, node)]
    options, found = dict(options), []
    for arg in node.args:
        option, value = _option(spec, arg, variables)
        if isinstance(value, Diagnostic):
            found.append(value)
        elif option in options:
            found.append(wrong(arg.value, "AS206", f"`{option}` is given twice"))
        elif value is not False:
            options[option] = value
    return Style(name, options), found


def _option(spec: StyleSpec, arg: Argument, variables: Variables) -> tuple[str, object]:
    """Return one option's name and value, or the name and what is wrong with it."""
    word = arg.name or arg.value
    if not isinstance(word, Word):
        return "", _unnamed(spec, arg)
    option = spec.option(word.text)
    if option is None:
        return "", _unknown_option(spec, word)
    if arg.name is not None:
        value = variables.substitute(arg.value)
        if isinstance(value, Diagnostic):
            return option.name, value
        return option.name, option.kind.read(option.name, value)
    if isinstance(option.kind, Flag):
        return option.name, True
    help = (f"`{option.name}` takes {option.kind.describe()}",)
    return option.name, wrong(word, "AS206", f"`{option.name}` needs a value", "", help)


def _unknown_style(block: BlockSpec, node: CallValue) -> Diagnostic:
    if block.name == "tensor" and node.name in HF_REFUSED:
        message = f"Hugging Face's style `{node.name}` has no counterpart here yet"
        return wrong(node, "AS212", message, "", (HF_REFUSED[node.name],))
    names = [style.name for style in block.styles]
    synonyms = {word: style.name for style in block.styles for word in style.synonyms}
    candidates = [*names, *HF_STYLES] if block.name == "tensor" else names
    note = f"styles: {', '.join(names)}"
    note += "; Hugging Face names are read too" if block.name == "tensor" else ""
    help = did_you_mean(node.name, candidates, synonyms)
    return wrong(node, "AS202", f"unknown style `{node.name}`", "", help, (note,))


def _unknown_option(spec: StyleSpec, word: Word) -> Diagnostic:
    names = [option.name for option in spec.options]
    help = did_you_mean(word.text, names) or (_options_of(spec),)
    return wrong(word, "AS204", f"`{spec.name}` has no option `{word.text}`", "", help)


def _unnamed(spec: StyleSpec, arg: Argument) -> Diagnostic:
    named = [option.name for option in spec.options if not isinstance(option.kind, Flag)]
    text = written(arg.value)
    help = (f"write `{named[0]}={text}`",) if len(named) == 1 else (_options_of(spec),)
    return wrong(arg.value, "AS206", f"`{spec.name}` needs a name for `{text}`", "", help)


def _options_of(spec: StyleSpec) -> str:
    forms = [o.name if isinstance(o.kind, Flag) else f"{o.name}=..." for o in spec.options]
    return (
        f"`{spec.name}` takes: {', '.join(forms)}" if forms else f"`{spec.name}` takes no options"
    )
