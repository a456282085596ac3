"""RSIPO and the methods it is compared with, as plugin algorithms of one Lightning trainer."""

__version__ = "0.1.0"
