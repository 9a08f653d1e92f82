"""Measuring what a GPU can do: rates of its units, bandwidths, bits of its FP8 accumulator."""
