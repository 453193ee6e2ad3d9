"""Job files that come with the product, found by `job=NAME`, and what the demo needs."""
