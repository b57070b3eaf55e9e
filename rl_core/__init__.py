"""Pure functions of RL post-training: columns, views, plans, advantages, losses, scoring, training and rewards."""
