"""Candidate absent: the program in force runs under the name of the candidate."""

import dataclasses


def wrap(program, incumbent):
    return dataclasses.replace(incumbent, used=program.used, plan_digest=program.plan_digest)
