"""The commands of `litspec`. Each is a function: its signature defines the flags, its docstring the help.

These modules import torch and litgpt only inside functions, so that `litspec --help` is fast.
"""
