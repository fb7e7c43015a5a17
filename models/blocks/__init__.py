"""What model families are built of."""
