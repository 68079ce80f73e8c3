"""`autoshard plan doc`: print the reference of the plan language, made from the schema."""

import argparse

from autoshard.diagnostics import AutoshardError
from autoshard.dsl.doc import reference
from autoshard.dsl.schema import BLOCK, BLOCK_SYNONYMS
from autoshard.dsl.suggest import did_you_mean


def run(args: argparse.Namespace) -> int:
    """Print the whole reference, or one block's part."""
    if args.block is not None and args.block not in BLOCK:
        help = (*did_you_mean(args.block, BLOCK, BLOCK_SYNONYMS), f"blocks: {', '.join(BLOCK)}")
        raise AutoshardError(f"there is no block `{args.block}`", help=help)
    print(reference(args.block), end="")
    return 0
