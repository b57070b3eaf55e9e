"""A reward function with verl's interface, as `custom_reward_function.path` names it. It is used unchanged."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the fraction of the response's characters that are of the requested kind, and whether all are."""
    if data_source not in ("digits", "vowels", "capitals"):
        raise NotImplementedError(f"no reward for {data_source}")
    right = sum(character in ground_truth for character in solution_str)
    score = right / max(len(solution_str), extra_info["length"])
    return {"score": score, "acc": score == 1}
