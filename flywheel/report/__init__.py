"""A campaign as people look at it: one page, and its pictures."""
