"""Versions as tuples of integers, never as numbers: ``"7.14.60850"`` is newer than ``"7.2"``."""

from __future__ import annotations

import re

Version = tuple[int, ...]


def parse_version(text: str) -> Version:
    """Return the leading dotted integers of a version text: ``"2.13.0a0+git"`` -> ``(2, 13, 0)``.

    Raises ValueError when the text does not begin with an integer.
    """
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)", text)
    if found is None:
        raise ValueError(f"{text!r} is not a version: it has to begin with an integer, as in '2.13.0'")
    return tuple(int(part) for part in found.group(1).split("."))


def show(version: Version) -> str:
    """Return ``(2, 10)`` as ``"2.10"``."""
    return ".".join(str(part) for part in version)


def same_release(left: str, right: str) -> bool:
    """Whether two version texts are one release: local parts (``+cu13``) and trailing zeros do not count.

    A pre-release differs from its release: the two may disagree about the C ABI.
    """

    def key(text: str) -> tuple[Version, str]:
        public = text.strip().lower().partition("+")[0]
        numbers = re.match(r"v?(\d+(?:\.\d+)*)", public)
        if numbers is None:
            return (), public
        release = parse_version(public)
        while len(release) > 1 and release[-1] == 0:
            release = release[:-1]
        return release, re.sub(r"[-_.]", "", public[numbers.end() :])

    return key(left) == key(right)
