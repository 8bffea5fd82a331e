"""The whole command, and its client, against a server that answers whatever a test wants."""

import asyncio
import io
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import benchmark_sharegpt
import msgspec
import pytest
from benchmark.client import Client
from benchmark.fleet import ClientDiedError, choose_num_processes, run_fleet, split_job
from benchmark.messages import Job, Outcome, Progress, TimedRequest
from benchmark.metrics import LatencyLimits, Summary, summarize
from benchmark.options import parse_options
from benchmark.progress import ProgressLines
from benchmark.prompt import Prompt
from benchmark.report import Report
from benchmark.workload import WorkloadError, arrival_offsets

from tests.scripts.fake_server import (
    CHUNKED,
    DONE,
    END,
    UNTIL_CLOSE,
    FakeServer,
    Steps,
    chunk,
    completion,
    event,
    in_a_thread,
    json_reply,
    listening,
    text_event,
    usage_event,
)
from tests.server import wait_until

_FAKE_CONVERSATIONS = Path(__file__).parents[1] / "data" / "sharegpt_fake.json"


def _load(server: FakeServer, count: int = 1, api: str = "openai-completions", **facts: Any) -> list[Outcome]:
    """Run the client against a server, in this process."""

    async def run() -> list[Outcome]:
        async with listening(server) as url:
            requests = [TimedRequest(i, 0.0, b"{}") for i in range(count)]
            job = Job(url, api, None, None, None, requests)
            client = Client(msgspec.structs.replace(job, **facts))
            await client.run(time.monotonic())
            return client.outcomes

    return sorted(asyncio.run(run()), key=lambda outcome: outcome.index)


def _summary(outcomes: list[Outcome], output_len: int = 100) -> Summary:
    return summarize(outcomes, [Prompt("", 10, output_len)] * len(outcomes), LatencyLimits())


def test_100_tokens_of_one_space_are_100_by_usage() -> None:
    summary = _summary(_load(FakeServer(lambda _: completion(100, usage=100))))
    assert summary.output_tokens == 100
    assert summary.output_tokens_by == {"usage": 1}
    assert summary.prompt_tokens == 7


def test_20_events_of_5_tokens_are_100_by_usage_and_share_their_gaps() -> None:
    outcomes = _load(FakeServer(lambda _: completion(20, usage=100, pause_s=0.02)))
    summary = _summary(outcomes)
    assert summary.output_tokens == 100
    assert summary.itl_ms is not None
    assert summary.e2e_ms is not None
    # 19 gaps bring 95 tokens: the mean gap is 5 times the mean time per token.
    times = memoryview(outcomes[0].chunk_times).cast("d")
    assert summary.itl_ms.mean == pytest.approx((times[-1] - times[0]) * 1e3 / 95, rel=0.01)


def test_without_usage_the_fallback_is_named_in_the_report() -> None:
    summary = _summary(_load(FakeServer(lambda _: completion(100))))
    assert summary.output_tokens == 100
    table = Report("title", summary, [0.1], {}, []).table()
    assert "100 (counted by events)" in table
    assert "1 answers came without usage" in table


def _cut(steps: Steps, size: int) -> Steps:
    whole = b"".join(step for step in steps if isinstance(step, bytes))
    pieces: Steps = []
    for i in range(0, len(whole), size):
        pieces += [whole[i : i + size], 0.0]
    return pieces


@pytest.mark.parametrize("size", [7, 64, 100_000])
def test_an_answer_is_the_same_however_it_is_cut(size: int) -> None:
    (outcome,) = _load(FakeServer(lambda _: _cut(completion(30, usage=30, text="\u00e9\n\n"), size)))
    assert (outcome.failure, outcome.output_tokens) == (None, 30)


def test_an_answer_may_end_with_the_connection() -> None:
    steps: Steps = [UNTIL_CLOSE, text_event("a"), text_event("b", "stop") + usage_event(2) + DONE]
    (outcome,) = _load(FakeServer(lambda _: steps))
    assert (outcome.failure, outcome.output_tokens) == (None, 2)


def test_the_events_of_one_read_arrive_together() -> None:
    steps: Steps = [
        CHUNKED,
        chunk(text_event("a")) + chunk(text_event("b")),
        0.02,
        chunk(text_event("c", "stop")) + END,
        END,
    ]
    (outcome,) = _load(FakeServer(lambda _: steps[:-1]))
    assert list(memoryview(outcome.chunk_events).cast("d")) == [2.0, 1.0]


def test_lightserve_streams_are_read() -> None:
    def token_event(count: int, finished: bool) -> bytes:
        token = {"id": 5, "text": " a", "logprob": -0.1, "special": False}
        token |= {"count_output_tokens": count, "prompt_tokens": 3}
        return chunk(event({"token": token, "finished": finished, "finish_reason": "length" if finished else None}))

    steps: Steps = [CHUNKED, token_event(1, False), 0.01, token_event(2, False) + token_event(3, True), END]
    (outcome,) = _load(FakeServer(lambda _: steps), api="lightserve")
    assert (outcome.failure, outcome.output_tokens, outcome.prompt_tokens) == (None, 3, 3)
    assert list(memoryview(outcome.chunk_usage).cast("d")) == [1.0, 3.0]


_BAD_ANSWERS: dict[str, Steps] = {
    "http_503": [json_reply({"error": {"message": "full"}}, "503 Service Unavailable")],
    "http_429": [json_reply({"error": {"message": "queue is full"}}, "429 Too Many Requests")],
    "disconnected": [CHUNKED, chunk(text_event("a"))],
    "error_event": [CHUNKED, chunk(event({"error": {"message": "a process died"}}) + DONE), END],
    "truncated": [CHUNKED, chunk(text_event("a")), END],
    "empty": [CHUNKED, chunk(text_event("", "stop") + usage_event(0) + DONE), END],
    "bad_event": [CHUNKED, chunk(b"data: {oops\n\n" + DONE), END],
    "aborted": [CHUNKED, chunk(text_event("a", "abort") + DONE), END],
}


@pytest.mark.parametrize("kind", _BAD_ANSWERS)
def test_a_failed_request_is_not_done(kind: str) -> None:
    (outcome,) = _load(FakeServer(lambda _: _BAD_ANSWERS[kind]))
    assert outcome.failure == kind


def test_no_bytes_at_all_is_a_disconnect() -> None:
    (outcome,) = _load(FakeServer(lambda _: []))
    assert outcome.failure == "disconnected"


def test_an_answer_that_is_no_http_is_a_disconnect_with_its_reason() -> None:
    (outcome,) = _load(FakeServer(lambda _: [b"SSH-2.0-OpenSSH\r\n\r\n"]))
    assert outcome.failure == "disconnected"
    assert "not HTTP" in outcome.detail


def test_an_answer_with_an_error_event_is_not_done_however_it_ends() -> None:
    events = [text_event("a"), event({"error": {"message": "a process died"}}), text_event("", "stop"), DONE]
    (outcome,) = _load(FakeServer(lambda _: [CHUNKED, chunk(b"".join(events)), END]))
    assert (outcome.failure, outcome.detail) == ("error_event", "a process died")


def test_an_error_event_before_a_disconnect_is_the_error_event() -> None:
    steps: Steps = [CHUNKED, chunk(event({"error": {"message": "a process died"}}))]
    (outcome,) = _load(FakeServer(lambda _: steps))
    assert (outcome.failure, outcome.detail) == ("error_event", "a process died")


def test_the_reason_of_a_refusal_is_kept() -> None:
    (outcome,) = _load(FakeServer(lambda _: _BAD_ANSWERS["http_429"]))
    assert "queue is full" in outcome.detail


def test_a_closed_port_is_a_connect_failure() -> None:
    (outcome,) = _load(FakeServer(lambda _: []), base_url="http://127.0.0.1:1")
    assert outcome.failure == "connect"


def test_a_request_that_takes_too_long_fails_and_is_closed() -> None:
    server = FakeServer(lambda _: [CHUNKED, chunk(text_event("a")), 0.3, chunk(text_event("b", "stop") + DONE), END])
    (outcome,) = _load(server, timeout_s=0.05)
    assert outcome.failure == "timeout"


def test_concurrency_is_never_exceeded_and_connections_are_kept() -> None:
    server = FakeServer(lambda _: completion(2, usage=2, pause_s=0.002))
    outcomes = _load(server, count=20, max_concurrency=3)
    assert len(outcomes) == 20
    assert server.max_open == 3
    assert server.num_connections == 3


def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    server = FakeServer(lambda _: [UNTIL_CLOSE, text_event("a", "stop") + usage_event(1) + DONE])
    outcomes = _load(server, count=3, max_concurrency=1)
    assert [outcome.failure for outcome in outcomes] == [None] * 3
    assert server.num_connections == 3


def test_requests_are_sent_at_their_times() -> None:
    offsets = [0.0, 0.05, 0.1]
    outcomes = _load(
        FakeServer(lambda _: completion(1, usage=1)),
        requests=[TimedRequest(i, offset, b"{}") for i, offset in enumerate(offsets)],
    )
    starts = [outcome.start_s - outcomes[0].start_s for outcome in outcomes]
    assert all(start >= offset - 0.005 for start, offset in zip(starts, offsets, strict=True))


@pytest.mark.parametrize(("max_concurrency", "limits"), [(None, [None] * 4), (10, [3, 3, 2, 2]), (2, [1, 1])])
def test_shares_add_up_to_the_whole_job(max_concurrency: int | None, limits: list[int | None]) -> None:
    requests = [TimedRequest(i, i / 10, b"") for i in range(10)]
    jobs = split_job(Job("http://h", "lightserve", None, max_concurrency, None, requests), 4)
    assert [job.max_concurrency for job in jobs] == limits
    assert sorted(r.index for job in jobs for r in job.requests) == list(range(10))


def test_a_client_process_that_dies_is_an_error() -> None:
    job = Job("http://127.0.0.1:1", "no such family", None, None, None, [TimedRequest(0, 0.0, b"{}")])
    with pytest.raises(ClientDiedError, match="died"):
        run_fleet(job, 1, lambda _: None)


def test_few_streams_need_one_process() -> None:
    assert choose_num_processes(10_000, 64) == 1
    assert choose_num_processes(20, None) == 1


def test_poisson_arrivals_have_the_rate_and_depend_on_the_seed() -> None:
    prompts = [Prompt("", 1, 1)] * 5000
    offsets = [_offsets(prompts, "--request_rate", "50", "--seed", seed) for seed in ("1", "1", "2")]
    assert offsets[0] == offsets[1]
    assert offsets[0] != offsets[2]
    assert offsets[0] == sorted(offsets[0])
    assert offsets[0][-1] == pytest.approx(100, rel=0.1)


def test_timestamps_are_replayed_at_the_asked_speed() -> None:
    prompts = [Prompt("", 1, 1, 0.0), Prompt("", 1, 1, 3.0)]
    assert _offsets(prompts, "--replay_timestamps", "--replay-speed=2") == [0.0, 1.5]


def test_a_dataset_without_timestamps_cannot_be_replayed() -> None:
    with pytest.raises(WorkloadError, match="no timestamps"):
        _offsets([Prompt("", 1, 1)], "--replay_timestamps")


@pytest.mark.parametrize(("flags", "ignores"), [([], True), (["--no-ignore-eos"], False)])
def test_answers_are_as_long_as_asked_for_unless_the_model_may_end_them(flags: list[str], ignores: bool) -> None:
    assert parse_options(["--dataset", "x.csv", *flags]).ignore_eos is ignores


def _offsets(prompts: list[Prompt], *flags: str) -> list[float]:
    return arrival_offsets(prompts, parse_options(["--dataset", "x.csv", *flags]))


def _run(server: FakeServer, *flags: str, tmp_path: Path) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "result.json"
    with in_a_thread(server) as url:
        status = benchmark_sharegpt.main(["--base_url", url, "--json", str(path), *flags])
    return status, json.loads(path.read_bytes()) if path.exists() else {}


def _overloaded(number: int) -> Steps:
    kinds = ["http_503"] * 3 + ["disconnected", "error_event", "empty"]
    place = number % 10
    return _BAD_ANSWERS[kinds[place]] if place < len(kinds) else completion(3, usage=3)


def test_an_overloaded_server_does_not_look_fast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--api", "openai-completions", "--prompt_len", "5", "--output_len", "3", "--num_prompts", "20")
    status, result = _run(FakeServer(_overloaded), *flags, tmp_path=tmp_path)
    assert status == 1
    results = result["results"]
    assert (results["num_requests"], results["num_done"]) == (20, 8)
    assert results["failures"] == {"http_503": 6, "disconnected": 2, "error_event": 2, "empty": 2}
    assert results["output_tokens"] == 24
    assert "12 (disconnected 2, empty 2, error_event 2, http_503 6)" in capsys.readouterr().out


def test_failures_below_the_threshold_are_no_failed_run(tmp_path: Path) -> None:
    flags = ("--api", "openai-completions", "--prompt_len", "5", "--output_len", "3", "--num_prompts", "10")
    status, result = _run(FakeServer(_overloaded), *flags, "--max_failed_frac", "0.6", tmp_path=tmp_path)
    assert status == 0
    assert result["results"]["num_done"] == 4


def test_several_processes_share_the_load(tmp_path: Path) -> None:
    server = FakeServer(lambda _: completion(2, usage=2))
    flags = ("--api", "openai-completions", "--prompt_len", "5", "--output_len", "2", "--num_prompts", "9")
    status, result = _run(server, *flags, "--client_processes", "3", "--num_warmups", "1", tmp_path=tmp_path)
    assert status == 0
    assert result["results"]["num_done"] == 9
    assert len(result["client_cpu_fracs"]) == 3
    prompts = [body["prompt"] for body in server.bodies]
    assert len({*map(tuple, prompts)}) == 10  # the one to warm up with is none of those that are measured
    assert all(20 <= token_id < 980 for prompt in prompts for token_id in prompt)


def test_conversations_are_sent_as_chats(tmp_path: Path) -> None:
    server = FakeServer(lambda _: completion(2, usage=2))
    flags = ("--api", "openai-chat", "--dataset", str(_FAKE_CONVERSATIONS), "--num_prompts", "6", "--seed", "1")
    status, result = _run(server, *flags, tmp_path=tmp_path)
    assert status == 0
    assert len(server.bodies) == 6
    assert all(body["model"] == "fake" and body["messages"][0]["role"] == "user" for body in server.bodies)
    assert result["server"]["version"] == "fake"


def test_fewer_conversations_than_asked_for_are_a_warning(tmp_path: Path) -> None:
    server = FakeServer(lambda _: completion(2, usage=2))
    flags = ("--api", "openai-completions", "--dataset", str(_FAKE_CONVERSATIONS), "--num_prompts", "50")
    status, result = _run(server, *flags, tmp_path=tmp_path)
    assert status == 0
    assert any("of the 50 asked for" in warning for warning in result["warnings"])
    assert result["skipped"]["malformed"] == 4


def test_conversations_to_warm_up_with_are_others(tmp_path: Path) -> None:
    server = FakeServer(lambda _: completion(2, usage=2))
    flags = ("--api", "openai-completions", "--dataset", str(_FAKE_CONVERSATIONS), "--num_prompts", "4")
    _, result = _run(server, *flags, "--num_warmups", "2", tmp_path=tmp_path)
    assert result["results"]["num_done"] == 4
    assert len({body["prompt"] for body in server.bodies}) == 6


def test_repeat_makes_up_the_number(tmp_path: Path) -> None:
    server = FakeServer(lambda _: completion(2, usage=2))
    flags = ("--api", "openai-completions", "--dataset", str(_FAKE_CONVERSATIONS), "--num_prompts", "50", "--repeat")
    _, result = _run(server, *flags, tmp_path=tmp_path)
    assert result["results"]["num_done"] == 50


def test_no_conversation_left_is_an_error_that_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--api", "openai-completions", "--dataset", str(_FAKE_CONVERSATIONS), "--output_len", "2048")
    status, _ = _run(FakeServer(lambda _: []), *flags, tmp_path=tmp_path)
    assert status == 2
    assert "prompt and answer too long" in capsys.readouterr().err


def test_a_trace_cannot_be_sent_as_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--api", "openai-chat", "--prompt_len", "5", "--output_len", "3")
    assert _run(FakeServer(lambda _: []), *flags, tmp_path=tmp_path)[0] == 2
    assert "takes text alone" in capsys.readouterr().err


def test_no_server_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base_url", "http://127.0.0.1:1", "--prompt_len", "5", "--output_len", "3"]
    assert benchmark_sharegpt.main(flags) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("flag", [["--api_key", "secret"], ["--api-key=secret"]])
def test_a_key_is_sent_but_not_reported(tmp_path: Path, flag: list[str]) -> None:
    server = FakeServer(lambda _: completion(2, usage=2))
    flags = ["--api", "openai-completions", "--prompt_len", "5", "--output_len", "2", *flag]
    _, result = _run(server, *flags, tmp_path=tmp_path)
    assert "Authorization: Bearer secret" in server.heads[0]
    assert "secret" not in json.dumps(result)


def test_a_report_says_how_it_was_made(tmp_path: Path) -> None:
    server = FakeServer(lambda _: completion(2, usage=2))
    _, result = _run(server, "--api", "openai-completions", "--prompt_len", "5", "--output_len", "2", tmp_path=tmp_path)
    assert result["command"].startswith("benchmark_sharegpt.py --base_url http://127.0.0.1:")
    assert {"python", "lightserve", "uvloop"} <= result["versions"].keys()
    assert result["date"].endswith("+00:00")
    assert result["settings"]["request_rate"] == "inf"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--prompt_len", "5"],
        ["--prompt_len", "5", "--output_len", "0"],
        ["--dataset", "x.csv", "--prompt_len", "5"],
        ["--dataset", "x.csv", "--request_rate", "0"],
        ["--dataset", "x.csv", "--request_rate", "2", "--replay_timestamps"],
        ["--dataset", "x.csv", "--extra_body", "[1]"],
        ["--dataset", "x.csv", "--no-such-flag"],
    ],
)
def test_wrong_flags_end_with_a_message(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_options(flags)
    assert exit_info.value.code == 2
    assert "error:" in capsys.readouterr().err


def _stop_at(server: FakeServer, num_asked: int, signum: signal.Signals) -> threading.Thread:
    """Send this process a signal when the server has been asked so many times, and a little later."""

    def wait_and_stop() -> None:
        wait_until(lambda: len(server.bodies) >= num_asked, f"{num_asked} requests")
        time.sleep(0.3)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=wait_and_stop)
    thread.start()
    return thread


_SLOW: Steps = [CHUNKED, chunk(text_event("a")), 60.0]
_FIVE = ("--api", "openai-completions", "--prompt_len", "5", "--output_len", "2", "--num_prompts", "5")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_reports_what_is_complete(
    signum: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = FakeServer(lambda number: completion(2, usage=2) if number < 3 else _SLOW)
    stopper = _stop_at(server, 5, signum)
    status, result = _run(server, *_FIVE, "--client_processes", "2", tmp_path=tmp_path)
    stopper.join()
    assert status == 128 + signum
    assert (result["results"]["num_requests"], result["results"]["num_done"]) == (3, 3)
    assert result["interruption"] == f"{signum.name} came when 3 of 5 requests had ended"
    assert f"INCOMPLETE: {result['interruption']}" in capsys.readouterr().out


def test_a_run_that_is_interrupted_while_it_warms_up_reports_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = FakeServer(lambda _: _SLOW)
    stopper = _stop_at(server, 1, signal.SIGTERM)
    status, result = _run(server, *_FIVE, "--num_warmups", "1", tmp_path=tmp_path)
    stopper.join()
    assert (status, result, len(server.bodies)) == (143, {}, 1)
    assert "nothing to report: SIGTERM came when 0 of 5 requests had ended" in capsys.readouterr().err


def test_ctrl_c_before_the_load_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark_sharegpt, "make_workload", interrupt)
    status, _ = _run(FakeServer(lambda _: []), *_FIVE, tmp_path=tmp_path)
    assert (status, capsys.readouterr().err) == (130, "benchmark_sharegpt: interrupted\n")


def test_a_whole_run_is_not_said_to_be_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, result = _run(FakeServer(lambda _: completion(2, usage=2)), *_FIVE, tmp_path=tmp_path)
    assert result["interruption"] is None
    assert "INCOMPLETE" not in capsys.readouterr().out


def test_a_client_tells_what_is_done_failed_and_open() -> None:
    server = FakeServer(lambda number: [completion(1, usage=1), _BAD_ANSWERS["http_503"], _SLOW][min(number, 2)])

    async def run() -> Progress:
        async with listening(server) as url:
            job = Job(url, "openai-completions", None, None, None, [TimedRequest(i, 0.0, b"{}") for i in range(4)])
            client = Client(job)
            running = asyncio.create_task(client.run(time.monotonic()))
            while len(client.outcomes) < 2:
                await asyncio.sleep(0.01)
            progress = client.progress
            running.cancel()
            await asyncio.wait([running])
            return progress

    assert asyncio.run(run()) == Progress(num_done=1, num_failed=1, num_open=2)


def test_without_a_terminal_a_line_every_5_s_says_where_a_run_stands() -> None:
    now_s, stream = 100.0, io.StringIO()
    lines = ProgressLines(stream, "9 requests", lambda: now_s)
    for num_done in range(12):
        now_s += 1.0
        lines.show(Progress(num_done, 1, 3))
    assert stream.getvalue() == "9 requests: 4 done, 1 failed, 3 open\n9 requests: 9 done, 1 failed, 3 open\n"


def test_on_a_terminal_one_line_is_always_new() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    lines = ProgressLines(stream, "9 requests", lambda: 0.0)
    lines.show(Progress(1, 0, 3))
    lines.show(Progress(2, 0, 3))
    assert "\n" not in stream.getvalue()
    assert [text.strip() for text in stream.getvalue().split("\r") if text] == [
        "9 requests: 1 done, 0 failed, 3 open",
        "9 requests: 2 done, 0 failed, 3 open",
    ]
