"""Decoding with found schedules: a decoder for Python programs, and a server with OpenAI's API on top of it."""
