"""Prefill attention for Hopper's tensor cores (compute capability 9.0), in Gluon.

Gluon programs say which warps do what, and when a product is waited for; Triton's interpreter cannot run them.
"""
