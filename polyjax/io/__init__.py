"""What goes in and out of a model: its files, its tokenizer, its chat template, its grammar.

`files.open_model` is the way in. Only `load` imports jax; the HTTP processes use all the rest.
"""
