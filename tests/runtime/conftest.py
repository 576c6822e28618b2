from small_decoder import gpu, spec

__all__ = ["gpu", "spec"]
