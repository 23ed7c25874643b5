"""A request's way into the engine and back."""
