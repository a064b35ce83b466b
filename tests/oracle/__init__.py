"""Formulas written from the papers, and the judge that compares the library with them."""
