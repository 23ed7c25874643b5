"""Everything that speaks a framework, a file format or a protocol."""
