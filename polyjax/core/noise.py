"""Counter-based Gumbel noise: a pure function of (seed, position, token), cheap enough for kernels.

A sampling kernel draws the noise of a token where it computes the token's logit, so the noise must
not depend on an order or a neighbour. Every function here is plain uint32 and float32 arithmetic
that also runs inside a Pallas kernel: kernel and reference agree bit for bit on the uniforms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: neighbouring positions start far apart
_ONE_BITS = 0x3F800000  # float32 1.0; with 23 random mantissa bits a uniform in [1, 2)


def mix(x: jax.Array) -> jax.Array:
    """Returns a bijective hash of uint32 x: the low-bias 32-bit mixer found by C. Wellons, 2018."""
    u32 = jnp.uint32
    x = (x ^ (x >> u32(16))) * u32(0x7FEB352D)
    x = (x ^ (x >> u32(15))) * u32(0x846CA68B)
    return x ^ (x >> u32(16))


def row_keys(seeds: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two uint32 keys of each row from seeds uint32 and positions int32."""
    first = mix(seeds ^ mix(positions.astype(jnp.uint32) + jnp.uint32(_GOLDEN)))
    return first, mix(first + jnp.uint32(_GOLDEN))


def uniform(first: jax.Array, second: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns float32 uniforms in (0, 1) of 23 bits for uint32 keys and int32 tokens."""
    bits = mix(mix(tokens.astype(jnp.uint32) ^ first) + second)
    one_to_two = (bits >> jnp.uint32(9)) | jnp.uint32(_ONE_BITS)
    return jax.lax.bitcast_convert_type(one_to_two, jnp.float32) - jnp.float32(1 - 2.0**-24)


def gumbel_of(first: jax.Array, second: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns standard Gumbel noise, -log(-log u), for uint32 keys and int32 tokens."""
    return -jnp.log(-jnp.log(uniform(first, second, tokens)))


def gumbel(seeds: jax.Array, positions: jax.Array, vocab: int) -> jax.Array:
    """[M,V] standard Gumbel noise; depends on a row's (seed, position), never on its neighbours."""
    first, second = row_keys(seeds.astype(jnp.uint32), positions)
    tokens = jnp.arange(vocab, dtype=jnp.int32)
    return gumbel_of(first[:, None], second[:, None], tokens[None, :])
