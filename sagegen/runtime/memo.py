"""What a thread remembers of the calls that it made."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

from sagegen.runtime.explanation import Explanation

#: Kinds of call that a thread remembers; a model has a few, a server with free lengths has many.
_LIMIT = 4096

_Answer = TypeVar("_Answer")


class Memo(threading.local, Generic[_Answer]):
    """Answers by kind of call, and why the last one. Per thread, since a prepared call owns its parameters."""

    def __init__(self) -> None:
        self.answers: dict[tuple[Any, ...], _Answer] = {}
        self.last: Explanation | None = None

    def remember(self, kind: tuple[Any, ...], answer: _Answer) -> None:
        """Keep the answer to calls of a kind."""
        if len(self.answers) >= _LIMIT:
            self.answers.clear()
        self.answers[kind] = answer
