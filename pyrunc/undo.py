"""Undoes an operation that fails. The operation pushes an undo step for each object that it makes;
after a failure the steps run in reverse order.

If an undo step fails as well, the exception gets a note that says what was left behind.
"""

from __future__ import annotations

# Importing typing takes longer than this whole module, and the fast verbs import it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Literal


class Undo:
    """A stack of undo steps around an operation::

        with Undo() as undo:
            os.mkdir(path)
            undo.push(f"directory {path}", os.rmdir, path)
            …
            undo.commit()

    Leaving the `with` block without `commit`, by an exception or not, runs the steps in reverse
    order.
    """

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[..., object], tuple[Any, ...]]] = []

    def push(self, name: str, function: Callable[..., object], *arguments: Any) -> None:
        """Push a step: `function(*arguments)` undoes what `name` describes."""
        self._steps.append((name, function, arguments))

    def commit(self) -> None:
        """Drop all steps, because the operation has succeeded."""
        self._steps.clear()

    def run(self) -> list[str]:
        """Run all steps in reverse order. A step that fails does not stop the others. Returns a
        line for each step that failed."""
        failed = []
        while self._steps:
            name, function, arguments = self._steps.pop()
            try:
                function(*arguments)
            # One failing step must not keep the others from running.
            except Exception as error:
                failed.append(f"could not undo {name}: {error}")
        return failed

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        for line in self.run():
            if error is not None:
                error.add_note(line)
        return False
