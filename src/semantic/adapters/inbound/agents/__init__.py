"""Agents, their turns and their files."""
