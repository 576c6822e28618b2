"""Task graphs of Mirage's persistent kernel (MPK): read, proved, costed, re-ordered and written back. See docs/mpk.md."""
