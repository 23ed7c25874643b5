"""Questions that were asked before something was built, as scripts that answer PASS or FAIL."""
