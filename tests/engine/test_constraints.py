"""Requests with a grammar: valid documents whatever else happens to them and beside them."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from polyjax.core.errors import RequestError
from polyjax.engine import build
from polyjax.engine.constraints import Constraints
from polyjax.engine.engine import Engine
from polyjax.engine.types import EngineConfig, FinishReason, Grammar, Request, SamplingParams
from polyjax.io.files import open_model
from polyjax.io.grammar import GrammarCompiler
from tests import tiny_llama
from tests.engine.constrained import (
    EOS,
    constrained,
    make_constrained_engine,
    schema,
    text_of,
    tokenizer,
)
from tests.engine.serving import (
    Stream,
    assert_greedy,
    greedy,
    logit_bound,
    prompt,
    run,
    step_without_compiling,
)
from tests.schemas import bounded_schema

LETTERS = Grammar("regex", "[a-f]{30}")
MAX_DOCUMENT_TOKENS = 500


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = make_constrained_engine(tmp_path_factory.mktemp("constrained"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer().to_str(), tiny_llama.VOCAB, [EOS])


def allowed_after(compiler: GrammarCompiler, grammar: Grammar, tokens: list[int]) -> np.ndarray:
    """[V] bool by a matcher of its own."""
    matcher = compiler.matcher(grammar.kind, grammar.text)
    if tokens:
        matcher.consume(tokens)
    row = np.zeros(compiler.num_mask_words, np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: tiny_llama.VOCAB]
    return bits.astype(bool)


def assert_greedy_within(
    engine: Engine, compiler: GrammarCompiler, request: Request, tokens: list[int]
) -> None:
    """Every token is the plain model's best of those that the grammar allows there."""
    grammar = request.params.grammar
    assert grammar is not None
    logits = tiny_llama.plain_logits(engine.state.params, request.prompt_token_ids + tokens)
    first = len(request.prompt_token_ids) - 1
    for index, token in enumerate(tokens):
        row = logits[first + index]
        allowed = allowed_after(compiler, grammar, tokens[:index])
        assert allowed[token]
        assert row[token] >= row[allowed].max() - 2 * logit_bound(row)


def test_documents_of_200_schemas_are_valid(engine: Engine) -> None:
    """Greedy, sampled and filtered rows in one batch; some requests would ignore the end."""
    requests = {}
    for seed in range(200):
        sampling: dict[str, Any] = [
            {},
            {"temperature": 1.0, "seed": seed},
            {"temperature": 1.5, "top_p": 0.8, "top_k": 40, "seed": seed},
            {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        ][seed % 4]
        params = constrained(
            schema(bounded_schema(seed)), MAX_DOCUMENT_TOKENS, ignore_eos=seed % 3 == 0, **sampling
        )
        requests[f"schema-{seed}"] = Request(f"schema-{seed}", prompt(1 + seed % 20), params)
    streams = run(engine, requests.values())
    for seed in range(200):
        stream = streams[f"schema-{seed}"]
        assert stream.finish_reason is FinishReason.STOP, (seed, text_of(stream))
        assert stream.outputs[-1].stop_reason is None
        jsonschema.validate(json.loads(text_of(stream)), bounded_schema(seed))
    assert engine.stats().kv_usage == 0.0


def test_cut_documents_are_prefixes(engine: Engine, compiler: GrammarCompiler) -> None:
    wanted = [schema(bounded_schema(seed)) for seed in range(40)]
    requests = [
        Request(f"cut-{n}", prompt(5, n), constrained(grammar, 1 + n % 7, temperature=1.0, seed=n))
        for n, grammar in enumerate(wanted)
    ]
    streams = run(engine, requests)
    for number, grammar in enumerate(wanted):
        stream = streams[f"cut-{number}"]
        matcher = compiler.matcher(grammar.kind, grammar.text)
        matcher.consume([token for token in stream.tokens if token != EOS])
        if stream.finish_reason is FinishReason.LENGTH:
            assert len(stream.tokens) == 1 + number % 7
        else:
            assert stream.finish_reason is FinishReason.STOP and matcher.complete


@pytest.mark.parametrize(
    ("grammar", "likely", "matches"),
    [
        (Grammar("regex", "[ab]{2,4}x"), "x", lambda text: text[-1] == "x" and len(text) <= 5),
        (Grammar("choice", '["yes", "yesterday"]'), "y", {"yes", "yesterday"}.__contains__),
        (Grammar("grammar", 'start: "ab"+ "!"'), "!", lambda text: text.strip("ab") == "!"),
        (Grammar("json_object", ""), '"}', lambda text: isinstance(json.loads(text), dict)),
    ],
)
def test_other_kinds(engine: Engine, grammar: Grammar, likely: str, matches: Any) -> None:
    bias = tuple((token, 30.0) for token in tokenizer().encode(likely).ids)  # or it goes on
    requests = [
        Request(f"k{n}", prompt(3, n), constrained(grammar, 200, temperature=1.0, logit_bias=bias))
        for n in range(6)
    ]
    for stream in run(engine, requests).values():
        assert stream.finish_reason is FinishReason.STOP
        assert matches(text_of(stream)), text_of(stream)


def test_mixed_traffic_leaves_each_row_its_own(engine: Engine, compiler: GrammarCompiler) -> None:
    plain = [Request(f"plain-{n}", prompt(6 + n, n), greedy(40)) for n in range(5)]
    seeded = SamplingParams(max_tokens=30, temperature=1.5, seed=3, ignore_eos=True)
    alone = run(engine, [Request("alone", prompt(9), seeded)])["alone"].tokens
    bound = [Request(f"bound-{n}", prompt(4 + n, n), constrained(LETTERS)) for n in range(5)]
    mixed = [request for pair in zip(plain, bound, strict=True) for request in pair]
    streams = run(engine, [*mixed, Request("among", prompt(9), seeded)])
    assert streams["among"].tokens == alone
    for request in plain:
        assert_greedy(engine, request, streams[request.id].tokens)
    for request in bound:
        assert len(text_of(streams[request.id])) == 30
        assert_greedy_within(engine, compiler, request, streams[request.id].tokens)


def test_log_probabilities_are_those_of_what_is_allowed(
    engine: Engine, compiler: GrammarCompiler
) -> None:
    """As vLLM's: the others have none. A free row beside has them for all tokens."""
    params = constrained(LETTERS, logprobs=8, temperature=1.0, seed=4, frequency_penalty=0.5)
    bound, free = Request("b", prompt(6), params), Request("f", prompt(7), greedy(9, logprobs=20))
    streams = run(engine, [bound, free])
    for request in (bound, free):
        tokens = streams[request.id].tokens
        logits = tiny_llama.plain_logits(engine.state.params, request.prompt_token_ids + tokens)
        entries = [e for output in streams[request.id].outputs for e in output.logprobs or []]
        assert [entry.token_id for entry in entries] == tokens
        for index, entry in enumerate(entries):
            row = logits[len(request.prompt_token_ids) - 1 + index].astype(np.float64)
            near = 4 * logit_bound(row)  # its own logit, and a mean over others
            if request is bound:
                row = np.where(allowed_after(compiler, LETTERS, tokens[:index]), row, -np.inf)
            wanted = row - np.log(np.exp(row).sum())
            assert abs(entry.logprob - wanted[entry.token_id]) <= near
            kept = np.sort(wanted[np.isfinite(wanted)])[::-1][: len(entry.top)]
            assert len(entry.top) == (min(8, np.isfinite(wanted).sum()) if request is bound else 20)
            assert np.abs(kept - [value for _, value in entry.top]).max() <= near


def test_constrained_rows_are_in_every_step(engine: Engine) -> None:
    """The mask of a step is made while its forward program runs: none waits for a step."""
    steps: dict[str, list[int]] = {"bound-0": [], "bound-1": [], "free": []}
    engine.add(Request("bound-0", prompt(3), constrained(LETTERS)))
    engine.add(Request("bound-1", prompt(4), constrained(LETTERS, temperature=1.0)))
    engine.add(Request("free", prompt(5), greedy(30)))
    while engine.has_work:
        for output in step_without_compiling(engine):
            if output.token_ids:
                steps[output.request_id].append(engine.step_number)
    for taken in steps.values():
        assert len(taken) >= 15
        assert taken == list(range(taken[0], taken[0] + len(taken)))


def test_end_of_sequence_only_where_a_document_is_complete(engine: Engine) -> None:
    eager = ((EOS, 100.0),)
    wanted = Grammar("regex", "[a-c]{5}[x-z]{0,40}")
    stream = run(engine, [Request("e", prompt(4), constrained(wanted, logit_bias=eager))])["e"]
    assert stream.finish_reason is FinishReason.STOP
    assert len(stream.outputs[-1].token_ids) == 1 and stream.tokens[-1] == EOS
    assert len(text_of(stream)) == 5
    params = constrained(wanted, logit_bias=eager, ignore_eos=True)
    stream = run(engine, [Request("i", prompt(4), params)])["i"]
    assert EOS not in stream.tokens
    assert len(text_of(stream)) == 45
    assert stream.finish_reason is FinishReason.STOP


def test_a_stop_token_of_the_document_ends_it(engine: Engine) -> None:
    (x,) = tokenizer().encode("x").ids
    params = constrained(Grammar("regex", "a{3}x{9}"), stop_token_ids=(x,))
    stream = run(engine, [Request("s", prompt(4), params)])["s"]
    assert text_of(stream) == "aaax"
    assert (stream.finish_reason, stream.outputs[-1].stop_reason) == (FinishReason.STOP, x)


def test_preemption_and_recomputation_keep_matchers_right(
    engine: Engine, compiler: GrammarCompiler
) -> None:
    """More text than the cache holds: 16 sequences of 400 tokens, room for a quarter of those."""
    grammar = Grammar("regex", "[a-f]{300}")
    before = engine.stats().preemptions
    requests = [Request(f"p{n}", prompt(90, n), constrained(grammar, 700)) for n in range(14)]
    streams = run(engine, requests)
    assert engine.stats().preemptions > before
    for stream in streams.values():
        assert len(text_of(stream)) == 300
        assert stream.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("where", ["launch", "sample", "read"])
def test_a_failed_step_is_computed_again(
    engine: Engine, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    requests = [Request(f"f{n}", prompt(10, n), constrained(LETTERS)) for n in range(3)]
    original, failures, calls = getattr(engine.launcher, where), [5, 17], 0

    def sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if failures and calls >= failures[0]:
            failures.pop(0)
            original(*args)  # what was donated is gone
            raise RuntimeError("injected")
        return original(*args)

    monkeypatch.setattr(engine.launcher, where, sometimes)
    streams = run(engine, requests)
    assert not failures
    for request in requests:
        assert len(text_of(streams[request.id])) == 30
        assert_greedy_within(engine, compiler, request, streams[request.id].tokens)


def test_abort_while_compiling_and_while_running(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_compiling(engine, monkeypatch)
    engine.add(Request("compiling", prompt(5), constrained(LETTERS)))
    engine.step()
    engine.abort("compiling")
    gate.set()
    engine.add(Request("running", prompt(5), constrained(Grammar("regex", "[ab]{90}"))))
    while not engine.stats().running:
        engine.step()
    for _ in range(3):
        engine.step()
    engine.abort("running")
    assert run(engine, []) == {}
    assert engine.stats().kv_usage == 0.0


def hold_compiling(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Grammars are compiled only once the event is set."""
    gate, compile_grammar = threading.Event(), engine.constraints._compile

    def wait(*args: Any) -> Any:
        assert gate.wait(60)
        return compile_grammar(*args)

    monkeypatch.setattr(engine.constraints, "_compile", wait)
    return gate


def test_nobody_waits_for_a_grammar_that_is_being_compiled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_compiling(engine, monkeypatch)
    streams = {name: Stream() for name in ("slow", "before", "after")}
    engine.add(Request("before", prompt(3), greedy(30)))
    engine.add(Request("slow", prompt(5), constrained(LETTERS), priority=-1))
    engine.add(Request("after", prompt(4), greedy(30)))
    while not (streams["before"].finish_reason and streams["after"].finish_reason):
        for output in step_without_compiling(engine):
            streams[output.request_id].take(output)
    assert not streams["slow"].outputs
    assert engine.stats().waiting == 1
    gate.set()
    while engine.has_work:
        for output in engine.step():
            streams[output.request_id].take(output)
    assert len(text_of(streams["slow"])) == 30


@pytest.mark.parametrize(
    "grammar", [Grammar("regex", "("), schema({"type": "nonsense"}), Grammar("unheard_of", "x")]
)
def test_a_bad_grammar_ends_its_request_alone(engine: Engine, grammar: Grammar) -> None:
    good = Request("good", prompt(4), constrained(LETTERS))
    streams = run(engine, [Request("bad", prompt(4), constrained(grammar)), good])
    (output,) = streams["bad"].outputs
    assert output.finish_reason is FinishReason.ERROR
    assert output.error and output.error_param
    assert len(text_of(streams["good"])) == 30


def test_a_grammar_without_a_way_on_ends_its_request_alone(engine: Engine) -> None:
    """No token of this vocabulary spells what the grammar asks for."""
    requests = [
        Request("never", prompt(4), constrained(Grammar("choice", '["\u00e9"]'))),
        Request("later", prompt(4), constrained(Grammar("choice", '["ab\u00e9"]'))),
        Request("good", prompt(4), constrained(LETTERS)),
    ]
    streams = run(engine, requests)
    for name in ("never", "later"):
        assert streams[name].finish_reason is FinishReason.ERROR
        assert "vocabulary" in (streams[name].outputs[-1].error or "")
    assert len(text_of(streams["good"])) == 30


def test_an_engine_that_can_serve_no_grammar_says_why(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(tiny_llama.write_model(tmp_path / "model")))
    model = build.open_served_model(config, open_model(config.model), "cpu")
    constraints = Constraints(lambda: build.grammar_compiler(config, model))
    monkeypatch.setattr(engine, "constraints", constraints)
    with pytest.raises(RequestError, match=r"tokenizer\.json is missing") as refused:
        engine.add(Request("r", prompt(4), constrained(LETTERS)))
    assert refused.value.status == 400
    assert not engine.has_work
    constraints.close()


def test_min_tokens_with_a_grammar_is_refused() -> None:
    with pytest.raises(RequestError) as refused:
        constrained(LETTERS, min_tokens=3)
    assert refused.value.param == "min_tokens"
