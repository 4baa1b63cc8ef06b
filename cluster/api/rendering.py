"""The process that renders chat templates: `python -m tiermoe.cluster.api.rendering`, started by `templates.py` alone.

A chat template is a program that came with a checkpoint: it may loop for ever, or fill the memory. Jinja's sandbox, in
which transformers runs it, bounds neither, and Python cannot end a thread. So it runs in a process that can be killed:

    server  --control-->  this process (transformers is imported, no template runs)  --fork-->  a worker for each socket

This process has one thread, and a fork of it takes milliseconds where its start takes a second. Control messages are
the id of a worker to kill (0: none), with or without a socket for a new one. Workers answer one request at a time: a
length in eight bytes, then JSON. All end with their server, whose end closes the sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

RESULT_CHARACTERS = 32 * 2**20  # eight times a body
MEMORY_BYTES = 2**30  # of a worker, over what it has at its start
LENGTH_BYTES = 8
_WORDS = 10_000  # of one template, at most
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def pack(value: Any) -> bytes:
    """A message of a worker's socket."""
    encoded = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(LENGTH_BYTES) + encoded


def unpack(encoded: bytes) -> Any:
    """What a message says, without its length."""
    return json.loads(encoded.decode("utf-8", "surrogatepass"))


def line(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class Worker:
    """Carries requests out: `load`, then `template` and any number of `compile` and `render`."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._carry_out: dict[str, Callable[..., Any]] = {
            "load": self._load, "template": self._template, "compile": self._compile, "render": self._render
        }  # fmt: skip

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`{"found": result}`, or `{"failed": why}`: a template is a program of the checkpoint and is not trusted."""
        try:
            ((name, given),) = request.items()
            return {"found": self._carry_out[name](**given)}
        except MemoryError:
            return {"failed": f"it needs more than {MEMORY_BYTES >> 20} MiB"}
        except Exception as error:
            return {"failed": line(error)}

    def _load(self, folder: str, class_name: str) -> tuple[Any, dict[str, Any]]:
        """The templates and special tokens of a checkpoint's folder, as its tokenizer's class has them."""
        import transformers

        plain = transformers.PreTrainedTokenizerFast
        suits = class_name.endswith(("Tokenizer", "TokenizerFast"))
        named = getattr(transformers, class_name, None) if suits else None
        failure: Exception | None = None
        # a class has special tokens where the files name none
        for made in ([named] if isinstance(named, type) and issubclass(named, plain) else []) + [plain]:
            try:
                found = made.from_pretrained(folder, tokenizer_object=_no_vocabulary(), local_files_only=True)
                return found.chat_template, found.special_tokens_map
            except Exception as error:
                failure = error
        assert failure is not None
        raise failure

    def _template(self, source: str | dict[str, str], tokens: Mapping[str, Any]) -> None:
        from transformers import PreTrainedTokenizerFast

        # without a vocabulary: its templates are wanted, and tokens are made by `tokenizers` alone
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=_no_vocabulary(), chat_template=source, **tokens)

    def _compile(self, source: str) -> dict[str, list[str]]:
        """Names that the template reads, and the words in it: what callers may give, and which values it compares."""
        from jinja2 import nodes
        from transformers.utils.chat_template_utils import _compile_jinja_template

        tree = _compile_jinja_template(source).environment.parse(source)
        names = {found.name for found in tree.find_all(nodes.Name) if found.ctx == "load"}
        words = {found.value for found in tree.find_all(nodes.Const) if isinstance(found.value, str)}
        return {"names": sorted(names)[:_WORDS], "words": sorted(word for word in words if len(word) <= 16)[:_WORDS]}

    def _render(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> str:
        text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, **given))
        if len(text) > RESULT_CHARACTERS:
            raise ValueError(f"the prompt would have more than {RESULT_CHARACTERS} characters")
        return text


def _no_vocabulary() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE())


def _work(lane: socket.socket, server: int) -> None:
    """A worker's life."""
    with contextlib.suppress(OSError, AttributeError):  # of Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        return
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES,) * 2)
    worker, stream = Worker(), lane.makefile("rwb")
    stream.write(pack(os.getpid()))
    stream.flush()
    while head := stream.read(LENGTH_BYTES):
        stream.write(pack(worker.answer(unpack(stream.read(int.from_bytes(head))))))
        stream.flush()


def _serve(control: socket.socket) -> None:
    workers = set[int]()
    ended, tells = os.pipe()  # written by the signal of a worker's end
    os.set_blocking(ended, False)
    os.set_blocking(tells, False)
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        readable, _, _ = select.select([control.fileno(), ended], [], [])
        if ended in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, 4096)
        # a worker that is not waited for keeps its id, so no other process is killed
        workers -= {pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0]}
        if control.fileno() not in readable:
            continue
        said, sockets, _, _ = socket.recv_fds(control, 32, 1)
        for pid in list(workers):
            if not said or pid == int(said):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                workers.discard(pid)
        if not said:
            return
        for number in sockets:
            own = os.getpid()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(ended)
                os.close(tells)
                control.close()
                with socket.socket(fileno=number) as lane, contextlib.suppress(OSError):
                    _work(lane, own)
                os._exit(0)
            workers.add(pid)
            os.close(number)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may have chosen another: workers would be lost
    with open(os.devnull, "rb") as nothing, socket.socket(fileno=os.dup(0)) as control:
        os.dup2(nothing.fileno(), 0)
        from transformers import PreTrainedTokenizerFast  # noqa: F401  (before the forks)
        from transformers.utils.chat_template_utils import render_jinja_template

        render_jinja_template([], chat_template="")  # imports jinja2
        _serve(control)


if __name__ == "__main__":
    main()
