"""What the tokens of a launch mean for its sequences: outputs, ends, cached prefixes."""

from __future__ import annotations

from polyjax.core.errors import RequestError
from polyjax.engine.roster import Roster
from polyjax.engine.sequence import Sequence, SequenceStatus
from polyjax.engine.step import Launch, LaunchResult, SchedulerCounters
from polyjax.engine.types import FinishReason, RequestOutput, TokenLogprobs


class Committer:
    """Takes in one step's results. `epoch` and `now_s` (time.monotonic()) go into what it makes."""

    __slots__ = ("_counters", "_epoch", "_now_s", "_page_size", "_roster")

    def __init__(self, roster: Roster, counters: SchedulerCounters, epoch: int, now_s: float):
        self._roster = roster
        self._counters = counters
        self._epoch = epoch
        self._now_s = now_s
        self._page_size = roster.allocator.page_size

    def commit(self, launch: Launch, result: LaunchResult) -> list[RequestOutput]:
        """Returns an output for every row that sampled a token or ended.

        One whose document ended without an end token has a second output, without a token.
        """
        if launch.prompt_logprobs:
            _collect_prompt_logprobs(launch, result)
        outputs: list[RequestOutput] = []
        finished, epoch = SequenceStatus.FINISHED, self._epoch
        all_logprobs = result.logprobs
        generated = 0
        rows = zip(launch.sequences, result.tokens, launch.samples, strict=False)
        for row, (sequence, token, samples) in enumerate(rows):
            if sequence.status is finished:
                continue  # it ended while this row was in flight
            if samples:
                generated += 1
                known = sequence.token_ids
                known.append(token)
                if (
                    len(known) < sequence.event_total
                    and token not in sequence.stop_ids
                    and all_logprobs is None
                    and sequence.constraint is None
                ):  # most tokens are only passed on; positional arguments, because they are faster
                    output = RequestOutput(sequence.id, [token], None, None, None, None, 0, epoch)
                    outputs.append(output)
                else:
                    logprobs = all_logprobs[row] if all_logprobs is not None else None
                    outputs += self._commit_token(sequence, token, logprobs)
            elif launch.starts[row] + launch.num_tokens[row] >= sequence.max_total:
                outputs.append(self._commit_prompt(sequence))
        self._counters.generation_tokens += generated
        return outputs

    def _commit_token(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None
    ) -> list[RequestOutput]:
        """The outputs for a token just appended, whatever it means for its sequence."""
        output = RequestOutput(sequence.id, [token], epoch=self._epoch)
        known = len(sequence.token_ids)
        if logprobs is not None and sequence.params.logprobs is not None:
            output.logprobs = [logprobs]
        if known == sequence.prompt_tokens + 1:
            self._report_prompt(sequence, output)
        if token in sequence.stop_ids:  # never before min_tokens: the launch bans them
            output.finish_reason = FinishReason.STOP
            output.stop_reason = None if token in sequence.eos_ids else token
        elif ending := self._ending(sequence, token):
            self._finish(sequence)
            return [output, ending]
        elif known >= sequence.max_total:
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is None:
            self._roster.register(sequence)
            next_page = known + self._page_size - known % self._page_size
            sequence.event_total = min(sequence.max_total, next_page)
        else:
            self._finish(sequence)
        return [output]

    def _ending(self, sequence: Sequence, token: int) -> RequestOutput | None:
        """The last output of a sequence whose grammar ends with `token`, or cannot go on after it.

        It is one of its own, because clients take the last token of a stop for no part of the text.
        """
        if sequence.constraint is None:
            return None
        try:
            ended = sequence.constraint.take(token)
        except RequestError as error:
            return error_output(sequence, error, self._epoch)
        if not ended:
            return None
        return RequestOutput(sequence.id, [], FinishReason.STOP, epoch=self._epoch)

    def _commit_prompt(self, sequence: Sequence) -> RequestOutput:
        """The output of a request with max_tokens 0, whose prompt is computed."""
        output = RequestOutput(sequence.id, [], FinishReason.LENGTH, epoch=self._epoch)
        self._report_prompt(sequence, output)
        self._finish(sequence)
        return output

    def _report_prompt(self, sequence: Sequence, output: RequestOutput) -> None:
        """Adds to a sequence's first output what is known of its prompt."""
        sequence.first_token_s = self._now_s
        self._counters.prompt_tokens += sequence.prompt_tokens
        output.cached_tokens = sequence.num_cached
        output.scheduled_s = sequence.admitted_s
        if sequence.prompt_logprobs_due:
            output.prompt_logprobs = sequence.prompt_logprobs or [None]
            sequence.prompt_logprobs_due = False

    def _finish(self, sequence: Sequence) -> None:
        sequence.finished_s = self._now_s
        self._roster.finish(sequence)


def error_output(sequence: Sequence, error: RequestError, epoch: int = 0) -> RequestOutput:
    """The last output of a sequence whose request is wrong; clients see `error` with its status."""
    return RequestOutput(
        sequence.id,
        [],
        FinishReason.ERROR,
        epoch=epoch,
        error=str(error),
        error_param=error.param,
    )


def _collect_prompt_logprobs(launch: Launch, result: LaunchResult) -> None:
    """Keeps those of a launch; a chunk computed again after preemption adds only what is new."""
    if result.prompt_logprobs is None:
        raise ValueError("the launch asked for prompt logprobs and its result has none")
    for row, sequence in enumerate(launch.sequences):
        entries = result.prompt_logprobs[row]
        have = sequence.prompt_logprobs or [None]  # nothing precedes the first token
        first = launch.starts[row] + 1
        if entries is not None and first <= len(have):
            have += entries[len(have) - first : sequence.prompt_tokens - first]
            sequence.prompt_logprobs = have
