"""A dataset repository on the Hugging Face Hub as a place to publish to: what is written becomes one commit.

A repository that does not exist yet is created, private. The token comes from the library's own places. A card is
generated unless a person has written one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from batchgen.core.remote import RemoteError, attempt, bound_hub
from batchgen.core.units import counted, printable
from batchgen.core.version import __version__
from batchgen.output.bucket import Entry
from batchgen.output.manifest import Manifest

T = TypeVar("T")
_CARD = "README.md"
_CARD_MARK = "<!-- Written by batchgen, and again with each publication. Delete this line to keep your own card. -->"


class HubDataset:
    """The files below ``hf://datasets/USER/NAME[/FOLDER]``, on the main branch. All methods raise RemoteError."""

    def __init__(self, address: str) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # the run has a display of its own
        bound_hub()
        self.address = address.rstrip("/")
        parts = [part for part in self.address.partition("://")[2].split("/") if part]
        self._repo = "/".join(parts[1:3])
        self._folder = "/".join(parts[3:])
        self._api = HfApi()
        self._operations: dict[str, Any] = {}  # of the next commit, by path

    def prepare(self) -> None:
        """Create the repository if it does not exist. Raises RemoteError of kind "refused" without a right to write."""
        from huggingface_hub import CommitOperationAdd

        create, ask = self._api.create_repo, self._api.preupload_lfs_files
        self._do("create", lambda: create(self._repo, repo_type="dataset", private=True, exist_ok=True))
        probe = CommitOperationAdd(self._path("batchgen.json"), b"{}")  # too small to be uploaded before the commit
        self._do("write to", lambda: ask(self._repo, [probe], repo_type="dataset"))

    def entry(self, name: str) -> Entry | None:
        """The file of that name as of the last commit, None if there is none."""
        ask, path = self._api.get_paths_info, self._path(name)
        infos = self._do("look up", lambda: ask(self._repo, [path], repo_type="dataset"))
        return next((Entry(info.size, "") for info in infos if info.path == path and hasattr(info, "size")), None)

    def read(self, name: str) -> bytes | None:
        """The content of a file, None if there is none."""
        fetch = self._api.hf_hub_download
        if self.entry(name) is None:
            return None
        with tempfile.TemporaryDirectory() as cache:
            call = lambda: fetch(self._repo, self._path(name), repo_type="dataset", cache_dir=cache)  # noqa: E731
            return Path(self._do("read", call)).read_bytes()

    def write(self, name: str, content: bytes | Path) -> None:
        """Put a file with this content, or with that of a local file, into the next commit."""
        from huggingface_hub import CommitOperationAdd

        self._operations[name] = CommitOperationAdd(self._path(name), content)

    upload = write

    def remove(self, names: Collection[str]) -> None:
        """Remove files with the next commit; missing ones are passed over."""
        from huggingface_hub import CommitOperationDelete

        for name in names:
            if self.entry(name) is not None:
                self._operations[name] = CommitOperationDelete(self._path(name), is_folder=False)

    def describe(self, manifest: Manifest, report: Mapping[str, Any], outputs: str) -> None:
        """Put a card into the next commit, unless there is one that a person wrote or has made their own."""
        existing = self.read(_CARD)
        if existing is None or _CARD_MARK.encode() in existing:
            is_root = not self._folder
            title = (self._folder or self._repo).rpartition("/")[2]
            self.write(_CARD, card(title, manifest, report, outputs, is_root=is_root).encode())

    def commit(self, message: str) -> None:
        """Make what was written appear, all at once."""
        operations = [*self._operations.values()]
        if operations:
            send = self._api.create_commit
            self._do("write to", lambda: send(self._repo, operations, commit_message=message, repo_type="dataset"))
        self._operations = {}

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name

    def _do(self, doing: str, call: Callable[[], T]) -> T:
        try:
            return attempt(doing, self.address, call)
        except RemoteError as error:
            if error.kind == "missing":
                message = f"cannot {doing} {self.address}: the Hub has no such dataset, or not for this token"
                raise RemoteError(message, "missing") from error
            raise


def card(title: str, manifest: Manifest, report: Mapping[str, Any], outputs: str, *, is_root: bool) -> str:
    """The text of a dataset card: what was generated, with which model and how. The license is left to the user."""
    model = str(manifest.job["model"]["path"])
    model = Path(model).name if model.startswith("/") else model
    sampling = {key: value for key, value in manifest.job["sampling"].items() if value or value == 0}
    rows, tokens = report.get("rows", {}), report.get("tokens", {})
    facts = {
        "model": model,
        "sampling": ", ".join(f"{key} = {value}" for key, value in sampling.items()),
        "rows": f"{rows.get('done', 0):,} generated, {rows.get('failed', 0):,} failed",
        "tokens": f"{tokens.get('prompt', 0):,} in, {tokens.get('completion', 0):,} out",
        "begun": manifest.created_at,
        "finished": report.get("finished_at", ""),
        "batchgen": __version__,
    }
    table = "".join(f"| {key} | {_cell(value)} |\n" for key, value in facts.items())
    head = f"---\nconfigs:\n- config_name: default\n  data_files: {outputs}\n---\n" if is_root else ""
    what = f"{counted(rows.get('done', 0), 'row')} that a language model has generated; `{outputs}` holds them."
    return f"{head}{_CARD_MARK}\n\n# {title}\n\n{what}\n\n| | |\n|---|---|\n{table}"


def _cell(value: object) -> str:
    """A value in one cell of a Markdown table, without any markup of its own."""
    text = printable(str(value)).replace("\\", "\\\\")
    for mark in "|`<>*_[]":
        text = text.replace(mark, f"\\{mark}")
    return text
