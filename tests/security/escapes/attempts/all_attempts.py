"""Every group of attempts; importing this fills the table."""

from security.escapes.attempts import calls, files, masks, namespaces, proc, processes, sockets

GROUPS = (files, masks, proc, processes, sockets, namespaces, calls)
