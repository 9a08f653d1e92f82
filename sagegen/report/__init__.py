"""The page that `sagegen report` writes: what a journal or a registry says, as tables and charts."""
