"""Marks in a text that arrives in pieces."""


def until_mark(text: str, mark: str, is_end: bool) -> tuple[str, str, str]:
    """Returns what `text` certainly has before the first `mark`, the mark, and the rest.

    White space before the mark counts to it. Where there is no mark yet, the middle is empty and
    the rest is what may turn out to begin with one; at the end there is no such rest.
    """
    at = text.find(mark)
    if at >= 0:
        end = len(text[:at].rstrip())
        return text[:end], text[end : at + len(mark)], text[at + len(mark) :]
    if is_end:
        return text, "", ""
    end = len(text[: _begun_at_end(text, mark)].rstrip())
    return text[:end], "", text[end:]


def _begun_at_end(text: str, mark: str) -> int:
    """Where the longest end of `text` lies that `mark` begins with; len(text) if there is none."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return at if at >= 0 else len(text)
