"""Kernel templates (data): Jinja sources of the kernel families."""
