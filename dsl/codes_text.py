"""The pages of errors in the text of a plan: AS0xx reading, AS1xx settings, AS2xx rules."""

from collections.abc import Mapping

from autoshard.dsl.specs import Page

TEXT_PAGES: Mapping[str, Page] = {
    "AS001": Page(
        "a character that is not part of the language",
        "Outside comments and quotes a plan holds names, paths, numbers, `=`, `:`, `,`, `;`, "
        "brackets, braces and `$variables`. A path with other characters goes into double quotes.",
        "h.*.mlp -> colwise",
        "h.*.mlp: colwise",
    ),
    "AS002": Page(
        "something is missing, or stands in the wrong place",
        "The message lists what may stand there. Settings are `name = value`, rules `path: style`; "
        "both stand inside a block. Plans do no arithmetic: write the number, or `auto` where the "
        "setting takes it.",
        "mesh { dp = 4 * 2 }",
        "mesh { dp = 8 }",
    ),
    "AS003": Page(
        "no language version",
        "The first line of a plan names the version of the language, so that a later version can "
        "still read it. Comments may stand above it.",
        "mesh { tp = 2 }",
        "autoshard 1",
    ),
    "AS004": Page(
        "a block, a list or an argument list is never closed",
        "Other messages are held back, because what follows was read in the wrong place.",
        "tensor {",
        "tensor { }",
    ),
    "AS005": Page(
        "another version of the language",
        "This autoshard reads version 1.",
        "autoshard 2",
        "autoshard 1",
    ),
    "AS006": Page(
        "an included file can't be read, or includes itself",
        "The path of `include` is relative to the file that it stands in. What the including file "
        "says wins over what it includes, wherever the line stands; a rule with the same path "
        "replaces the included one; `drop PATH` removes one.",
        "",
        'include "base.plan"',
    ),
    "AS007": Page(
        "the plan file can't be read",
        "The file is missing, or isn't UTF-8 text. `-` reads standard input.",
    ),
    "AS008": Page(
        "`--set` names no setting",
        "`--set` puts one setting on top of a plan. It may be given several times.",
        "--set tp=4",
        "--set mesh.tp=4",
    ),
    "AS100": Page(
        "unknown block",
        "The optimizer, clipping, data and the training loop stay in Python: the learning rate "
        "changes weekly, the layout rarely, and two places for one number drift apart.",
        "activation_checkpoint { h.*: full }",
        "recompute { h.*: full }",
    ),
    "AS101": Page(
        "unknown setting",
        "The note lists what the block knows. Nothing in a plan is ever ignored, so a setting from "
        "another system is an error that names ours.",
        "zero { allgather_bucket_size = 5e8 }",
        "zero { gather_bucket = 500Melems }",
    ),
    "AS102": Page(
        "a block comes twice",
        "Put all of a block's lines in one place. An included file may hold the same block.",
    ),
    "AS103": Page(
        "a setting comes twice",
        "Remove one. To change a setting of an included file, simply set it again.",
    ),
    "AS104": Page(
        "a rule written with `=`",
        "Settings use `=`, rules use `:`.",
        "mlp.c_fc = colwise",
        "mlp.c_fc: colwise",
    ),
    "AS105": Page(
        "a setting written with `:`",
        "Settings use `=`, rules use `:`.",
        "zero { stage: 3 }",
        "zero { stage = 3 }",
    ),
    "AS106": Page(
        "something that this block can't hold",
        "Only `tensor` and `recompute` take rules and scopes, only `tensor` takes `use`. When a "
        "block seems to stand inside another, a `}` is missing before it.",
    ),
    "AS107": Page(
        "`block on NAME` is reserved",
        "Version 1 has no use for it.",
    ),
    "AS110": Page(
        "unknown variable",
        "A variable is known below the `let` that defines it, also below an include of its file.",
        "zero { units = $layers }",
        "let layers = h.*",
    ),
    "AS111": Page(
        "a variable is defined twice",
        "A variable has one value in a plan and everything it includes.",
    ),
    "AS112": Page(
        "a variable is never used",
        "A warning: often the `$` was forgotten where it should stand.",
        "split = even(layers)",
        "split = even($layers)",
    ),
    "AS120": Page(
        "a value of the wrong kind",
        "The message says what the setting takes.",
        "zero { prefetch = on }",
        "zero { prefetch = 1 }",
    ),
    "AS121": Page(
        "a number without its unit",
        "Sizes need a unit: bytes (`64MiB`, `500MB`) or elements (`500Melems`). Bare numbers are "
        "refused because systems differ: DeepSpeed's 5e8 counts elements, others count bytes.",
        "reduce_bucket = 5e8",
        "reduce_bucket = 500Melems",
    ),
    "AS122": Page(
        "a word that the setting doesn't know",
        "The message lists the words it takes.",
        "schedule = interleaved",
        "schedule = interleaved_1f1b",
    ),
    "AS123": Page(
        "a value out of range",
        "The label says what the setting takes.",
        "zero { stage = 4 }",
        "zero { stage = 3 }",
    ),
    "AS124": Page(
        "wrong arguments",
        "The message shows how the call is written.",
        "split = before()",
        "split = before(h.6, h.12)",
    ),
    "AS125": Page(
        "a Python value that a plan can't hold",
        "`autoshard.Plan(...)` takes mappings of names to numbers, words, lists and booleans; a "
        "value that is a string is taken as a plan writes it.",
        'Plan(mesh="tp=2")',
        'Plan(mesh={"tp": 2})',
    ),
    "AS201": Page(
        "a path matches nothing",
        "Each rule must match at least one module or parameter, so that a renamed layer can't "
        "silently stay whole. `*` matches within one segment, `**` any number of segments. Write "
        "`optional` in front of a rule that may match nothing. `autoshard plan show` lists "
        "everything that rules match.",
        "h.*.attn.c_atn: rowwise",
        "h.*.attn.c_attn: rowwise",
    ),
    "AS202": Page(
        "unknown style",
        "The note lists the styles; Hugging Face's names are understood as well.",
        "mlp.c_fc: column",
        "mlp.c_fc: colwise",
    ),
    "AS203": Page(
        "two rules claim one module",
        "There is no hidden order of precedence. The later rule must say that it overrides.",
        "h.*: full;  h.0: none",
        "h.*: full;  override h.0: none",
    ),
    "AS204": Page(
        "a style doesn't have this option",
        "The help lists its options.",
        "colwise(part=3)",
        "colwise(parts=3)",
    ),
    "AS205": Page(
        "the model brings no tp_plan",
        "`use transformers.tp_plan` needs a Hugging Face model whose class or config has one.",
    ),
    "AS206": Page(
        "an option is badly written",
        "Options are `name=value`, flags stand alone, each once.",
        "colwise(3)",
        "colwise(parts=3)",
    ),
    "AS207": Page(
        "the module has no weight to split",
        "A style that splits needs a linear, Conv1D or embedding layer. Attention as a whole needs "
        "no rule: the split of its query, key and value layers carries through it.",
        "h.*.attn: colwise",
        "h.*.attn.{q,k,v}_proj: colwise",
    ),
    "AS208": Page(
        "an override overrides nothing",
        "A warning: no rule above claims any of these modules.",
    ),
    "AS209": Page(
        "nothing to drop",
        "`drop PATH` removes a rule that an included file made; the path must be written the same.",
    ),
    "AS210": Page(
        "the style doesn't fit this kind of layer",
        "`rowwise` needs inputs to split, which an embedding doesn't have. Norms stay whole.",
        "embed: rowwise",
        "embed: vocab",
    ),
    "AS211": Page(
        "a range without numbers",
        "The smaller number comes first, and both ends are included.",
        "h.[5..0]: full",
        "h.[0..5]: full",
    ),
    "AS212": Page(
        "a Hugging Face style without a counterpart",
        "Most of them are read as ours. The few that have none are refused by name instead of "
        "being read as something near.",
    ),
    "AS213": Page(
        "unknown source of rules",
        "`use` knows `transformers.tp_plan`.",
    ),
    "AS214": Page(
        "a part of a path matches nothing",
        "A warning: one of the alternatives in `{a,b}`, or an end of `[0..5]`, matches no module, "
        "while others do.",
        "h.[0..12]: full",
        "h.[0..11]: full",
    ),
    "AS216": Page(
        "a rule of the model's own plan that is not taken over",
        "A warning of `use transformers.tp_plan`: the layer stays whole on every rank (experts, "
        "routers), or needs no rule here because sums follow from the other styles.",
    ),
}
