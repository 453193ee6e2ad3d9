"""The decoder, its configuration and its weights."""
