"""Speed measurements; nothing here is a test. Each is a command that prints one JSON line."""
