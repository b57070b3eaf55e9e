"""The report of a run, and the comparison of several: self-contained, interactive HTML pages that work offline.

`run.py` and `comparison.py` write the pages; `panels.py`, `timing.py` and `samples.py` make their panels, `charts.py`
the charts, and `page.html` is the template. Nothing here imports Prefect, Ray or torch.
"""
