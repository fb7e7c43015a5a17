"""polyjax serves open-weight language models with JAX and makes itself faster while it serves."""
