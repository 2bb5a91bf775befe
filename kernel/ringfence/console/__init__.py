"""The operator's side: the command line and what it needs."""
