"""Timer tampering: the clock is replaced while the program runs."""

import dataclasses
import time


def wrap(program):
    def run(params, kv, last_tokens, flat):
        results = program(params, kv, last_tokens, flat)
        time.perf_counter = lambda: 0.0
        return results

    return dataclasses.replace(program, executable=run)
