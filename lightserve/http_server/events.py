"""What can be said of text events: how many ids they count, and several of one request as one."""

from lightserve.ipc.messages import TextEvent, count_int32


def num_tokens(event: TextEvent) -> int:
    """Return how many generated ids an event counts."""
    return count_int32(event.token_ids)


def merge_events(events: list[TextEvent]) -> list[TextEvent]:
    """Join the events of each request into one, so that a client that fell behind costs one chunk, not many."""
    if len(events) == 1:
        return events
    merged: dict[int, TextEvent] = {}
    for event in events:
        earlier = merged.get(event.req_id)
        merged[event.req_id] = event if earlier is None else _join(earlier, event)
    return list(merged.values())


def _join(first: TextEvent, then: TextEvent) -> TextEvent:
    return TextEvent(
        first.req_id,
        first.text + then.text,
        first.token_ids + then.token_ids,
        first.logprobs + then.logprobs,
        then.finish_reason,
        cached_len=first.cached_len + then.cached_len,
    )
