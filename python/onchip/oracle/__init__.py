"""Formulas written from the papers, and the judge that compares the library with them.

For `onchip verify` and for tests; needs numpy and ml_dtypes. Nothing here calls the library.
"""
