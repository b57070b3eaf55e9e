"""Engines that are programs in an interpreter of their own: how one is started and called, and the engine over it.

`frames` is also loaded by file in that interpreter, which has nothing of Sluice.
"""
