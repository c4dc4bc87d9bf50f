"""Model of a disk that loses power: what of the files under one folder survives, by what POSIX promises and no more.

The bytes of a file survive from the moment it is fsynced, and its name from the moment its folder is; all else is up to
the file system. ``Disk`` is told of every fsync. ``lose`` puts the files back to what could be found after a loss of
power: to what was synced and nothing else, or with ``random.Random`` to a mixture in which each name and each file's
newer bytes may have reached the disk, whole, cut short, or as zeros. All that is there at first counts as synced.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

Names = dict[str, int]  # what a folder holds: names and inodes
Tree = dict[str, "Tree | bytes"]


class Disk:
    """The files under ``root``, by inode. An inode that is known is kept open, so that no other gets its number."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._open, self._close, self._scan, self._stat = os.open, os.close, os.scandir, os.stat  # not yet replaced
        self._handles: dict[int, int] = {}
        self._synced: dict[int, Names | bytes] = {}  # by inode: a folder's names or a file's bytes
        self._top = self._know(self._root)
        self._sync_tree(self._root)

    def sync(self, path: int | str) -> None:
        """A file or folder, given by a descriptor or a path, is on the disk now as it is."""
        inode = self._know(path)
        if inode is not None:
            self._synced[inode] = self._now(inode)

    def sizes(self, ending: str, *, synced: bool) -> dict[str, int]:
        """How many bytes the files whose names end so have, or how many of those are ``synced``, by path.

        Folders that are on their way out, which hidden names have, do not count.
        """
        found = {}
        for path in sorted(Path(self._root).rglob(f"*{ending}")):
            if any(part.startswith(".") for part in path.relative_to(self._root).parts):
                continue
            status = self._stat(path)
            content = self._synced.get(status.st_ino, b"")
            found[str(path.relative_to(self._root))] = len(content) if synced else status.st_size
        return found

    def lose(self, rng: random.Random | None = None) -> None:
        """Put the files back to what is found when power is there again."""
        for folder, folders, files in os.walk(self._root):
            for name in folders + files:
                self._know(f"{folder}/{name}")
        assert self._top is not None
        tree = self._found(self._top, rng)
        assert isinstance(tree, dict)
        _restore(Path(self._root), tree)

    def _know(self, path: int | str) -> int | None:
        """The inode of a path; None for what is neither a file nor a folder, or has gone."""
        where = f"/proc/self/fd/{path}" if isinstance(path, int) else path
        if not (Path(where).is_file() or Path(where).is_dir()):
            return None
        handle = self._open(where, os.O_PATH)
        inode = os.fstat(handle).st_ino
        if inode in self._handles:
            self._close(handle)
        else:
            self._handles[inode] = handle
        return inode

    def _sync_tree(self, path: str) -> None:
        self.sync(path)
        if Path(path).is_dir():
            with self._scan(path) as entries:
                for entry in entries:
                    self._sync_tree(entry.path)

    def _now(self, inode: int) -> Names | bytes:
        where = f"/proc/self/fd/{self._handles[inode]}"
        if Path(where).is_dir():
            with self._scan(where) as entries:
                return {entry.name: entry.inode() for entry in entries}
        fd = self._open(where, os.O_RDONLY)
        try:
            return os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            self._close(fd)

    def _found(self, inode: int, rng: random.Random | None) -> Tree | bytes:
        now = self._now(inode)
        if isinstance(now, bytes):
            synced = self._synced.get(inode, b"")
            assert isinstance(synced, bytes)
            return synced if rng is None else rng.choice([synced, now, *_torn(synced, now, rng)])
        names = self._synced.get(inode, {})
        assert isinstance(names, dict)
        if rng is not None:
            found: Names = {}
            for name in names | now:
                target = rng.choice((names, now)).get(name)
                if target is not None:
                    found[name] = target
            names = found
        return {name: self._found(target, rng) for name, target in names.items() if target in self._handles}


def _torn(synced: bytes, now: bytes, rng: random.Random) -> list[bytes]:
    """Bytes of a file that has grown, of which some have reached the disk, or its size and none of them."""
    if len(now) <= len(synced) or not now.startswith(synced):
        return []
    cut = rng.randrange(len(synced), len(now))
    return [now[:cut], now[:cut] + bytes(len(now) - cut)]


def _restore(folder: Path, tree: Tree) -> None:
    """Make a folder hold ``tree``; what it holds of that already is left alone."""
    folder.mkdir(exist_ok=True)
    for path in list(folder.iterdir()):
        wanted = tree.get(path.name)
        if wanted is None or path.is_dir() != isinstance(wanted, dict):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, content in tree.items():
        path = folder / name
        if isinstance(content, dict):
            _restore(path, content)
        elif not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
