"""
Quickstart
==========

Test.
"""

print(1)
