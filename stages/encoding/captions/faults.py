"""Faults of a caption that a model wrote."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MOST_REPEATS = 3  # of a phrase, one after the other, and of a sentence or tag anywhere
LONGEST_PHRASE = 24  # words


@dataclass(frozen=True)
class Fault:
    """reason: a short code. problem: what is wrong, after the item's path. advice: what to do about it."""

    reason: str
    problem: str
    advice: str


def find_fault(text: str, ended: bool, max_tokens: int, forbidden: Sequence[str]) -> Fault | None:
    """The fault of a caption, None for a good one. ended: whether the model came to its end."""
    words = re.findall(r"\w+", text.lower())
    written = f"the model wrote {quote(text)}"
    if not words:
        step = "ask with other words (caption.prompts), or write one"
        return Fault("empty-caption", f"has a caption without words: {written}", step)
    if "\0" in text:
        step = "ask with other words (caption.prompts), or write one"
        return Fault("caption-zero-bytes", f"has a caption that holds zero bytes: {written}", step)
    if repeats(words, text):
        step = "set caption.repetition_penalty: 1.05 or a caption.temperature, or write one"
        return Fault("repeating-caption", f"has a caption that repeats itself: {written}", step)
    if not ended:
        step = "raise caption.max_tokens, or ask for less (caption.prompts), or write one"
        return Fault("cut-caption", f"has a caption that is not at its end after {max_tokens} tokens: {written}", step)
    for word in forbidden:
        if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE):
            step = "ask with other words (caption.prompts), or write one"
            return Fault("forbidden-word", f"has a caption with {quote(word)}: {written}", step)
    return None


def quote(text: str) -> str:
    """The text in quotation marks, without what separates a problem from its remedy in a message."""
    return '"' + " ".join(text.split()).replace("; ", ", ") + '"'


def repeats(words: Sequence[str], text: str) -> bool:
    """Whether a phrase comes more than MOST_REPEATS times in a row, or a sentence or tag so often at all."""
    for length in range(1, min(LONGEST_PHRASE, len(words) // (MOST_REPEATS + 1)) + 1):
        run = 0
        for index in range(length, len(words)):
            run = run + 1 if words[index] == words[index - length] else 0
            if run >= length * MOST_REPEATS:
                return True
    parts = Counter(part.strip().lower() for part in re.split(r"[.!?,;\n]+", text) if part.strip())
    return max(parts.values(), default=0) > MOST_REPEATS
