"""Tuned registries (data): one YAML file per GPU, its winning cubins in a folder beside it."""
