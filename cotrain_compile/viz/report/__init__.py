"""Report: a plan as one HTML page that needs no network: words, timeline, memory, parameters.

`page` puts it together from `facts` (numbers in words), `bars` (timelines, merged by layer),
`charts` (Bokeh figures) and `parameters` (the table). Every number comes from the plan, its
timelines or a simulation of it.
"""
