"""Layers that are alike: two of them are lowered, and the rest are copies of one of these.

Dynamo's graph --`shorten`--> the same with few of the layers --AOTAutograd--> ATen graph of these
--`extend`--> ATen graph of all layers. What is not alike to the last detail is lowered as it is.
"""
