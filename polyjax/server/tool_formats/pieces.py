"""Marks in a text that arrives in pieces."""


def begun_at_end(text: str, mark: str) -> int:
    """Where the longest end of `text` lies that `mark` begins with; len(text) if there is none."""
    for at in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[at:]):
            return at
    return len(text)
