"""Running and timing programs. Knows the IR, neither models nor lowering nor search."""
