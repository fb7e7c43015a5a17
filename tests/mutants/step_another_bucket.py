"""A program of another bucket stands in, answering for a smaller page table."""

import dataclasses


def wrap(program):
    smaller = dataclasses.replace(
        program.key, bucket=dataclasses.replace(program.key.bucket, pages=2)
    )
    return dataclasses.replace(program, key=smaller)
