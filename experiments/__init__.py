"""Scripts that answer questions of the design with PASS or FAIL."""
