"""A campaign for people: one page and its pictures."""
