"""Adapters: how engines that we did not write take part. Each names the source of its numbers."""
