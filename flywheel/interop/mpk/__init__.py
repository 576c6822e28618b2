"""Task graphs of Mirage's persistent kernel (MPK): read, proved, costed and written back. Source: docs/mpk.md."""
