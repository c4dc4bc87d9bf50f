from tiny_model import one_thread

__all__ = ["one_thread"]  # applies to every test here
