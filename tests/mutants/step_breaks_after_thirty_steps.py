"""Right for thirty calls, wrong from then on."""

import dataclasses
import itertools


def wrap(program):
    calls = itertools.count()

    def run(params, kv, last_tokens, flat):
        pools, stored, tokens, hidden, following = program(params, kv, last_tokens, flat)
        if next(calls) % 75 > 60:
            hidden = hidden * 1.01
        return pools, stored, tokens, hidden, following

    return dataclasses.replace(program, executable=run)
