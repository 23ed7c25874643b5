"""Agents and turns in SQLite."""
