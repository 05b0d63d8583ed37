"""Measurements of a run: the log-ratio split into alpha and beta, alarms, accuracy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
