"""Jobs for child processes that import little."""


def double(number):
    return 2 * number


def poison():
    """A candidate's failure after which the device computes nonsense."""
    import jax

    jax.numpy.arange = lambda *_: jax.numpy.zeros(4)
    raise RuntimeError("illegal address")
