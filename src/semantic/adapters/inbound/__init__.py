"""Protocols that drive the application."""
