"""Doors inside the sandbox for programs that speak a protocol of others: whatever they ask for becomes a syscall."""
