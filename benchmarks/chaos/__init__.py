"""Kills, stops and failing disks at random moments of real runs: each must end as the undisturbed run."""
