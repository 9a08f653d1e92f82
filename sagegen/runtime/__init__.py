"""Answering a call: checking it, choosing a kernel, and everything that torch answers instead."""
