"""Where tests keep native libraries between runs: each takes seconds to compile."""

from pathlib import Path

NATIVE_DIRECTORY = Path(__file__).parents[1] / ".pytest_cache" / "d" / "semantic-native"


def share_native(home: Path) -> None:
    """Make a server with this home use the libraries that other tests compiled."""
    NATIVE_DIRECTORY.mkdir(parents=True, exist_ok=True)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (home / "native").exists():
        (home / "native").symlink_to(NATIVE_DIRECTORY)
