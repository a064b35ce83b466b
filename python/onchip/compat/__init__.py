"""Names and signatures of libraries that people already call, computed by onchip.

A module each, imported by its name; what a library's function does that onchip cannot is refused
with `onchip.Unsupported`, never ignored.
"""
