"""The job runner: reads rows, makes prompts, drives the engine and writes its completions."""
