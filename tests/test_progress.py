"""Progress is one line on a terminal and a few lines in a log."""

import io

from polyjax.progress import ShownProgress, describe


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream):
    progress = ShownProgress(stream)
    for done in range(1, 101):
        progress("loading", done, 100)
    progress("compiling", 1, 2)
    progress("compiling", 2, 2)
    return stream.getvalue()


def test_a_log_gets_the_begin_and_the_end_of_each_phase():
    lines = shown(io.StringIO()).splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "polyjax: loading 1/100",
        "polyjax: loading 100/100",
        "polyjax: compiling 1/2",
        "polyjax: compiling 2/2",
    ]


def test_a_terminal_gets_one_line_a_phase():
    text = shown(Terminal())
    assert text.count("\n") == 2 and text.count("\r") >= 4


def test_time_left_is_in_proportion():
    assert describe("compiling", 10, 40, 20.0) == "compiling 10/40, 20 s, 60 s left"
    assert describe("compiling", 40, 40, 80.0) == "compiling 40/40, took 80.0 s"
    assert describe("waiting", 0, 0, 5.0) == "waiting ..."
