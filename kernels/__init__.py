"""Attention over paged keys and values: Triton on a GPU, torch on a CPU. Knows tensors only."""
