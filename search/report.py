"""The report of a ledger: one self-contained page, its plots inline."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence

from search import svg
from search.findings import (
    Search,
    best_so_far,
    by_agent,
    counts_by_status,
    lessons,
    predictions,
    rank_correlation,
    searches,
    seconds_by_phase,
    worth_of_fields,
)
from search.ledger import Ledger, Trial

MAX_CURVES, MAX_ROWS = 6, 200

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1f2328; background: #fff; }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
svg { width: 100%; height: auto; max-width: 46rem; display: block }
svg text { font: 11px system-ui, sans-serif; fill: #57606a }
svg .grid { stroke: #d0d7de; stroke-width: 0.6 }
svg .rule { stroke: #57606a; stroke-dasharray: 4 3 }
table { border-collapse: collapse; font-size: 13px; width: 100% }
th, td { text-align: right; padding: 3px 8px; border-bottom: 1px solid #d0d7de }
th:first-child, td:first-child { text-align: left; word-break: break-all; max-width: 24rem }
p.note { color: #57606a; font-size: 13px }
"""


def render(ledger: Ledger) -> str:
    """Returns the page as HTML. Takes seconds for tens of thousands of trials."""
    found = searches(ledger)
    trials = [trial for search in found for trial in search.trials]
    sections = [
        ("Best so far", _best(found)),
        ("Predicted against measured", _predicted(found)),
        ("Where the time went", _time(trials)),
        ("Verdicts", _verdicts(trials)),
        ("What each field is worth", _fields(found)),
        ("Who found what", _agents(found)),
        ("Workloads", _workloads(found)),
        ("Bitter lessons", _lessons(found)),
    ]
    body = "".join(f"<section><h2>{svg.text(n)}</h2>{content}</section>" for n, content in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>polyjax tuning report</title><style>{_STYLE}</style></head><body>"
        f"<h1>Tuning report</h1>{_head(ledger, found, trials)}{body}</body></html>\n"
    )


def _head(ledger: Ledger, found: Sequence[Search], trials: Sequence[Trial]) -> str:
    devices = sorted({search.device_kind for search in found})
    promoted = sum(decision.promoted for search in found for decision in search.decisions)
    when = ""
    if trials:
        first, last = min(t.ended_s for t in trials), max(t.ended_s for t in trials)
        when = f", {_day(first)} to {_day(last)}"
    counts = (
        f"{svg.counted(len(trials), 'trial')} in {svg.counted(len(found), 'search', 'searches')}, "
        f"{svg.counted(promoted, 'promotion')}"
    )
    on = svg.text(", ".join(devices) or "no device")
    return f"<p>{svg.text(ledger.path.name)}: {counts}, on {on}{when}.</p>"


def _day(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(sep=" ", timespec="minutes").removesuffix("+00:00") + " UTC"


def _best(found: Sequence[Search]) -> str:
    curves: dict[str, list[tuple[float, float]]] = {}
    for search in found:
        points = best_so_far(search)
        if points and len(curves) < MAX_CURVES:
            name, number = search.name, 2
            while name in curves:
                name, number = f"{search.name} {number}", number + 1
            curves[name] = points
    if not curves:
        return _note("No search has measured what it starts from.")
    plot = svg.lines("Best so far", curves, "trials", "times as fast as the start")
    left = len(found) - len(curves)
    return plot + (_note(f"The {len(curves)} longest searches; {left} more below.") if left else "")


def _predicted(found: Sequence[Search]) -> str:
    groups: dict[str, list[tuple[float, float]]] = {}
    for search in found:
        op = search.target.partition("[")[0]
        groups.setdefault(op, []).extend(predictions(search))
    groups = {op: pairs for op, pairs in groups.items() if pairs}
    if not groups:
        return _note("No trial has a prediction.")
    largest = dict(sorted(groups.items(), key=lambda item: -len(item[1]))[: len(svg.COLOURS)])
    every = [pair for pairs in groups.values() for pair in pairs]
    errors = sorted(abs(measured / predicted - 1) for predicted, measured in every)
    rows = [[op, f"{len(p):,}", _value(rank_correlation(p), "{:.2f}")] for op, p in groups.items()]
    return (
        svg.scatter("Predicted against measured", largest, "predicted us", "measured us")
        + _note(f"Median error {errors[len(errors) // 2]:.0%} over {len(every):,} trials.")
        + _table(["op", "trials", "rank correlation"], rows)
    )


def _time(trials: Sequence[Trial]) -> str:
    phases = seconds_by_phase(trials)
    if not phases:
        return _note("No trial says what it spent.")
    return svg.bars("Seconds by phase", phases, lambda s: f"{svg.number(s)} s") + _note(
        f"{svg.number(sum(phases.values()))} s in all, on all processes together."
    )


def _verdicts(trials: Sequence[Trial]) -> str:
    counts = counts_by_status(trials)
    if not counts:
        return _note("No trial has ended.")
    shares = {status: float(count) for status, count in counts.items()}
    return svg.bars("Trials by status", shares, lambda n: f"{n:,.0f} ({n / len(trials):.0%})")


def _fields(found: Sequence[Search]) -> str:
    worth = worth_of_fields(found)
    if not worth:
        return _note("Too few trials to compare the values of any field.")
    lost = {field: 100 * (ratio - 1) for field, ratio in list(worth.items())[:20]}
    return svg.bars("Worth of fields", lost, lambda share: f"{share:.1f} %") + _note(
        "How much longer the worst value of a field takes than its best one: medians over the "
        "trials with each, the geometric mean over searches."
    )


def _agents(found: Sequence[Search]) -> str:
    rows = [
        [agent, f"{r.trials:,}", f"{r.passed:,}", f"{r.promoted:,}", f"{r.gain:.3f}x"]
        for agent, r in by_agent(found).items()
    ]
    if not rows:
        return _note("No agent has proposed anything.")
    return _table(["agent", "trials", "passed", "promoted", "gain of its promotions"], rows)


def _workloads(found: Sequence[Search]) -> str:
    rows = []
    for search in found[:MAX_ROWS]:
        start, best, floor = search.start_us, search.best_us, search.floor_us
        gain = start / best if start and best else math.nan
        share = best / floor if best and floor else math.nan
        rows.append(
            [
                search.target,
                f"{len(search.trials):,}",
                _value(start or math.nan, "{:.4g}"),
                _value(best or math.nan, "{:.4g}"),
                _value(gain, "{:.3f}x"),
                _value(floor or math.nan, "{:.4g}"),
                _value(share, "{:.2f}x"),
                search.winner.agent if search.winner else "",
            ]
        )
    head = ["target", "trials", "start us", "best us", "gain", "floor us", "best / floor", "by"]
    left = len(found) - len(rows)
    note = "The floor is the roofline: least bytes over bandwidth or least flops over their rate."
    return _table(head, rows) + _note(note + (f" {left} more are left out." if left else ""))


def _lessons(found: Sequence[Search]) -> str:
    return "<ul>" + "".join(f"<li>{svg.text(line)}</li>" for line in lessons(found)) + "</ul>"


def _value(value: float, form: str) -> str:
    return "" if math.isnan(value) else form.format(value)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = "".join(f"<th>{svg.text(cell)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{svg.text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


def _note(sentence: str) -> str:
    return f'<p class="note">{svg.text(sentence)}</p>'
