import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker import protocol
from worker.protocol import ProtocolError, Writer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for descriptor in (read, write):
        try:
            os.close(descriptor)
        except OSError:
            continue


@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name not in {"type", "kind"}), JSON))
def test_message_survives_the_pipe_whatever_it_holds(members):
    line = protocol.encode("run", **members)
    assert line.count(b"\n") == 1
    assert protocol.decode(line) == {"type": "run", **members}


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"{}", b'{"type": 3}', b"null", b"\xff\xfe"])
def test_line_that_is_no_message_is_refused(line):
    with pytest.raises(ProtocolError):
        protocol.decode(line)


def test_messages_are_found_however_the_bytes_arrive(pipe):
    read, write = pipe
    data = protocol.encode("tick", marks=1) + protocol.encode("tick", marks=2)

    def trickle():
        for index in range(len(data)):
            os.write(write, data[index : index + 1])
        os.close(write)

    thread = threading.Thread(target=trickle)
    thread.start()
    assert [message["marks"] for message in protocol.read_messages(read)] == [1, 2]
    thread.join()


def test_line_that_a_killed_writer_left_unfinished_is_dropped(pipe):
    read, write = pipe
    os.write(write, protocol.encode("ready") + b'{"type": "resu')
    os.close(write)
    assert [message["type"] for message in protocol.read_messages(read)] == ["ready"]


def test_endless_line_is_refused(pipe, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_LINE_BYTES", 1000)
    read, write = pipe
    os.write(write, b"x" * 2000)
    os.close(write)
    with pytest.raises(ProtocolError, match="longer than 1000 bytes"):
        list(protocol.read_messages(read))


def test_writer_sends_more_than_a_pipe_holds(pipe):
    read, write = pipe
    text = "x" * 1_000_000
    received = []
    thread = threading.Thread(target=lambda: received.extend(protocol.read_messages(read)))
    thread.start()
    writer = Writer(write, timeout_s=30)
    writer.send("run", text=text)
    writer.close()
    thread.join()
    assert received == [{"type": "run", "text": text}]


def test_writer_gives_up_on_a_reader_that_is_stuck(pipe):
    writer = Writer(pipe[1], timeout_s=0.05)
    with pytest.raises(ProtocolError, match="nothing was read"):
        writer.send("run", text="x" * 1_000_000)


def test_writer_says_when_the_reader_is_gone(pipe):
    read, write = pipe
    os.close(read)
    with pytest.raises(ProtocolError, match="the reader is gone"):
        Writer(write, timeout_s=None).send("tick")


def test_closed_writer_refuses(pipe):
    writer = Writer(os.dup(pipe[1]), timeout_s=1)
    writer.close()
    writer.close()
    with pytest.raises(ProtocolError, match="closed"):
        writer.send("exit")


def test_messages_of_several_threads_are_not_mixed(pipe):
    read, write = pipe
    received = []
    reader = threading.Thread(target=lambda: received.extend(protocol.read_messages(read)))
    reader.start()
    writer = Writer(write, timeout_s=30)
    threads = [
        threading.Thread(target=lambda n=n: [writer.send("tick", n=n, text="x" * 5000) for _ in range(20)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    reader.join()
    assert sorted(message["n"] for message in received) == [n for n in range(4) for _ in range(20)]


def test_missing_members_are_named():
    with pytest.raises(ProtocolError, match=r"'run' lacks token, requests"):
        protocol.members_of({"type": "run"}, "token", "requests")
