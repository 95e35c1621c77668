"""Drawn models and programs, held against references and, for models, PyTorch's class.

`kinds` lists the kinds of cases. Each has a module that draws a case and one that runs it. The code
of a model is in `source`, and `train` runs it on a rank.
"""
