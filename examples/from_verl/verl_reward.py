"""A reward function with verl's interface, as `custom_reward_function.path` names it. It is used unchanged."""

MAX_LENGTH = 8


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the fraction of the response that is the requested letter, and whether it is nothing else."""
    if data_source != "one_letter":
        raise NotImplementedError(f"no reward for {data_source}")
    right = solution_str.count(ground_truth)
    return {"score": right / max(len(solution_str), MAX_LENGTH), "acc": right == len(solution_str) > 0}
