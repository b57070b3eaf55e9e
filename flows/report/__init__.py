"""The report of a run: a self-contained, interactive HTML page that works offline.

`run.py` writes the page and finds its alarms; `panels.py` and `samples.py` make its panels, `charts.py` the charts, and
`page.html` is the template. Nothing here imports Prefect, Ray or torch.
"""
