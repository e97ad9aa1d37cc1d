"""Monarch's names for what its command line is configured by; see `meshbook.tools.config`.

A module of its own because programs import it by this name, as they import ``monarch.tools``.
"""
