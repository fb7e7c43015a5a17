"""Output cached from the last call: tokens and hidden state lag one step behind."""

import dataclasses


def wrap(program):
    last = []

    def run(params, kv, last_tokens, flat):
        pools, stored, tokens, hidden, following = program(params, kv, last_tokens, flat)
        last.append((tokens, hidden))
        return pools, stored, *last[max(len(last) - 2, 0)], following

    return dataclasses.replace(program, executable=run)
