"""Graph: a step, or a placed step, as a picture that stays readable at any size.

`picture` folds ops into boxes (model, layer or op), `drawing` writes the boxes as text, DOT or SVG.
"""
