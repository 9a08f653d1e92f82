"""Judging a kernel: inputs, accuracy gate, timing, and the worker process that runs them."""
