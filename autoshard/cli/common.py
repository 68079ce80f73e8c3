"""What several commands share: common options, and the model that `--model` names."""

import argparse


def add_common(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that every command has."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser
