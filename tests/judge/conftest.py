from small_decoder import gpu, lowered, opened, spec

__all__ = ["gpu", "lowered", "opened", "spec"]
