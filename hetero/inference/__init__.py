"""Generating text with a loaded model."""
