"""The one table of words: every block, setting, style and option of the plan language.

The checker, its messages, the reprint of a plan, the reference page, completion and the editors'
grammars all read it. `executable` says what this version can run: everything, nothing, or some of
the values; the rest is accepted as planned and refused where it would have to run. Defaults are
those of the dataclasses in `autoshard.plan`.
"""

from collections.abc import Mapping

from autoshard.dsl.blocks_layout import BATCH, MESH, PIPELINE, TENSOR
from autoshard.dsl.blocks_memory import ASSUME, FUSE, PRECISION, RECOMPUTE, ZERO
from autoshard.dsl.specs import BlockSpec
from autoshard.plan import Plan

SCHEMA = (MESH, BATCH, TENSOR, PIPELINE, ZERO, PRECISION, RECOMPUTE, FUSE, ASSUME)
BLOCK: Mapping[str, BlockSpec] = {block.name: block for block in SCHEMA}
BLOCK_SYNONYMS = {word: block.name for block in SCHEMA for word in block.synonyms}


def setting_synonyms(block: BlockSpec) -> Mapping[str, str]:
    """Return other systems' words for the settings of a block."""
    return {word: setting.name for setting in block.settings for word in setting.synonyms}


def home_of(word: str, besides: BlockSpec) -> str | None:
    """Return the block that a setting belongs to when it isn't `besides`, by any of its names."""
    for block in SCHEMA:
        if block is not besides and (block.setting(word) or word in setting_synonyms(block)):
            return block.name
    return None


def default_of(block: str, setting: str) -> object:
    """Return the value that a setting has when a plan doesn't give it."""
    return getattr(getattr(Plan(), block), setting, None)
