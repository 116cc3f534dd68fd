# Generated from shared/version.txt by ci/generate.py; do not edit.
__version__ = "0.1.0"
