"""Replies held to a form while they are decoded."""
