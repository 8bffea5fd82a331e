import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from lightserve.ipc.links import AsyncInbox, Inbox, Outbox, address
from lightserve.ipc.messages import AbortMsg, ReadyMsg, RouterInbox, StopMsg


class Links:
    """Links of one run directory, closed at the end of the test."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = str(run_dir)
        self.stack = contextlib.ExitStack()

    def inbox(self, name: str = "router") -> Inbox[RouterInbox]:
        return self.stack.enter_context(contextlib.closing(Inbox(self.run_dir, name, RouterInbox)))

    def outbox(self, name: str = "router") -> Outbox:
        return self.stack.enter_context(contextlib.closing(Outbox(self.run_dir, name)))


@pytest.fixture
def links(tmp_path: Path) -> Iterator[Links]:
    links = Links(tmp_path)
    with links.stack:
        yield links


def test_messages_sent_before_the_receiver_exists_arrive_in_order(links: Links) -> None:
    outbox = links.outbox()
    for number in range(1000):
        outbox.send(AbortMsg([number]))
    inbox = links.inbox()

    received = [inbox.receive(timeout_s=5) for _ in range(1000)]

    assert received == [AbortMsg([number]) for number in range(1000)]


def test_a_sleeping_receiver_loses_nothing_and_never_blocks_the_sender(links: Links) -> None:
    inbox, outbox = links.inbox(), links.outbox()
    for number in range(20_000):
        outbox.send(AbortMsg([number]))

    received = [inbox.receive(timeout_s=5) for _ in range(20_000)]

    assert received == [AbortMsg([number]) for number in range(20_000)]


def test_an_undecodable_message_is_logged_and_skipped(links: Links, caplog: pytest.LogCaptureFixture) -> None:
    inbox, outbox = links.inbox(), links.outbox()
    outbox.socket.send(b"\xc1 not MessagePack")
    outbox.send(ReadyMsg("of another link"))
    outbox.send(AbortMsg([1]))

    with caplog.at_level(logging.ERROR):
        assert inbox.receive(timeout_s=5) == AbortMsg([1])

    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_receive_gives_up_after_its_timeout(links: Links) -> None:
    inbox = links.inbox()

    assert inbox.receive(timeout_s=0) is None
    assert inbox.receive(timeout_s=0.01) is None


def test_drain_takes_all_that_has_arrived_and_does_not_wait(links: Links) -> None:
    inbox, outbox = links.inbox(), links.outbox()
    outbox.send(AbortMsg([1]))
    outbox.send(StopMsg([2]))
    assert inbox.receive(timeout_s=5) == AbortMsg([1])

    drained = inbox.drain()
    while not drained:
        time.sleep(0.001)
        drained = inbox.drain()

    assert drained == [StopMsg([2])]
    assert inbox.drain() == []


def test_several_senders_share_an_inbox_each_in_its_order(links: Links) -> None:
    inbox = links.inbox()

    def send_all(sender: int) -> None:
        outbox = Outbox(links.run_dir, "router")
        for number in range(200):
            outbox.send(AbortMsg([sender, number]))
        outbox.close()

    threads = [threading.Thread(target=send_all, args=(sender,)) for sender in range(3)]
    for thread in threads:
        thread.start()
    received = [inbox.receive(timeout_s=5) for _ in range(600)]
    for thread in threads:
        thread.join()

    for sender in range(3):
        own = [
            message.req_ids for message in received if isinstance(message, AbortMsg) and message.req_ids[0] == sender
        ]
        assert own == [[sender, number] for number in range(200)]


def test_inboxes_of_one_run_directory_do_not_mix(links: Links) -> None:
    router, other = links.inbox(), links.inbox("other")
    links.outbox("other").send(AbortMsg([1]))

    assert other.receive(timeout_s=5) == AbortMsg([1])
    assert router.receive(timeout_s=0) is None


def test_the_asynchronous_inbox_receives_and_drains_on_uvloop(links: Links) -> None:
    async def run() -> list[RouterInbox]:
        inbox: AsyncInbox[RouterInbox] = AsyncInbox(links.run_dir, "router", RouterInbox)
        outbox = links.outbox()
        received: list[RouterInbox] = []
        for number in range(0, 200, 2):
            outbox.send(AbortMsg([number]))
            outbox.send(AbortMsg([number + 1]))
            received.append(await inbox.receive())
            received += inbox.drain()
        while len(received) < 200:
            received.append(await inbox.receive())
        inbox.close()
        return received

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        received = runner.run(asyncio.wait_for(run(), timeout=20))

    assert received == [AbortMsg([number]) for number in range(200)]


def test_a_message_survives_the_end_of_its_sender(links: Links) -> None:
    inbox, outbox = links.inbox(), links.outbox()
    outbox.send(AbortMsg([7]))
    outbox.close()

    assert inbox.receive(timeout_s=5) == AbortMsg([7])


def test_an_address_is_a_socket_in_the_run_directory(links: Links) -> None:
    links.inbox()

    assert address("/run/dir", "router") == "ipc:///run/dir/router"
    assert Path(links.run_dir, "router").is_socket()
