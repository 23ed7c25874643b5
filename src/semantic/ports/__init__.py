"""The seams: what the outside asks of the core, and what the core asks of the outside."""
