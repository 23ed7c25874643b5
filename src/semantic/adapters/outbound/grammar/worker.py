"""The process in which a grammar is tried before the server compiles it.

Compiling is bounded by nothing but the process it happens in. This one may use so much memory and
so much time, and is ended by the system when it exceeds them; the server starts another. It reads
grammars from its parent and answers with what is wrong with each. When the parent is gone it ends.

Imports neither a backend nor a web framework, so that it starts quickly and stays small.
"""

import contextlib
import json
import resource
import signal
import sys
from multiprocessing.connection import Connection

from semantic.adapters.outbound.grammar.constraint import Closing
from semantic.adapters.outbound.grammar.vocabulary import Vocabulary

MAX_CPU_S = 2.0  # for one grammar
MAX_MEMORY = 512 * 2**20  # for everything
_NUM_STEPS = 8


def main() -> None:
    """Answer until the parent closes its end."""
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        layout = connection.recv()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ValueError):  # some systems know no such limit
            resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
        vocabulary = Vocabulary(layout)
        connection.send_bytes(b"ready")
        while True:
            text = connection.recv_bytes().decode()
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # its signal ends the process
            verdict = try_grammar(text, vocabulary)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps(verdict).encode())


def try_grammar(text: str, vocabulary: Vocabulary) -> tuple[str, list[str]]:
    """Compile a grammar and begin a reply with it.

    Returns:
        What is wrong with it, if anything, and what of it is not enforced.
    """
    matcher = vocabulary.compile(text)
    warnings = matcher.get_grammar_warnings()
    closing = Closing(vocabulary)
    for _ in range(_NUM_STEPS):
        if matcher.is_stopped():
            break
        vocabulary.mask(matcher)
        options = closing.options(matcher)
        if not options or not matcher.consume_tokens(options[0][:_NUM_STEPS]):
            break
    return matcher.get_error(), warnings


if __name__ == "__main__":
    main()
