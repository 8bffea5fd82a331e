"""How long steps take, learnt while they run: how many prompt tokens may join one without making others wait."""

_WEIGHT = 0.1  # of a new measurement: the last ten or so steps count


class StepTimes:
    """Two running means: the time of a step that only decodes, and what each prompt token adds.

    Args:
        max_step_s: Time that a step should not exceed.
        least: Prompt tokens that it may always run.
    """

    def __init__(self, max_step_s: float, least: int) -> None:
        self._max_step_s = max_step_s
        self._least = least
        self._decode_s = 0.0
        self._prompt_token_s = 0.0

    def observe(self, num_prompt_tokens: int, duration_s: float) -> None:
        """Learn from a step."""
        if num_prompt_tokens:
            token_s = max(0.0, duration_s - self._decode_s) / num_prompt_tokens
            self._prompt_token_s = _mean(self._prompt_token_s, token_s)
        else:
            self._decode_s = _mean(self._decode_s, duration_s)

    def prompt_tokens(self) -> int:
        """Tell how many prompt tokens may join a step in which others decode."""
        if not self._prompt_token_s:
            return self._least
        return max(self._least, int((self._max_step_s - self._decode_s) / self._prompt_token_s))


def _mean(mean: float, value: float) -> float:
    return mean + _WEIGHT * (value - mean) if mean else value
