"""Device layer (data): the wrappers of hardware instructions that sources inline."""
