"""Paged-KV inference engine: block pool, prefix index, scheduler, model and sampler. It knows no files."""
