"""Adapters of other frameworks to multigemm's layers, one module for each framework.

Nothing is imported here, and an adapter imports its framework when it is used: where that is absent, the
error names the extra that brings it.
"""
