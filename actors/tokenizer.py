"""The tokenizer of a model's folder, for every process: ids and texts are those of transformers' `AutoTokenizer`.

A checkpoint says how text becomes tokens in several files: tokenizer.json, or vocab.json and merges.txt, vocab.txt, a
SentencePiece or tiktoken model, and with each of them tokenizer_config.json, special_tokens_map.json, added_tokens.json
and the model type of config.json. `AutoTokenizer` knows what counts, so it reads them, once for each content:

    folder --AutoTokenizer--> tokenizer.json with all of it --> the user's cache --> `tokenizers`, in every process

Truncation and padding are off: they belong to training. Clean-up of spaces, which transformers does after decoding, is
part of the decoder. transformers imports torch, for seconds: in a process without torch, another one reads the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from ..errors import CheckpointError, told
from ..proto.private import open_own, own_folder, user_cache

GGUF_MARK = "made_from_gguf"  # key of tokenizer_config.json: tokenizer.json has all of it, with llama.cpp's ids
_FORMAT = 5  # of the cached files
_READ_S = 300.0
_VOCABULARY = re.compile(r"tokenizer\.json|vocab\.(json|txt)|tekken\.json|.+\.(model|tiktoken)|tokenizer\.model\..+")
_OTHER = re.compile(r"config\.json|tokenizer.*\.json|.*tokens.*\.json|merges\.txt|.*vocab.*\.(json|txt)")
_LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "protobuf")
_WHOLE = (
    "pass the folder of a whole checkpoint, with the tokenizer's files that its publisher has: tokenizer.json, or "
    "vocab.json and merges.txt, or tokenizer.model"
)
_CLEAN_UP = (  # `PreTrainedTokenizerBase.clean_up_tokenization`
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
    (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of a checkpoint, by its name, decides how text becomes tokens."""
    return is_vocabulary(name) or bool(_OTHER.fullmatch(name))


def is_vocabulary(name: str) -> bool:
    """Whether it has the vocabulary itself."""
    return bool(_VOCABULARY.fullmatch(name))


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a vocabulary in any of the forms that transformers reads."""
    try:
        return any(is_vocabulary(file.name) and file.is_file() for file in folder.iterdir())
    except OSError:  # no folder, or one that this user may not list
        return False


@dataclass(frozen=True)
class TokenizerText:
    """A tokenizer in the form of tokenizer.json.

    json: its text. split_special: special tokens in a text are text. special_tokens: those that have a name, such as
    `eos_token`; None: tokenizer_config.json has them all. The form has no place for these two.
    """

    json: str
    split_special: bool = False
    special_tokens: dict[str, Any] | None = None

    def tokenizer(self) -> Tokenizer:
        """As `tokenizers` has it."""
        made = Tokenizer.from_str(self.json)
        made.encode_special_tokens = self.split_special
        return made

    def encode(self) -> bytes:
        """A line with the rest, and the text."""
        text, rest = self.json.encode(), [self.split_special, self.special_tokens]
        return json.dumps([hashlib.sha256(text).hexdigest(), *rest], default=str).encode() + b"\n" + text

    @classmethod
    def decode(cls, data: bytes) -> TokenizerText:
        """Raises ValueError: not of `encode`, or damaged."""
        line, _, text = data.partition(b"\n")
        digest, split_special, special_tokens = json.loads(line)
        if digest != hashlib.sha256(text).hexdigest():
            raise ValueError("it is damaged")
        return cls(text.decode(), split_special, special_tokens)


def read_tokenizer(folder: Path) -> TokenizerText:
    """The tokenizer of a folder, from the cache where the same files have been read before.

    Raises:
        CheckpointError: there is none, a file is malformed, a package is missing that reads it, or it is not one that
            `tokenizers` can carry out: Python code of the checkpoint or of transformers.
    """
    folder = folder.absolute()
    if not has_tokenizer(folder):
        raise CheckpointError(f"no tokenizer in '{folder}'", _WHOLE)
    cached = _cached(folder)
    if cached is not None:
        with contextlib.suppress(OSError, ValueError, TypeError), open(open_own(cached, os.O_RDONLY), "rb") as file:
            return TokenizerText.decode(file.read())
    found = _read(folder) if "torch" in sys.modules else _read_in_a_process(folder)
    if cached is not None:
        with contextlib.suppress(OSError):  # the next process reads the folder again
            _write(cached, found.encode())
    return found


def _cached(folder: Path) -> Path | None:
    """The file of the cache for what a folder has now; None: this user has no cache."""
    digest = hashlib.sha256(json.dumps([_FORMAT, *(_version(name) for name in _LIBRARIES)]).encode())
    for file in sorted(folder.iterdir()):
        if is_tokenizer_file(file.name) and file.is_file():
            try:
                data = file.read_bytes()
            except OSError as error:
                what = f"'{file}' cannot be read ({error.strerror})"
                raise CheckpointError(what, "make it a file that this user may read") from error
            digest.update(f"\0{file.name}\0{len(data)}\0".encode() + data)
    try:
        return user_cache() / "tokenizers" / digest.hexdigest()[:32]
    except RuntimeError:  # no home
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _write(path: Path, data: bytes) -> None:
    own_folder(own_folder(path.parent.parent) / path.parent.name)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


# --- AutoTokenizer ----------------------------------------------------------------------------------------------------


def _read(folder: Path) -> TokenizerText:
    """What `AutoTokenizer` makes of a folder. Raises as `read_tokenizer`."""
    settings = _json_object(folder / "tokenizer_config.json")
    if settings.get(GGUF_MARK) is True:
        return TokenizerText(_final(_from_file(folder / "tokenizer.json"), clean_up=False))
    try:
        with _quiet():
            from transformers import AutoTokenizer

            found = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, mistral_format=False
            )
    except Exception as error:
        raise _why(folder, settings, error) from error
    backend = getattr(found, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise _slow(folder, type(found).__name__)
    # as in `_decode` of transformers: of BPE only where it is asked for by its long name
    clean_up = bool(found.clean_up_tokenization_spaces) and (
        type(backend.model).__name__ != "BPE"
        or bool(getattr(found, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
    )
    return TokenizerText(_final(backend, clean_up), bool(found.split_special_tokens), found.special_tokens_map)


def _final(backend: Tokenizer, clean_up: bool) -> str:
    backend.no_truncation()
    backend.no_padding()
    wrong, renamed = _shown_otherwise(backend)
    names = [decoders.Replace(old, new) for old, new in renamed.items()]
    steps = [decoders.Fuse(), *(decoders.Replace(old, new) for old, new in _CLEAN_UP)] if clean_up else []
    if names or steps:
        # without a decoder tokens are joined by spaces, as this one joins those that do not begin with NUL
        own = backend.decoder or decoders.WordPiece("\0", cleanup=False)
        backend.decoder = decoders.Sequence([*names, own, *steps])
    text = backend.to_str()
    if wrong:
        parts = json.loads(text)
        for entry in parts["added_tokens"]:
            entry["special"] ^= entry["id"] in wrong
        text = json.dumps(parts, ensure_ascii=False)
    return text


def _shown_otherwise(backend: Tokenizer) -> tuple[set[int], dict[str, str]]:
    """What the text of a tokenizer does not say: ids of added tokens that its decoding takes as special or not against
    their flag, and added tokens that it decodes as another name, by their own.

    A token that has been added twice, with other flags, may be decoded by the first of them.
    """
    again = Tokenizer.from_str(backend.to_str())
    wrong, renamed = set[int](), dict[str, str]()
    for i, token in backend.get_added_tokens_decoder().items():
        shown, kept = (backend.decode([i], skip_special_tokens=skip) for skip in (False, True))
        if shown and token.special != (not kept):
            wrong.add(i)
        own, name = again.id_to_token(i), backend.id_to_token(i)
        if own and name is not None and name != own:
            renamed[own] = name
    return wrong, renamed


def _from_file(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        remedy = "install a newer `tokenizers`, or copy tokenizer.json from where the model is published"
        raise CheckpointError(f"'{path}' cannot be read: {_line(error)}", remedy) from error


def _json_object(path: Path) -> dict[str, Any]:
    """A JSON file; empty: it is not there. Raises CheckpointError: it is malformed."""
    if not path.is_file():
        return {}
    remedy = f"correct it, or copy {path.name} from where the model is published"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' is not valid JSON ({_line(error)})", remedy) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"'{path}' is not a JSON object", remedy)
    return found


def _why(folder: Path, settings: dict[str, Any], error: Exception) -> CheckpointError:
    """Why `AutoTokenizer` does not load a folder."""
    names = sorted(file.name for file in folder.iterdir() if is_tokenizer_file(file.name) and file.is_file())
    try:
        if "tokenizer.json" in names:
            _from_file(folder / "tokenizer.json")
        for name in names:
            if name.endswith(".json") and name != "tekken.json":
                _json_object(folder / name)
    except CheckpointError as malformed:
        return malformed
    kind, line = settings.get("tokenizer_class") or "unnamed", _line(error)
    if settings.get("auto_map") is not None and "custom code" in line:
        remedy = "pass a release of the model whose tokenizer is one of transformers'"
        if "tokenizer.json" in names:
            remedy = "if its tokenizer.json gives the same tokens, remove auto_map from tokenizer_config.json in a copy"
        what = f"the tokenizer in '{folder}', {kind}, is Python code of the checkpoint, which is not run"
        return CheckpointError(what, remedy)
    with contextlib.suppress(ImportError, RuntimeError):  # a class that lacks a package
        import transformers

        made = getattr(transformers, str(kind), None)
        if isinstance(made, type) and not issubclass(made, transformers.PreTrainedTokenizerFast):
            return _slow(folder, made.__name__)
    if "tokenizer.json" not in names and (lacking := _lacking(names, line)) is not None:
        model, package = lacking
        return CheckpointError(
            f"the tokenizer in '{folder}' is {model}, which {package} reads, and it is not installed",
            f"install it with: pip install {package}",
        )
    if "tokenizer.json" not in names:
        what = f"no tokenizer that transformers can load in '{folder}', which has {' and '.join(names)}: {line}"
        return CheckpointError(what, _WHOLE)
    return CheckpointError(
        f"the tokenizer's configuration in '{folder}' cannot be read by transformers: {line}",
        "correct tokenizer_config.json, or copy the tokenizer's files from where the model is published",
    )


def _slow(folder: Path, kind: str) -> CheckpointError:
    return CheckpointError(
        f"the tokenizer in '{folder}' is a {kind}, which is Python code of transformers and has no fast form",
        "pass a release of the model whose tokenizer is a fast one",
    )


def _lacking(names: list[str], line: str) -> tuple[str, str] | None:
    """A vocabulary for which a package is missing, and the package. line: what transformers says."""
    for name in names:
        packages = ("sentencepiece", "protobuf", *(["tiktoken"] if "tiktoken" in line else []))
        if "tiktoken" in name:
            packages = ("tiktoken",)
        if name.endswith((".model", ".tiktoken")) or name.startswith("tokenizer.model"):
            for package in packages:
                if _version(package) is None:
                    return name, package
    return None


def _line(error: BaseException) -> str:
    return told(error)[:200] or type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' warnings are for those who call it."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


# --- in another process, which imports no torch ----------------------------------------------------------------------


def _read_in_a_process(folder: Path) -> TokenizerText:
    command = [sys.executable, "-P", "-m", __name__, str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_READ_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        what = f"the tokenizer in '{folder}' was not read within {_READ_S:g} s"
        raise CheckpointError(what, "pass a release of the model with a tokenizer.json") from error
    if done.returncode == 0:
        return TokenizerText.decode(done.stdout)
    try:
        what, remedy = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.decode(errors="replace").split("\n") or [""])[-2:]
        what, remedy = f"the tokenizer in '{folder}' cannot be read: {' '.join(last).strip()[:200]}", _WHOLE
    raise CheckpointError(what, remedy)


def main() -> int:
    """`python -m tiermoe.actors.tokenizer FOLDER`: write what `TokenizerText.encode` gives, or an error as JSON."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers goes on without it, a second sooner
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not the answer
    try:
        answer, code = _read(Path(sys.argv[1])).encode(), 0
    except CheckpointError as error:
        answer, code = json.dumps([error.what, error.remedy]).encode(), 1
    with out:
        out.write(answer)
    return code


if __name__ == "__main__":
    sys.exit(main())
