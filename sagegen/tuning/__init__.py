"""Searching the best config: journal, model, search, finals, and the run that ties them together."""
