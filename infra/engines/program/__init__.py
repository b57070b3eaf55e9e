"""The program of an engine: it runs in an interpreter of its own, which has vLLM and nothing of Sluice.

It is loaded by file, and needs the standard library, vLLM and what that brings (torch and NumPy).
"""
