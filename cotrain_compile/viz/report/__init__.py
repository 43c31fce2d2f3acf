"""Report: a plan as one HTML page that needs no network: words, timeline, memory, parameters.

`page` puts it together from `facts` (numbers in words, the table of parameters) and `charts` (Bokeh
figures, with bars merged by layer). Every number comes from the plan, its timelines or a
simulation of it.
"""
