"""The search: mutate, predict, measure, remember."""
