"""A reward function with verl's interface, as `custom_reward_function.path` names it."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the fraction of the response that is the requested letter, and whether the response is exact."""
    if data_source != "repeat":
        raise NotImplementedError(f"no reward for {data_source}")
    length = max(len(solution_str), extra_info["times"])
    return {"score": solution_str.count(ground_truth[0]) / length, "acc": solution_str == ground_truth}
