from small_decoder import gpu, lowered, spec

__all__ = ["gpu", "lowered", "spec"]
