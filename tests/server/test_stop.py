"""Stop strings in a text cut into pieces anywhere."""

from hypothesis import given
from hypothesis import strategies as st

from polyjax.server.stop import StopStrings

texts = st.text(alphabet="ab", max_size=12)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def expected(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The definition: read by characters; the first complete stop string, the longest of them."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


@given(texts, stops, st.booleans(), st.data())
def test_any_cut_gives_the_same(
    text: str, stops: list[str], include_stop: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopStrings(stops, include_stop)
    emitted, stop = "", None
    for piece in pieces:
        stopped = matcher.push(piece)
        emitted += stopped.text
        stop = stopped.stop
        if stop is not None:
            break
    if stop is None:
        emitted += matcher.finish()
    assert (emitted, stop) == expected(text, stops, include_stop)


@given(texts, stops)
def test_only_what_may_begin_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops, False)
    seen = ""
    for character in text:
        stopped = matcher.push(character)
        seen += stopped.text
        if stopped.stop is not None:
            return
        held = matcher._held
        assert held == "" or any(stop.startswith(held) for stop in stops)
