"""Keys and their files, the limits of each, and turns between keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fake_api import FakeBackend, ask, error, serving

from tiermoe.cluster.api.admission import Admission
from tiermoe.cluster.api.keys import ANYONE, Key, KeyRing, read_keys
from tiermoe.errors import ConfigError

_FILE = """
# who may ask
sesame-open
0123456789abcdef  name=batch tokens=50 requests=3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys", _FILE)


def write(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    return file


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_line_is_a_key_and_its_limits(file: Path) -> None:
    first, second = read_keys(file)
    assert (first, first.secret) == (Key("key-3", b"sesame-open"), b"sesame-open")
    assert second == Key("batch", b"0123456789abcdef", requests=3, tokens=50)
    assert "sesame" not in repr((first, second))


def test_the_prefix_cache_is_salted_by_key(tmp_path: Path) -> None:
    """By its name, which stays when its secret is replaced, else by its secret: a line's number may be another's."""

    def salts(text: str) -> list[str]:
        return [key.cache_salt() for key in read_keys(write(tmp_path / "keys", text))]

    before = salts("one\ntwo\nthree name=web\nfour name=key-9\n")
    assert len({"", *before}) == 5
    assert salts("two\nsix\nseven name=web\nfour name=key-9") == [before[1], salts("six")[0], *before[2:]]
    (key,) = read_keys(write(tmp_path / "keys", "one name=web"))
    assert len({key.cache_salt(own) for own in (None, "a", "b", "web", "\ud800")}) == 5
    assert len({ANYONE.cache_salt(own) for own in (None, "a", "b")} | {key.cache_salt("a")}) == 4
    assert ANYONE.cache_salt() == ""


@pytest.mark.parametrize("shares", [False, True])
def test_requests_carry_the_salt_of_their_key_and_their_own(tmp_path: Path, shares: bool) -> None:
    """Of every route; `--share-prefix-cache` leaves their own."""
    file, backend = write(tmp_path / "keys", "one name=a\ntwo name=b\n"), FakeBackend()

    async def call(http: httpx.AsyncClient) -> list[int]:
        found = []
        for path, body in (
            ("/v1/completions", {"prompt": "p"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}]}),
            ("/v1/responses", {"input": "p"}),
        ):
            for key in ("one", "two"):
                for own in ({}, {"cache_salt": "x"}):
                    answer = await http.post(path, json=body | own, headers=bearer(key))
                    assert "warning" not in answer.headers
                    found.append(answer.status_code)
        return found

    assert set(ask(backend, call, keys=file, share_prefix_cache=shares)) == {200}
    salts = [request.cache_salt for request in backend.requests]
    assert salts[:4] == salts[4:8] == salts[8:]
    assert len(set(salts)) == (2 if shares else 4)
    assert ("" in salts) == shares


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "holds no key"), (" \n# only words\n", "holds no key"), ("naïve", "line 1: the key is not printable"),
     ("a\nhush words", "line 2: word 2 is not an option"), ("a requests=0", "not an option"),
     ("a tokens=many", "not an option"),
     ("a name=a/b", "not an option"), ("a name=b name=c", "word 3 is not an option"), ("a\nb\na", "same key"),
     ("a name=x\nb name=x", "same name")],
)  # fmt: skip
def test_what_is_no_key_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_keys(write(tmp_path / "keys", text))
    assert "words" not in str(caught.value)  # what looks like a part of a key is not shown


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660])
def test_a_file_that_others_may_read_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match="others may read"):
        read_keys(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(file.with_name("none"))


def test_a_file_is_read_again_when_it_changes(file: Path) -> None:
    now_s = 0.0
    ring = KeyRing(file, lambda: now_s)

    def known() -> list[str]:
        keys = ("sesame-open", "0123456789abcdef", "new")
        return [key for key in keys if ring.find(f"Bearer {key}".encode()) is not None]

    assert known() == ["sesame-open", "0123456789abcdef"]
    write(file.with_name("next"), "new").replace(file)
    assert known() == ["sesame-open", "0123456789abcdef"]  # it looks once a second
    now_s = 1.0
    assert known() == ["new"]


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda file: (write(file, "0123456789abcdef name=batch\nnew"), file.chmod(0o644)), ["0123456789abcdef"]),
        (lambda file: write(file, "# none\n"), []),
        (lambda file: write(file, "sesame-open\nnew\nno option"), ["sesame-open"]),
        (lambda file: write(file, "sesame-open\nsesame-open"), ["sesame-open"]),
        (lambda file: file.unlink(), ["sesame-open", "0123456789abcdef"]),  # it says nothing about keys
        (lambda file: (file.unlink(), file.symlink_to("nowhere")), ["sesame-open", "0123456789abcdef"]),
    ],
)  # fmt: skip
def test_a_refused_file_takes_keys_out_of_force_and_brings_none(
    file: Path, change: Callable[[Path], object], left: list[str]
) -> None:
    """A key that was removed got 200 as long as others could read the file, and nobody saw the message."""
    now_s, refused = 0.0, list[str]()
    ring = KeyRing(file, lambda: now_s, refused.append)
    change(file)
    now_s = 1.0
    keys = ("sesame-open", "0123456789abcdef", "new")
    assert [key for key in keys if ring.find(f"Bearer {key}".encode()) is not None] == left
    now_s = 2.0
    assert ring.refresh() == refused[0]
    assert len(refused) == 1
    assert "in force" in refused[0]
    assert not any(key in refused[0] for key in keys)
    now_s = 3.0
    file.unlink(missing_ok=True)
    write(file, _FILE)
    assert ring.refresh() is None
    assert ring.find(b"Bearer sesame-open") is not None


def test_keys_open_everything_but_health(file: Path) -> None:
    good = [bearer("sesame-open"), bearer("0123456789abcdef"), {"Authorization": "bEARER  sesame-open"}]
    bad: list[dict[str, str]] = [{}, bearer("wrong"), {"Authorization": "sesame-open"}, bearer(""),
                                 {"Authorization": "Basic sesame-open"}]  # fmt: skip

    async def call(http: httpx.AsyncClient) -> list[int]:
        paths = ["/v1/models", "/metrics", "/version", "/ready", "/docs", "/openapi.json", "/nothing"]
        found = []
        for headers in (*bad, *good):
            found += [(await http.get(path, headers=headers)).status_code for path in paths]
            found.append((await http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)).status_code)
        found.append((await http.get("/health")).status_code)
        return found

    answers = [200] * 6 + [404, 200]
    assert ask(FakeBackend(), call, keys=file) == [401] * 8 * len(bad) + answers * len(good) + [200]


def test_a_key_has_its_own_limits(file: Path) -> None:
    backend = FakeBackend(max_requests=1)

    async def call() -> None:
        service, client = serving(backend, keys=file)
        backend.hold = asyncio.Event()

        def start(key: str, prompt: str, n: int = 1) -> asyncio.Task[httpx.Response]:
            body = {"prompt": prompt, "n": n}
            return asyncio.create_task(http.post("/v1/completions", json=body, headers=bearer(key)))

        async with client() as http:
            first = start("sesame-open", "a")
            await until(lambda: service.admission.inside == 1)
            batch = [start("0123456789abcdef", "b" * 40)]
            await until(lambda: service.admission.waiting == 1)
            status, _, message = error(await start("0123456789abcdef", "c" * 20))
            assert (status, message) == (
                429, "40 of 50 prompt tokens wait for key 'batch'; try again in a moment"
            )  # fmt: skip
            batch.append(start("0123456789abcdef", "d" * 5, 2))
            await until(lambda: service.admission.waiting == 3)
            status, _, message = error(await start("0123456789abcdef", "e"))
            assert (status, "3 of 3 requests under way" in message) == (429, True)
            others = [start("sesame-open", "f") for _ in range(4)]  # whom that does not concern
            await until(lambda: service.admission.waiting == 7)
            backend.hold.set()
            assert {task.status_code for task in await asyncio.gather(first, *batch, *others)} == {200}
        assert service.admission.waiting == service.admission.inside == 0

    asyncio.run(asyncio.wait_for(call(), 20))


async def until(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0)


def turns(running: int, asked: list[tuple[str, int]], generated: int = 0) -> list[str]:
    """Whose choices run, in order, where all of them have come before the first one is served."""
    order: list[str] = []

    async def choice(admission: Admission, key: Key, tokens: int) -> None:
        async with admission.slot(key, tokens):
            order.append(key.name)
            admission.charge(key, generated)
            await asyncio.sleep(0)
        admission.leave(key)

    async def all_of() -> None:
        admission = Admission(running, 100)
        blocker = Key("blocker")
        admission.admit(blocker, [0] * running)
        async with admission.slot(blocker, 0):
            tasks = []
            for name, tokens in asked:
                admission.admit(Key(name), [tokens])
                tasks.append(asyncio.create_task(choice(admission, Key(name), tokens)))
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert admission.inside == admission._granted == 0

    asyncio.run(asyncio.wait_for(all_of(), 20))
    return order


def test_turns_go_by_tokens_served() -> None:
    assert turns(1, [("a", 1)] * 3 + [("b", 1)] * 3) == ["a", "b", "a", "b", "a", "b"]
    assert turns(1, [("a", 3)] * 2 + [("b", 1)] * 5) == ["a", "b", "b", "b", "a", "b", "b"]
    assert turns(1, [("a", 0)] * 4 + [("b", 8)] * 2, generated=4) == ["a", "b", "a", "a", "b", "a"]
    assert turns(1, [("a", 5), ("a", 1), ("a", 9)]) == ["a", "a", "a"]


def test_prompts_beyond_the_kv_cache_wait_where_keys_have_turns() -> None:
    """Guards: all 64 slots of the runtime were one key's long prompts, behind which another key's waited."""

    async def call() -> tuple[list[str], list[str]]:
        admission, order = Admission(64, 100, prompt_tokens=1000), list[str]()
        first = asyncio.Event()

        async def choice(name: str, tokens: int) -> None:
            admission.admit(Key(name), [tokens])
            async with admission.slot(Key(name), tokens) as begun:
                order.append(name)
                await first.wait()
                begun()
                begun()
            admission.leave(Key(name))

        tasks = [asyncio.create_task(choice("long", 400)) for _ in range(6)]
        await until(lambda: len(order) == 2)
        tasks += [asyncio.create_task(choice("short", 10)), asyncio.create_task(choice("huge", 5000))]
        for _ in range(20):
            await asyncio.sleep(0)
        given = list(order)
        tasks[2].cancel()  # waits
        tasks[1].cancel()  # has its turn, and no token
        first.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.inside == admission._granted == admission._unbegun == 0
        return given, order

    given, order = asyncio.run(asyncio.wait_for(call(), 20))
    assert given == ["long", "long"]
    assert (order[2:4], order.count("long"), order.count("huge")) == (["long", "short"], 5, 1)


def test_a_rest_saves_nothing_up() -> None:
    async def call() -> list[str]:
        admission, order = Admission(1, 100), []

        async def choice(name: str, tokens: int) -> None:
            admission.admit(Key(name), [tokens])
            async with admission.slot(Key(name), tokens):
                order.append(name)
                await asyncio.sleep(0)
            admission.leave(Key(name))

        for _ in range(10):
            await choice("busy", 100)
        await asyncio.gather(*(choice(name, 100) for name in ["busy"] * 4 + ["late"] * 4))
        return order[10:]

    # the thousand tokens that `late` did not ask for are no credit
    assert asyncio.run(call()) == ["busy"] + ["busy", "late"] * 3 + ["late"]


@pytest.mark.parametrize("served", [False, True])
def test_who_leaves_the_queue_keeps_no_slot(served: bool) -> None:
    async def call() -> None:
        admission, key = Admission(1, 10), Key("a", tokens=100)

        async def choice() -> None:
            async with admission.slot(key, 5):
                pass

        admission.admit(key, [5, 5, 5])
        async with admission.slot(key, 5):
            waiting = asyncio.create_task(choice())
            await asyncio.sleep(0)
            if not served:
                waiting.cancel()
                await asyncio.sleep(0)
        waiting.cancel()  # its turn has come, and it has not noticed
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(choice(), 5)
        assert admission._shares["a"].waiting_tokens == 0

    asyncio.run(call())
