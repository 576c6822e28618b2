"""Use what was found: a decoder for Python programs, and a server of OpenAI's API above it."""
