"""The commands of `litspec`: one function each, whose signature is its flags and whose docstring is its help.

Nothing heavy is imported at the top of these modules: `litspec --help` answers without torch and litgpt.
"""
