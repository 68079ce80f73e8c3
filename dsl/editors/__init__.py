"""Colours for plans: a TextMate grammar (VS Code, GitHub) and a Pygments lexer (Sphinx, rich)."""
