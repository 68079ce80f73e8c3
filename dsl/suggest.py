"""Did you mean: the nearest of the words that would have been right."""

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

ENOUGH = 0.62  # below this the nearest word is a guess that only distracts


def likeness(given: str, word: str) -> float:
    """Return how alike two words are, 0 to about 1; a shared beginning counts extra."""
    given, word = given.lower(), word.lower()
    ratio = SequenceMatcher(None, given, word, autojunk=False).ratio()
    begins = min(len(given), len(word)) >= 3 and (given.startswith(word) or word.startswith(given))
    same_start = 0.02 if given[:1] == word[:1] else 0.0  # decides between equals
    return (max(ratio, 0.8) if begins else ratio) + same_start


def nearest(given: str, words: Iterable[str]) -> str | None:
    """Return the word most like `given`, None when none is like it; the first wins a tie."""
    best = max(((likeness(given, word), -i, word) for i, word in enumerate(words)), default=None)
    return best[2] if best is not None and best[0] >= ENOUGH else None


def did_you_mean(
    given: str, words: Iterable[str], synonyms: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the help line for a wrong word, empty when nothing is near.

    `synonyms` maps the words of other systems to ours; they win over likeness.
    """
    found = (synonyms or {}).get(given) or nearest(given, words)
    return (f"did you mean `{found}`?",) if found else ()
